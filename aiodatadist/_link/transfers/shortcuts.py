"""The shortcuts of one link: they are learnt from transfers that took the long way, and taken by later ones like them.

A shortcut keeps what does not change between small transfers of the same two caches. The rest is one call of C, and most
such transfers have ended when it returns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from aiodatadist._cache.catalogue import RemoteCache
from aiodatadist._cache.seen_once import SeenOnce
from aiodatadist._cache.task import AtOnce
from aiodatadist._device import BlockRun, Program, RanAtOnce, StreamTransfer, TransferReport, packed
from aiodatadist._link.transfers.running import DONE, LANES
from aiodatadist._values.grid import Grid
from aiodatadist._values.transfer_priority import TransferPriority

if TYPE_CHECKING:
    from aiodatadist._cache.table import Entry
    from aiodatadist._counting import Flow
    from aiodatadist._device import TransferCompletion
    from aiodatadist._link.data.link_channel import LinkChannel
    from aiodatadist._link.data.remote_operation import TransferSpec
    from aiodatadist._link.transfers.running import RunningTransfers
    from aiodatadist._values.selection import Selection

SHORTCUTS = 1024
"""The most shortcuts of a link that are remembered."""
SHORTCUT_TENSORS = 1 << 16
"""The most tensors in all of these, each counted for each shortcut: 512 of a cache with 128. Each keeps two addresses."""


@dataclass(frozen=True, slots=True)
class Shortcut:
    """A short way for gets or puts of one form between a cache of each end over one channel, each time of other blocks.

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
        exact: the number of blocks that each must have; 0 if any will do.
        seconds: the time limit of each.
        flow: counts the transfers.
        common: what the tasks of the transfers have in common.
        grid: the bytes of the transfer of which it was made. Later ones are of other blocks.
        spec: that transfer; None if the peer asked for it.
    """

    home: Shortcuts
    running: RunningTransfers
    what: str
    is_critical: bool
    entry: Entry
    remote: RemoteCache
    link_channel: LinkChannel
    blocks: BlockRun
    exact: int
    seconds: float
    flow: Flow
    common: AtOnce
    grid: Grid
    spec: TransferSpec | None

    def run(self, numbers: bytes, count: int, notify: bytes | None = None) -> TransferReport | StreamTransfer | None:
        """Move ``count`` blocks to or from the peer. Their numbers at either end are packed.

        The peer is notified once they have landed. Most transfers have ended when this returns. They lease nothing, because
        nothing else happens meanwhile.

        Return None if nothing was done. Then the transfer takes the long way, which also reports what is wrong with it.
        """
        done = self.blocks.run(numbers, count)
        if type(done) is TransferReport:
            nbytes, ranges, _, seconds = done
            self.running.ran(self.what, nbytes, seconds, is_critical=self.is_critical)
            self.flow.ran(nbytes, ranges, seconds)
            if notify is not None:
                self.running.session.notification_queue.send_now(notify)
        elif type(done) is StreamTransfer:
            self._take_up(done)
            if notify is not None:
                self.running.session.notification_queue.send_after(done, notify)
        return done

    def run_checked(self, numbers: bytes, count: int, notify: bytes | None = None) -> TransferCompletion | None:
        """Move blocks likewise, and compare their checksums before the transfer ends, and the peer is notified."""
        done = None if self.spec is None else self.blocks.run(numbers, count)
        if done is None or self.spec is None:
            return None
        transfer: TransferCompletion
        if isinstance(done, TransferReport):
            self.running.ran(self.what, done.bytes, done.transfer_seconds, is_critical=self.is_critical)
            transfer = RanAtOnce(done, self.common.loop_time)
        else:
            self._take_up(done)
            transfer = done
        mine, theirs = array("Q", numbers[: 8 * count]), array("Q", numbers[8 * count :])
        local, remote = (mine, theirs) if self.spec.direction == "get" else (theirs, mine)
        g = self.grid
        moved = Grid(g.local, g.remote, local, remote, g.local_stride, g.remote_stride, g.nbytes, g.tail)
        compared = self.home.compare(self.spec, self.common.operation, self.remote, moved, transfer)
        if notify is not None:
            self.running.session.notification_queue.send_after(compared, notify)
        return compared

    def _take_up(self, transfer: StreamTransfer) -> None:
        """Watch over a transfer that did not succeed at once."""
        self.home.clear()  # this one is spent
        self.running.watch_over(transfer, self.blocks.program, self.what, self.link_channel, self.entry, self.remote)


class _Form(NamedTuple):
    """The form of a call.

    Attributes:
        call: its name.
        done: pulled, pushed or served.
        about: what it moves, as a format of the key and the number of blocks.
        exact: the number of blocks that a slot is cut into; 0 if blocks or a slot go to as many.
        spec: the transfer; None if the peer asked for it.
    """

    call: str
    done: str
    direction: Literal["get", "put"]
    about: str
    exact: int
    spec: TransferSpec | None = None


_SERVED = _Form("served", "served", "put", "{}, {} blocks", 0)


def _about(selection: Selection, is_cut: bool) -> str:
    """Return what such a selection moves, as a format of the key and the number of blocks."""
    what = (
        "a slot to {} blocks"
        if is_cut
        else "{} blocks"
        if selection.dst_blocks
        else f"{selection.nbytes} bytes of a slot"
    )
    return f"{{}}, {what}, {selection.layers}"


class Shortcuts:
    """The shortcuts of one link: for transfers that this end asks for, and for those that the peer asks for.

    Args:
        compare: compares the checksums of a transfer that has started; see :meth:`Requester.compare`.

    Attributes:
        ours: those of this end: by the call's words (see ``TransferSpec.form``), the type of its key, which not every call
            takes, the peer's cache and slot, this end's cache, if the slot is cut into blocks, and if the call is critical.
    """

    def __init__(
        self,
        running: RunningTransfers,
        compare: Callable[[TransferSpec, str, RemoteCache, Grid, TransferCompletion], TransferCompletion],
    ) -> None:
        self._running = running
        self.compare = compare
        self._session = running.session
        self.ours: dict[Any, Shortcut] = {}
        self._served: dict[tuple[int, int, TransferPriority, Hashable], Shortcut] = {}
        # for each cache of the peer: where its shortcuts are, by their keys
        self._keys: dict[RemoteCache, dict[Any, dict[Any, Shortcut]]] = {}
        self._tensors = 0  # of all shortcuts
        self._parts = SeenOnce()

    # ---- of this end's ----

    def learn(
        self, spec: TransferSpec, what: str, remote: RemoteCache, slot: int, link_channel: LinkChannel, grid: Grid
    ) -> None:
        """Make a shortcut of a transfer that ended at once, so that the next one of its form plans nothing again."""
        if spec.form is None:
            return
        blocks, entry, is_critical = spec.selection.dst_blocks, spec.entry, spec.priority is TransferPriority.CRITICAL
        is_cut = len(blocks) > 0 and not spec.selection.src_blocks
        # A slot that goes to a slot moves like a block: its number may be another one the next time.
        key = spec.form, type(spec.key), remote, slot if blocks else None, entry.cache_id, is_cut, is_critical
        old = self.ours.get(key)
        if old is not None and old.entry is entry and old.link_channel is link_channel:
            return  # such a call could not take it
        if not blocks and spec.selection.nbytes != entry.stride and not self._parts.has_seen(key):
            return
        about, exact = _about(spec.selection, is_cut), len(blocks) if is_cut else 0
        form = _Form(what, DONE[spec.direction], spec.direction, about, exact, spec)
        made = self._make("ours", form, grid, entry, remote, link_channel, spec.seconds, spec.priority)
        if made is not None:
            self._keep(self.ours, key, made)

    # ---- of the peer's ----

    def learn_served(
        self,
        entry: Entry,
        target: RemoteCache,
        link_channel: LinkChannel,
        seconds: float,
        priority: TransferPriority,
        layers: Hashable,
        grid: Grid,
    ) -> None:
        """Make a shortcut of a transfer of whole blocks that the peer asked for and that ended at once."""
        made = self._make("served", _SERVED, grid, entry, target, link_channel, seconds, priority)
        if made is not None:
            self._keep(self._served, (entry.cache_id, target.cache_id, priority, layers), made)

    def serve(
        self,
        entry: Entry,
        target: RemoteCache,
        link_channel: LinkChannel,
        seconds: float,
        priority: TransferPriority,
        layers: Hashable,
        src: Sequence[int],
        dst: Sequence[int],
    ) -> TransferReport | StreamTransfer | None:
        """Write block ``src[i]`` of this end's cache into ``dst[i]`` of the peer's, in these layers.

        Return None if nothing was done. Then the transfer takes the long way.
        """
        way = self._served.get((entry.cache_id, target.cache_id, priority, layers))
        if (
            way is None
            or way.seconds != seconds
            or way.entry is not entry
            or way.remote is not target
            or way.link_channel is not link_channel
        ):
            return None
        numbers = packed(src, dst)
        return None if numbers is None else way.run(*numbers)

    # ---- both ----

    def _make(
        self,
        end: Literal["ours", "served"],
        form: _Form,
        grid: Grid,
        entry: Entry,
        remote: RemoteCache,
        link_channel: LinkChannel,
        seconds: float,
        priority: TransferPriority,
    ) -> Shortcut | None:
        """Return a shortcut, or None if the channel does not move the bytes itself, as within a process.

        Background work has none: its windows are smaller than those of a shortcut.
        Of the grid, whose local side is the destination, everything but the numbers of the blocks is kept.
        """
        running, channel = self._running, link_channel.channel
        # a transfer that is stopped there must take the channel out of use, which a shortcut does not
        if channel.has_one_queue or not channel.runs_blocks or priority is TransferPriority.BACKGROUND:
            return None
        program, opened = Program(), running.stream(LANES[end, priority], link_channel)
        if form.direction == "get":
            channel.add_get(program, grid)
        else:
            channel.add_put(program, grid.mirrored())
        if not program.is_one_sided:
            return None
        theirs = form.exact or remote.pieces
        blocks = BlockRun(opened, program, entry.pieces, theirs, max(1, round(seconds * 1000)))
        session, is_critical = self._session, priority is TransferPriority.CRITICAL
        common = AtOnce(form.call, session.cluster_id, session.host.check_here, opened.loop_time, form.about)
        flow = session.totals.transfers[form.call]
        return Shortcut(
            self, running, form.done, is_critical, entry, remote, link_channel, blocks, form.exact, seconds, flow, common,
            grid, form.spec,
        )  # fmt: skip

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
        self._parts.clear()
        for key, ways in list(self._keys.get(remote, {}).items()):
            self._drop(ways, key)

    def clear(self) -> None:
        """Forget all shortcuts. The next transfers take the long way and make new ones."""
        self.ours.clear()
        self._served.clear()
        self._keys.clear()
        self._parts.clear()
        self._tensors = 0
