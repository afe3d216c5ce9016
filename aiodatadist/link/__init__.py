"""One peer: what two linked clusters say to each other, and what they move.

``lifecycle`` says, as tables, what can happen to a link. ``session`` is what all its parts share, ``running`` the transfers
that are under way. ``link`` acts on the life of a link, and ``link_handshake`` begins it. ``reactions`` has what this end
does about each message, and ``ownership`` settles which end owns the link.

``connection`` and ``wire`` carry messages, and ``questions`` those that are answered. ``channels`` reach memory; ``leases``
say what of this end's memory the peer may reach. ``requester`` and ``responder`` are transfers for which the peer must be
asked, and those that it asks for. ``checksums`` compares what arrived with what was sent. ``block_leases`` keeps blocks for a
peer, and ``leased_pull`` pulls such blocks. ``notifications`` tell of transfers, and ``layer_events`` of layers that landed.

Promises: whatever happens to a link costs its own transfers only, and memory is given back when nothing can land in it any
more. Refuses to know: other links.
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
