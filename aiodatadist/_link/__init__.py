"""The link to one peer: the messages that two clusters exchange, and the bytes that they move.

``control`` is the conversation with the peer, ``data`` reaches its memory, and ``transfers`` are what either end asks for.
``lifecycle`` lists, as tables, what can happen to a link. ``session`` is the peer and the conversation with it, which all
parts of a link share. ``link`` has a session and acts on its life, and ``link_handshake`` begins it. ``reactions`` maps each
message to what this end does about it, and ``ownership`` settles which end owns the link. ``host`` describes the cluster that
a link belongs to.

The room promises that the failure of a link affects only its own transfers, and that memory is released once nothing can
land in it. It knows nothing of other links.
"""

from aiodatadist._link.control.block_leases import BlockLease, BlockLeases, LeaseEnd
from aiodatadist._link.control.connection import Connection, FirstWords, connected
from aiodatadist._link.control.layer_events import LayerReceiver
from aiodatadist._link.control.notifications import Notification, NotificationInbox
from aiodatadist._link.control.peer_share import PeerShares
from aiodatadist._link.control.proving import Prove, agree_on_key, prover_of
from aiodatadist._link.control.wire import Wire
from aiodatadist._link.data.channels import channel_name
from aiodatadist._link.data.data_connections import AwaitedConnections, DataConnections
from aiodatadist._link.data.remote_operation import RemoteOperation, TransferSpec, failed
from aiodatadist._link.data.statistics import LinkCounters, LinkStatistics
from aiodatadist._link.host import LinkHost
from aiodatadist._link.lifecycle import AWAIT_LINK, Cause, LinkState
from aiodatadist._link.link import DRAIN_TIMEOUT, Link
from aiodatadist._link.link_handshake import LinkRequest
from aiodatadist._link.transfers.awaited_link import AwaitedLink, check_still_usable
from aiodatadist._link.transfers.leased_pull import KeptBlocks
from aiodatadist._link.transfers.ranges import RangeSpec, grids_of
from aiodatadist._link.transfers.running import CALLS
from aiodatadist._link.transfers.transfers import Transfers

__all__ = [
           "AWAIT_LINK",
           "CALLS",
           "DRAIN_TIMEOUT",
           "AwaitedConnections",
           "AwaitedLink",
           "BlockLease",
           "BlockLeases",
           "Cause",
           "Connection",
           "DataConnections",
           "FirstWords",
           "KeptBlocks",
           "LayerReceiver",
           "LeaseEnd",
           "Link",
           "LinkCounters",
           "LinkHost",
           "LinkRequest",
           "LinkState",
           "LinkStatistics",
           "Notification",
           "NotificationInbox",
           "PeerShares",
           "Prove",
           "RangeSpec",
           "RemoteOperation",
           "TransferSpec",
           "Transfers",
           "Wire",
           "agree_on_key",
           "channel_name",
           "check_still_usable",
           "connected",
           "failed",
           "grids_of",
           "prover_of",
]  # fmt: skip
