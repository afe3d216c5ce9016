"""The link to one peer: the messages that two clusters exchange, and the bytes that they move.

``lifecycle`` lists, as tables, what can happen to a link. ``session`` is what all its parts share, and ``running`` holds the
transfers under way. ``link`` acts on the life of a link, and ``link_handshake`` begins it. ``reactions`` maps each message to
what this end does about it, and ``ownership`` settles which end owns the link.

``connection`` and ``wire`` carry messages, and ``questions`` those that need an answer. ``channels`` reach memory; ``leases``
record which memory of this end the peer may reach. ``requester`` runs transfers for which the peer must be asked, and
``responder`` those that the peer asks for. ``checksums`` compares what arrived with what was sent. ``block_leases`` keeps
blocks for a peer, and ``leased_pull`` pulls such blocks. ``notifications`` announces transfers, and ``layer_events`` layers
that have landed.

The room promises that the failure of a link affects only its own transfers, and that memory is released once nothing can
land in it. It knows nothing of other links.
"""

from aiodatadist.link.awaited_link import AwaitedLink, check_still_usable
from aiodatadist.link.block_leases import BlockLease, BlockLeases, LeaseEnd
from aiodatadist.link.channels import channel_name
from aiodatadist.link.connection import Connection, FirstWords, connected
from aiodatadist.link.layer_events import LayerReceiver
from aiodatadist.link.leased_pull import KeptBlocks
from aiodatadist.link.lifecycle import AWAIT_LINK, Cause, LinkState
from aiodatadist.link.link import DRAIN_TIMEOUT, Link
from aiodatadist.link.notifications import Notification, NotificationInbox
from aiodatadist.link.remote_operation import RemoteOperation, TransferSpec
from aiodatadist.link.running import CALLS
from aiodatadist.link.state import LinkHost
from aiodatadist.link.statistics import LinkCounters, LinkStatistics
from aiodatadist.link.wire import Wire

__all__ = [
           "AWAIT_LINK",
           "CALLS",
           "DRAIN_TIMEOUT",
           "AwaitedLink",
           "BlockLease",
           "BlockLeases",
           "Cause",
           "Connection",
           "FirstWords",
           "KeptBlocks",
           "LayerReceiver",
           "LeaseEnd",
           "Link",
           "LinkCounters",
           "LinkHost",
           "LinkState",
           "LinkStatistics",
           "Notification",
           "NotificationInbox",
           "RemoteOperation",
           "TransferSpec",
           "Wire",
           "channel_name",
           "check_still_usable",
           "connected",
]  # fmt: skip
