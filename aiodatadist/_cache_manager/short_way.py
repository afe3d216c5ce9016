"""The short way: the one place that decides if a pull or push of blocks may repeat an earlier one with other blocks."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

from aiodatadist._device import packed
from aiodatadist._link import LinkState
from aiodatadist._values.descriptors import BlocksCacheKey, Cache
from aiodatadist._values.transfer_priority import TransferPriority

if TYPE_CHECKING:
    from aiodatadist._cluster.engine import Engine
    from aiodatadist._link.transfers.shortcuts import Shortcut

_LISTS: Final = frozenset({list, tuple, range, array})
"""Types of block lists that a shortcut reads."""
_DEADLINES: Final = frozenset({type(None), int, float})


def short_way(
    engine: Engine,
    direction: str,
    key: Any,
    cache: Any,
    mine: Any,
    theirs: Any,
    src_layers: Any,
    dst_layers: Any,
    tensors: Any,
    notify: Any,
    checksum: Any,
    priority: Any,
    deadline: Any,
) -> tuple[Shortcut, bytes, int] | None:
    """Return the shortcut that a transfer may take, the packed numbers of its blocks, and their count at either end.

    Return None if the transfer must take the long way. Everything that can be wrong with a call, or has changed since an
    earlier one, leads to the long way, which reports it. Nothing here raises by itself, so that both ways raise the same
    errors.

    Args:
        mine, theirs: the block lists of this end and of the peer.
        tensors: the number in each layer.
    """
    # The call: whole blocks, in lists that C can be given, and only moved.
    if (
        type(mine) not in _LISTS
        or type(theirs) not in _LISTS
        or not mine
        or len(mine) != len(theirs)
        or type(key) is not BlocksCacheKey
        or type(cache) is not Cache
        or type(priority) is not TransferPriority
        or type(deadline) not in _DEADLINES
        or src_layers is not None
        or dst_layers is not None
        or tensors != 2
        or notify is not None
        or (engine.transfer_checksum if checksum is None else checksum is not False)
    ):
        return None
    # The numbers, before everything that may change: reading one may run the caller's code, which may begin a transfer.
    count = len(mine)
    numbers = packed(mine, theirs, count)
    if numbers is None:
        return None
    link = engine.links.peek(key.cluster_id)
    if link is None:
        return None
    # What was learnt, and whether all of it is as it was.
    ours, life = link.transfers.shortcuts.ours, link.life
    way = ours.get((direction, key.model_id, cache.cache_id, priority is TransferPriority.CRITICAL))
    if (
        way is None
        or way.entry.cache is not cache
        or not way.entry.is_usable
        or way.remote.is_withdrawn
        or not way.link_channel.is_current
        or life.state is not LinkState.READY
        or not life.ownership.is_ours
    ):
        return None
    return way, numbers, count
