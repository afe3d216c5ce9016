"""A shortcut for small transfers of blocks that are repeated between the same two caches.

What does not change is kept, and the rest is one call of C. Most such transfers have ended when it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodatadist._cache.catalogue import RemoteCache
    from aiodatadist._cache.table import Entry
    from aiodatadist._cache.task import AtOnce
    from aiodatadist._counting import Flow
    from aiodatadist._device import BlockRun
    from aiodatadist._link.data.channels import LinkChannel


@dataclass(frozen=True, slots=True)
class Shortcut:
    """A short way for gets or puts of whole blocks, in all tensors, between a cache of each end over one channel.

    It is made when such a transfer has taken the long way, where everything was checked that does not change.

    Attributes:
        what: pulled, pushed or served.
        is_critical: True if the transfers are.
        entry: the cache at this end.
        remote: the cache at the peer.
        link_channel: the channel that reaches both.
        blocks: runs the transfers.
        seconds: the time limit of each.
        flow: counts the transfers.
        common: what the tasks of the transfers have in common.
    """

    what: str
    is_critical: bool
    entry: Entry
    remote: RemoteCache
    link_channel: LinkChannel
    blocks: BlockRun
    seconds: float
    flow: Flow
    common: AtOnce
