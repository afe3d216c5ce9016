"""The short way: the one place that decides if a transfer may repeat an earlier one of its form with other blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from aiodatadist._cache.task import EndedTask
from aiodatadist._device import TransferReport, packed
from aiodatadist._link import LinkState
from aiodatadist._link.control.notifications import check_payload
from aiodatadist._values.descriptors import UNSET, BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex
from aiodatadist._values.transfer_priority import TransferPriority, check_deadline
from aiodatadist._wire.messages import Digest

if TYPE_CHECKING:
    from aiodatadist._cache.names import Form
    from aiodatadist._cache.task import AtOnce, CacheTask
    from aiodatadist._cluster.engine import Engine
    from aiodatadist._counting import Observer
    from aiodatadist._device import TransferCompletion

_NOTHING: Final = type(None)
_KEYS: Final = frozenset({BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex})
_DEADLINES: Final = frozenset({_NOTHING, int, float})
_NOTES: Final = frozenset({_NOTHING, bytes})
_CHECKSUMS: Final = frozenset({_NOTHING, bool})
_WORDS: Final = frozenset({str, int, range, _NOTHING})
"""Types of words that are the same if they are equal. A bool is none of them: it is equal to a number."""
_NUMBERS: Final = frozenset({int})
_LISTS: Final = frozenset({list, tuple})


class ShortWay:
    """The short way of one cluster's transfers.

    Everything that can be wrong with a call, or has changed since an earlier one, leads to the long way, which reports it.
    Deciding raises nothing by itself, so that both ways raise the same errors.

    Args:
        task: returns the task of a transfer that is under way or has failed, of a call, with a peer, and what moves.
        observe: shows an ended transfer to an observer.
        limit: ends a transfer at its deadline.
    """

    def __init__(
        self,
        engine: Engine,
        task: Callable[[str, int, TransferCompletion, object], CacheTask],
        observe: Callable[[Observer, str, int, TransferCompletion], None],
        limit: Callable[[TransferCompletion, float | None], None],
    ) -> None:
        self._engine = engine
        self._task = task
        self._observe = observe
        self._limit = limit

    def transfer(
        self,
        form: Form,
        key: Any,
        cache: Any,
        mine: Any,
        theirs: Any,
        notify: Any,
        checksum: Any,
        priority: Any,
        deadline: Any,
    ) -> CacheTask | None:
        """Start a transfer with a peer; return None if nothing was done, and it must take the long way.

        Args:
            form: the name of the call, and all its words that are not named below. Those of an earlier call, which are equal,
                have been checked.
            mine, theirs: the block lists of this end and of the peer; or the slot of this end and None, if the key names the
                peer's.
        """
        engine = self._engine
        # The call: plain words.
        if (
            type(key) not in _KEYS
            or type(cache) is not Cache
            or type(priority) is not TransferPriority
            or priority is TransferPriority.BACKGROUND
            or type(deadline) not in _DEADLINES
            or type(notify) not in _NOTES
            or not _WORDS.issuperset(map(type, form))
            or (type(key) is CacheKey and (key.req_id == UNSET) is (key.prefix_id == UNSET))
            or type(checksum) not in _CHECKSUMS
        ):
            return None
        # The numbers, before everything that may change: reading one may run the caller's code, which may begin a transfer.
        is_cut = type(theirs) in _LISTS and not theirs
        is_slot = theirs is None and type(mine) is int
        if not is_slot and theirs is not None:
            numbers = packed(mine, range(len(mine)) if is_cut and type(mine) in _LISTS else theirs)
        else:
            numbers = None
        # What is known of the peer.
        link = engine.links.peek(key.cluster_id) if is_slot or numbers is not None else None
        found = None if link is None else link.transfers.session.catalogue.find(key)
        if link is None or found is None:
            return None
        remote, slot = found
        if is_slot:  # it moves like a block
            numbers = packed((mine,), (slot,))
        # What was learnt, and whether all of it is as it was.
        is_critical, life = priority is TransferPriority.CRITICAL, link.life
        is_checked = engine.transfer_checksum if checksum is None else checksum
        words = form, type(key), remote, None if is_slot else slot, cache.cache_id, is_cut, is_critical
        way = link.transfers.shortcuts.ours.get(words)
        if (
            numbers is None
            or way is None
            or way.exact not in {0, numbers[1]}
            or way.entry.cache is not cache
            or not way.entry.is_usable
            or not way.link_channel.is_current
            or life.state is not LinkState.READY
            or not life.ownership.is_ours
            or (is_checked and link.session.peer_minor < Digest.since)
        ):
            return None
        return self._run(way.run_checked if is_checked else way.run, way.common, *numbers, key, notify, deadline)

    def copy(
        self, form: Form, target: Any, source: Any, mine: Any, theirs: Any, priority: Any, deadline: Any
    ) -> CacheTask | None:
        """Start a copy within this cluster, of the blocks or slots ``theirs`` of the source to ``mine`` of the target.

        Return None if nothing was done, and it must take the long way.
        """
        if (
            type(target) is not Cache
            or type(source) is not Cache
            or type(priority) is not TransferPriority
            or priority is TransferPriority.BACKGROUND
            or type(deadline) not in _DEADLINES
            or not _WORDS.issuperset(map(type, form))
            or not _NUMBERS.issuperset(map(type, mine))
            or not _NUMBERS.issuperset(map(type, theirs))
        ):
            return None
        numbers = packed(mine, theirs)
        is_critical = priority is TransferPriority.CRITICAL
        way = self._engine.local_copies.ways.get((form, target.cache_id, source.cache_id, is_critical))
        if (
            numbers is None
            or way is None
            or way.target.cache is not target
            or way.source.cache is not source
            or not way.target.is_usable
            or not way.source.is_usable
        ):
            return None
        return self._run(way.run, way.common, *numbers, None, None, deadline)

    def _run(
        self,
        run: Callable[[bytes, int, bytes | None], TransferReport | TransferCompletion | None],
        common: AtOnce,
        numbers: bytes,
        count: int,
        key: Any,
        notify: bytes | None,
        deadline: Any,
    ) -> CacheTask | None:
        """Take a way; return None if nothing was done."""
        if deadline is not None:
            check_deadline(deadline)
        if notify is not None:
            check_payload(notify)
        engine = self._engine
        engine.check_here()
        done = run(numbers, count, notify)
        if isinstance(done, TransferReport):
            task = EndedTask(common, done, key, count)
            if engine.observer is not None:
                self._observe(engine.observer, common.operation, common.peer, task.completion)
            return task
        if done is None:
            return None
        self._limit(done, deadline)
        return self._task(common.operation, common.peer, done, common.about_of(key, count))


def pairs_of(info: Any) -> tuple[list[int], list[int]]:
    """Return the targets and the sources of a ``copy_block_info``; two empty lists if it is not a plain one."""
    targets: list[int] = []
    sources: list[int] = []
    for source, each in info.items() if type(info) is dict else ():
        if type(each) not in _LISTS:
            return [], []
        targets += each
        sources += [source] * len(each)
    return targets, sources
