"""The shortcuts of one link: they are learnt from transfers that took the long way, and taken by later ones like them.

A shortcut keeps what does not change between small transfers of the same two caches. The rest is one call of C, and most
such transfers have ended when it returns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aiodatadist._cache.catalogue import RemoteCache
from aiodatadist._cache.task import AtOnce
from aiodatadist._device import BlockRun, Program, StreamTransfer, TransferReport, packed
from aiodatadist._link.transfers.running import CALLS, DONE, LANES
from aiodatadist._values.descriptors import BlocksCacheKey
from aiodatadist._values.grid import Grid
from aiodatadist._values.transfer_priority import TransferPriority

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry
    from aiodatadist._counting import Flow
    from aiodatadist._link.data.link_channel import LinkChannel
    from aiodatadist._link.data.remote_operation import TransferSpec
    from aiodatadist._link.transfers.running import RunningTransfers

SHORTCUTS = 1024
"""The most shortcuts of a link that are remembered."""
SHORTCUT_TENSORS = 1 << 16
"""The most tensors in all of these, each counted for each shortcut: 512 of a cache with 128. Each keeps two addresses."""
_FIRST = array("Q", [0])


@dataclass(frozen=True, slots=True)
class Shortcut:
    """A short way for gets or puts of whole blocks, in all tensors, between a cache of each end over one channel.

    It is made when such a transfer has taken the long way, where everything was checked that does not change.

    Attributes:
        home: the shortcuts of its link.
        running: the transfers of its link.
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

    home: Shortcuts
    running: RunningTransfers
    what: str
    is_critical: bool
    entry: Entry
    remote: RemoteCache
    link_channel: LinkChannel
    blocks: BlockRun
    seconds: float
    flow: Flow
    common: AtOnce

    def run(self, numbers: bytes, count: int) -> TransferReport | StreamTransfer | None:
        """Move ``count`` blocks to or from the peer. Their numbers at either end are packed.

        Most transfers have ended when this returns. They lease nothing, because nothing else happens meanwhile.

        Return None if nothing was done. Then the transfer takes the long way, which also reports what is wrong with it.
        """
        done = self.blocks.run(numbers, count)
        if type(done) is TransferReport:
            nbytes, ranges, _, seconds = done
            self.running.ran(self.what, nbytes, seconds, is_critical=self.is_critical)
            self.flow.ran(nbytes, ranges, seconds)
        elif type(done) is StreamTransfer:
            self.home.clear()  # this one is spent
            self.running.watch_over(done, self.blocks.program, self.what, self.link_channel, self.entry, self.remote)
        return done


class Shortcuts:
    """The shortcuts of one link: for transfers that this end asks for, and for those that the peer asks for.

    Attributes:
        ours: those of this end, by direction, the peer's model id, the number of this end's cache, and if they are critical.
    """

    def __init__(self, running: RunningTransfers) -> None:
        self._running = running
        self._session = running.session
        self.ours: dict[tuple[str, int, int, bool], Shortcut] = {}
        self._served: dict[tuple[int, int, TransferPriority], Shortcut] = {}
        # for each cache of the peer: where its shortcuts are, by their keys
        self._keys: dict[RemoteCache, dict[Any, dict[Any, Shortcut]]] = {}
        self._tensors = 0  # of all shortcuts

    # ---- of this end's ----

    def learn(self, spec: TransferSpec, remote: RemoteCache, link_channel: LinkChannel) -> None:
        """Make a shortcut of a transfer that ended at once, so that the next one looks nothing up again."""
        key = spec.key
        if not isinstance(key, BlocksCacheKey):
            return
        made = self._make("ours", spec.direction, spec.entry, remote, link_channel, spec.seconds, spec.priority)
        if made is not None:
            self._keep(self.ours, (spec.direction, key.model_id, spec.entry.cache_id, made.is_critical), made)

    # ---- of the peer's ----

    def learn_served(
        self, entry: Entry, target: RemoteCache, link_channel: LinkChannel, seconds: float, priority: TransferPriority
    ) -> None:
        """Make a shortcut of a transfer that the peer asked for and that ended at once."""
        made = self._make("served", "put", entry, target, link_channel, seconds, priority)
        if made is not None:
            self._keep(self._served, (entry.cache_id, target.cache_id, priority), made)

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
        way = self._served.get((entry.cache_id, target.cache_id, priority))
        if (
            way is None
            or way.seconds != seconds
            or way.entry is not entry
            or way.remote is not target
            or way.link_channel is not link_channel
            or len(src) != len(dst)
        ):
            return None
        numbers = packed(src, dst, len(src))
        return None if numbers is None else way.run(numbers, len(src))

    # ---- both ----

    def _make(
        self,
        end: Literal["ours", "served"],
        direction: Literal["get", "put"],
        entry: Entry,
        remote: RemoteCache,
        link_channel: LinkChannel,
        seconds: float,
        priority: TransferPriority,
    ) -> Shortcut | None:
        """Return a shortcut, or None if the channel does not move the bytes itself, as within a process."""
        running, channel = self._running, link_channel.channel
        # a transfer that is stopped there must take the channel out of use, which a shortcut does not
        if channel.has_one_queue or not channel.runs_blocks:
            return None
        stride = entry.stride
        one_block = Grid(entry.addresses, remote.addresses, _FIRST, _FIRST, stride, stride, stride, stride)
        program, opened = Program(), running.stream(LANES[end, priority], link_channel)
        (channel.add_get if direction == "get" else channel.add_put)(program, one_block)
        if not program.is_one_sided:
            return None
        blocks = BlockRun(opened, program, entry.pieces, remote.pieces, max(1, round(seconds * 1000)))
        session, is_critical = self._session, priority is TransferPriority.CRITICAL
        what, call = (DONE[direction], CALLS[direction]) if end == "ours" else (end, end)
        common = AtOnce(call, session.cluster_id, session.host.check_here, opened.loop_time)
        flow = session.totals.transfers[call]
        return Shortcut(self, running, what, is_critical, entry, remote, link_channel, blocks, seconds, flow, common)

    def _keep(self, ways: dict[Any, Shortcut], key: Any, way: Shortcut) -> None:
        """Remember a shortcut, in the place of an earlier one with the same key."""
        self._drop(ways, key)
        tensors = len(way.entry.addresses)
        if len(self.ours) + len(self._served) >= SHORTCUTS or self._tensors + tensors > SHORTCUT_TENSORS:
            self.clear()
        ways[key] = way
        self._keys.setdefault(way.remote, {})[key] = ways
        self._tensors += tensors

    def _drop(self, ways: dict[Any, Shortcut], key: Any) -> None:
        """Forget the shortcut with this key, if there is one."""
        way = ways.pop(key, None)
        if way is not None:
            keys = self._keys[way.remote]
            del keys[key]
            if not keys:
                del self._keys[way.remote]
            self._tensors -= len(way.entry.addresses)

    def forget(self, remote: RemoteCache) -> None:
        """Forget the shortcuts to a cache that the peer takes back, with all that they keep of it."""
        for key, ways in list(self._keys.get(remote, {}).items()):
            self._drop(ways, key)

    def clear(self) -> None:
        """Forget all shortcuts. The next transfers take the long way and make new ones."""
        self.ours.clear()
        self._served.clear()
        self._keys.clear()
        self._tensors = 0
