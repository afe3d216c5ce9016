"""The shortcuts of one link: they are learnt from transfers that took the long way, and taken by later ones like them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from aiodatadist.cache.catalogue import RemoteCache
from aiodatadist.cache.task import AtOnce, EndedTask
from aiodatadist.device import BlockRun, Program, StreamTransfer, TransferReport
from aiodatadist.link.data.shortcut import Shortcut
from aiodatadist.link.lifecycle import LinkState
from aiodatadist.link.transfers.running import CALLS, DONE, lane
from aiodatadist.values.descriptors import BlocksCacheKey, Cache
from aiodatadist.values.grid import Grid
from aiodatadist.values.transfer_priority import TransferPriority

if TYPE_CHECKING:
    from aiodatadist.cache.table import Entry
    from aiodatadist.link.data.channels import LinkChannel
    from aiodatadist.link.data.remote_operation import TransferSpec
    from aiodatadist.link.transfers.running import RunningTransfers

K = TypeVar("K")

SHORTCUTS = 1024
"""The most pairs of caches whose shortcut is remembered."""
_FIRST = array("Q", [0])


class Shortcuts:
    """The shortcuts of one link: for transfers that this end asks for, and for those that the peer asks for."""

    def __init__(self, running: RunningTransfers) -> None:
        self._running = running
        self._session = running.session
        self._ours: dict[tuple[str, int, int, bool], Shortcut] = {}
        self._served: dict[tuple[int, int, float, TransferPriority], Shortcut] = {}

    # ---- of this end's ----

    def learn(self, spec: TransferSpec) -> None:
        """Make a shortcut of a transfer that ended at once, so that the next one looks nothing up again."""
        key, known = spec.key, self._running.within_reach(spec.entry, spec.key)
        if known is None or not isinstance(key, BlocksCacheKey):
            return
        remote, _, link_channel = known
        what, call = DONE[spec.direction], CALLS[spec.direction]
        stream = lane("ours", spec.priority)
        made = self._make(what, call, stream, spec.direction, spec.entry, remote, link_channel, spec.seconds)
        is_critical = spec.priority is TransferPriority.CRITICAL
        _keep(self._ours, (spec.direction, key.model_id, spec.entry.cache_id, is_critical), made)

    def at_once(
        self,
        direction: str,
        key: BlocksCacheKey,
        cache: Cache,
        mine: Sequence[int],
        theirs: Sequence[int],
        count: int,
        priority: TransferPriority,
    ) -> EndedTask | StreamTransfer | None:
        """Move the peer's blocks ``theirs[i]`` into ``mine[i]`` of a cache, or the other way round; ``count`` of them.

        Most transfers have ended when this returns. They lease nothing, because nothing else happens meanwhile.

        Return None if nothing was done. Then the transfer takes the long way, which also reports what is wrong with it.
        """
        is_critical = priority is TransferPriority.CRITICAL
        way = self._ours.get((direction, key.model_id, cache.cache_id, is_critical))
        if (
            way is None
            or way.entry.cache is not cache
            or self._session.life.state is not LinkState.READY
            or not way.entry.is_usable
            or way.remote.is_withdrawn
            or not way.link_channel.is_current
        ):
            return None
        done = self._run(way, mine, theirs, count, is_critical)
        return EndedTask(way.common, done, key, count) if isinstance(done, TransferReport) else done

    # ---- of the peer's ----

    def learn_served(
        self, entry: Entry, target: RemoteCache, link_channel: LinkChannel, seconds: float, priority: TransferPriority
    ) -> None:
        """Make a shortcut of a transfer that the peer asked for and that ended at once."""
        stream = lane("served", priority)
        made = self._make("served", "served", stream, "put", entry, target, link_channel, seconds)
        _keep(self._served, (entry.cache_id, target.cache_id, seconds, priority), made)

    def serve(
        self,
        entry: Entry,
        target: RemoteCache,
        link_channel: LinkChannel,
        seconds: float,
        priority: TransferPriority,
        src: Sequence[int],
        dst: Sequence[int],
    ) -> TransferReport | StreamTransfer | None:
        """Write block ``src[i]`` of this end's cache into ``dst[i]`` of the peer's.

        Return None if nothing was done. Then the transfer takes the long way.
        """
        way = self._served.get((entry.cache_id, target.cache_id, seconds, priority))
        if (
            way is None
            or way.entry is not entry
            or way.remote is not target
            or way.link_channel is not link_channel
            or len(src) != len(dst)
        ):
            return None
        return self._run(way, src, dst, len(src), priority is TransferPriority.CRITICAL)

    # ---- both ----

    def _make(
        self,
        what: str,
        call: str,
        stream: str,
        direction: Literal["get", "put"],
        entry: Entry,
        remote: RemoteCache,
        link_channel: LinkChannel,
        seconds: float,
    ) -> Shortcut | None:
        """Return a shortcut, or None if the channel does not move the bytes itself, as within a process."""
        running, channel = self._running, link_channel.channel
        if channel.has_one_queue:
            return None
        stride = entry.stride
        one_block = Grid(entry.addresses, remote.addresses, _FIRST, _FIRST, stride, stride, stride, stride)
        program, opened = Program(), running.stream(stream)
        (channel.add_get if direction == "get" else channel.add_put)(program, one_block)
        if not program.is_one_sided:
            return None
        blocks = BlockRun(opened, program, entry.pieces, remote.pieces, max(1, round(seconds * 1000)))
        session = self._session
        common = AtOnce(call, session.cluster_id, session.host.check_here, opened.loop_time)
        return Shortcut(what, entry, remote, link_channel, blocks, session.totals.transfers[call], common)

    def _run(
        self, way: Shortcut, mine: Sequence[int], theirs: Sequence[int], count: int, is_critical: bool
    ) -> TransferReport | StreamTransfer | None:
        done = way.blocks.run(mine, theirs, count)
        if type(done) is TransferReport:
            nbytes, ranges, _, seconds = done
            self._running.ran(way.what, nbytes, seconds, is_critical=is_critical)
            way.flow.ran(nbytes, ranges, seconds)
        elif type(done) is StreamTransfer:
            self._ours.clear()  # it is spent
            self._served.clear()
            self._running.watch_over(done, way.blocks.program, way.what, way.link_channel, way.entry, way.remote)
        return done


def _keep(ways: dict[K, Shortcut], key: K, made: Shortcut | None) -> None:
    if made is not None:
        if len(ways) >= SHORTCUTS:
            ways.clear()
        ways[key] = made
