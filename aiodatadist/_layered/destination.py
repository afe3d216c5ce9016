"""A destination of a layered transfer."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from aiodatadist._cache.catalogue import RemoteCache
from aiodatadist._cache.table import Entry
from aiodatadist._concurrency.completion import too_late
from aiodatadist._device import Gate, TransferState
from aiodatadist._layered.comparison import LayerComparison
from aiodatadist._layered.portions import Portions
from aiodatadist._layered.progress import END, Event, Progress
from aiodatadist._layered.request import Wanted
from aiodatadist._layered.route import Route
from aiodatadist._link import AwaitedLink, Transfers, check_still_usable
from aiodatadist._link.control.layer_events import NO_LAYERS, LandedLayers
from aiodatadist._link.data.cost_model import group_size
from aiodatadist._values.grid import Grid
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist.errors import CacheNotFound, ForkError, InternalError, LinkError, LLMException, TransferError


class Destination:
    """A destination under way. Layers go out in order, in portions; a failure ends this destination only.

    If its link is being re-established, it waits for that first, and holds nothing of the peer's.

    Args:
        index: the destination's place among all.
        device_event: returns the handle of the event behind a layer, if the device can wait for that.
        seconds: time for each layer to travel.
        news: called when something has landed or ended, or was read for the last time.
        checksum: True if a layer has landed only once it equals what was sent.

    Attributes:
        layers: layers of the source.
        progress: the stage of the destination, and how far its layers have come.
        error: the reason of a failure, or None.
        group: the number of layers that are sent at a time, unless more are waiting.
        portions: its portions on the device; None until the peer's cache has been found.
    """

    def __init__(
        self,
        index: int,
        wanted: Wanted,
        entry: Entry,
        device_event: Callable[[int], int] | None,
        seconds: float,
        news: Callable[[Destination], None],
        priority: TransferPriority = TransferPriority.NORMAL,
        *,
        checksum: bool = False,
    ) -> None:
        self.index = index
        self.cluster_id = wanted.link.cluster_id
        self._priority = priority
        self._link: Transfers | None = None
        self._awaited: AwaitedLink | None = None
        self._awaited_instance = ""
        self._linked: Callable[[Destination], None] | None = None
        self.layers = wanted.layers
        self.progress = Progress(wanted.layers, is_linked=not isinstance(wanted.link, AwaitedLink))
        self.error: LLMException | None = None
        self.group = 1
        self._device_event = device_event
        self._wanted = wanted
        self._entry = entry
        self._seconds = seconds
        self._news = news
        self._remote: RemoteCache | None = None
        self._named: Callable[[int, int], list[LandedLayers]] = lambda first, stop: []
        self._is_reaching = False
        self._taken = 0
        self._is_going_on = False
        self.portions: Portions | None = None
        self._is_watched = False
        self._is_checked = checksum
        self._comparison: LayerComparison | None = None
        if isinstance(wanted.link, AwaitedLink):
            self._awaited = wanted.link
        else:
            self._link = wanted.link

    @property
    def link(self) -> Transfers:
        if self._link is None:
            raise InternalError(f"the link to cluster {self.cluster_id} is not there yet")
        return self._link

    @property
    def has_link(self) -> bool:
        """True unless it waits for its link, or has ended before the link was there."""
        return self._link is not None

    # ---- a link that is being re-established ----

    def wait_for_link(self, linked: Callable[[Destination], None]) -> None:
        """Call ``linked`` when the link is there. For a destination that has none."""
        if self._awaited is not None:
            self._linked = linked
            self._awaited_instance = self._awaited.instance()
            self._awaited.add(self)

    def begin(self, link: Transfers) -> None:
        """Begin, because the link is there. Raises LLMException if the transfer can no longer be what was asked for."""
        check_still_usable(self._entry)
        if self._wanted.addresses is not None and link.session.instance != self._awaited_instance:
            raise CacheNotFound(
                f"cluster {self.cluster_id} is no longer the process that gave its dst_addrs: they would be addresses of its"
                " memory now",
                hint="ask it for its addresses again",
            )
        if self._is_checked:
            link.requester.checks.want_peer()
        self._link = link
        self.progress.on(Event.LINK)
        if self._linked is not None:
            self._linked(self)

    # ---- the beginning ----

    def prepare_at_once(self) -> bool:
        """Begin if the destination is known and within reach; return False if it is not. An error ends this destination."""
        known = self.link.running.within_reach(self._entry, self._wanted.key)
        if known is not None:
            remote, slot, _ = known
            try:
                self._begin(remote, self._plan(remote, slot))
            except LLMException as error:
                self.fail(error)
        return known is not None

    async def prepare(self) -> None:
        """Find the destination, and how to reach it. An error ends this destination."""
        requester, wanted = self.link.requester, self._wanted
        try:
            remote, _, grid = await self.link.session.while_it_lasts(
                lambda: requester.locate(self._entry, wanted.key, self._plan, self._seconds)
            )
            self._begin(remote, grid)
        except LLMException as error:
            self.fail(error)

    def _plan(self, remote: RemoteCache, slot: int) -> Grid:
        self._remote = remote  # set first: a peer that watches it hears that it does not fit, too
        grid = self._wanted.grid(self._entry, remote, slot)
        self._named = self._wanted.numbering(remote)
        return grid

    def _begin(self, remote: RemoteCache, grid: Grid) -> None:
        if self.progress.is_open:
            # the link may have ended in the tick in which the destination was found
            self.link.session.check_ready()
            remote.check_access("put")
            self.link.session.channels.traits.check_reaches(remote, f"cluster {self.cluster_id}", self._entry)
            wanted, grid = self._wanted, grid.mirrored()
            route = Route(self.link, self._entry, remote, grid, self.layers, wanted.tensors, self._seconds)
            self.portions = Portions(
                route,
                self.progress,
                self._device_event,
                self._priority,
                self._next_is_ready,
                self._passed,
                self._portion_ended,
            )
            if self._is_watched:
                self.portions.watch()
            if self._is_checked:
                self._comparison = LayerComparison(route, self._compared, self.fail, lambda: self._news(self))
            self.group = self._group_size(grid.total)
            self.progress.on(Event.FIND)
            self.link.session.layer_events.begin(self, remote.cache_id)

    def _group_size(self, nbytes: int) -> int:
        """Choose the number of layers to send at a time from what was measured on this link and for this cache."""
        layer_seconds, count = self._entry.layer_seconds, len(self.layers)
        compute = None if layer_seconds is None else layer_seconds * count
        return group_size(count, nbytes, compute, self.link.running.estimate.costs)

    # ---- sending ----

    def offer(self, count: int) -> None:
        """Take the first ``count`` layers, which the source calls final."""
        self.progress.on(Event.OFFER, count)
        self._go_on()

    def _go_on(self) -> None:
        """Take and send what can be taken and sent, in order.

        The caller's ``device_event`` may mark further layers, and a portion may land in the call that sends it. What comes
        of that is left to the call that is under way: otherwise later layers would overtake those that it sends.
        """
        if self._is_going_on:
            return
        self._is_going_on = True
        try:
            while self._send() or self._take():  # the first layer leaves at once, without the others
                pass
        finally:
            self._is_going_on = False

    def _take(self) -> bool:
        """Take the next layer that is offered; return False if there is none."""
        number, portions = self._taken, self.portions
        if portions is None or number == self.progress.offered or not self.progress.is_sending:
            return False
        self._taken += 1
        if portions.wants_events:
            self._try(lambda: portions.wait_for_event(number))
        else:
            self.progress.on(Event.READY, number + 1)
        return True

    def _next_is_ready(self) -> None:
        self.progress.on(Event.READY, self.progress.ready + 1)
        self._go_on()
        if not self.progress.is_open:
            self._news(self)  # it may have been what was still on the device

    def _send(self) -> bool:
        """Send the layers that are ready; return False if nothing was to be sent."""
        progress, portions = self.progress, self.portions
        if portions is None or not progress.may_send(self.group, len(portions)):
            return False
        # A failed portion ends only when its channel has closed. Until then a later one must not leave on the next channel:
        # its arrival would count as that of all layers before it.
        if portions.is_failing:
            return False
        if portions.has_no_channel:
            self._reach(portions)
            return False
        first, stop = progress.sent, progress.ready
        progress.on(Event.SEND, stop)  # before the launch, whose end may come at once
        started = perf_counter()
        self._try(lambda: portions.launch(first, stop))
        self.link.running.estimate.add_interference(perf_counter() - started)
        return True

    def _try(self, launch: Callable[[], None]) -> None:
        """Call ``launch``. An error ends this destination; after a fork it is raised, because it is the caller's."""
        try:
            launch()
        except ForkError:
            raise
        except LLMException as error:
            self.fail(error)
        except Exception as error:
            failure = InternalError(repr(error))
            failure.__cause__ = error
            self.fail(failure)

    def _reach(self, portions: Portions) -> None:
        """Have the next channel opened, then send what waits for it."""

        async def reach() -> None:
            try:
                await portions.reach()
            except LLMException as error:
                self.fail(error)
            finally:
                self._is_reaching = False
            self._go_on()

        if not self._is_reaching:
            self._is_reaching = True
            self.link.session.spawn(reach)

    def launch_gated(self, gate: Gate, seconds: float) -> None:
        """Launch all layers as one program, which the device holds at each gate.

        ``seconds`` is the time for each layer to be computed.
        """
        portions = self.portions
        if portions is not None:
            self._try(lambda: portions.launch_gated(gate, seconds, self.group))

    def watch(self) -> None:
        """Report each layer when it lands from now on, not only the last."""
        self._is_watched = True
        if self.portions is not None:
            self.portions.watch()

    def landed_at(self, first: int, stop: int, heard: float) -> list[float]:
        """Return when layers, counted from the first, were known to have landed; ``heard`` is when the loop was told."""
        return [heard] * (stop - first) if self.portions is None else self.portions.landed_at(first, stop, heard)

    # ---- what becomes of it ----

    def _portion_ended(self, landed: int, state: TransferState, error: LLMException | None) -> None:
        if state is TransferState.DONE:
            self._arrived(landed)
            self._go_on()
        else:
            self._close(state, error)
        self._news(self)

    def _passed(self, landed: int) -> None:
        """Take over the number of landed layers from a program that the device carries on with."""
        self._arrived(landed)
        self._news(self)

    def _arrived(self, landed: int) -> None:
        """Take over the number of landed layers from the device."""
        if self._comparison is None:
            self._is_there(landed)
        elif self.progress.is_open:
            self._comparison.landed(landed)

    def _compared(self, landed: int) -> None:
        """Take over the number of layers that have landed and equal the source."""
        self._is_there(landed)
        self._news(self)

    def _is_there(self, landed: int) -> None:
        first = self.progress.landed
        if self.progress.on(Event.LAND, landed) and self._remote is not None:
            for named in self._named(first, landed):
                self.link.session.layer_events.tell(self._remote.cache_id, named)
            if self.progress.is_all_landed:
                self._close(TransferState.DONE, None)

    def on_watched(self) -> list[LandedLayers]:
        told = self.progress.landed
        self.watch()
        return self._named(0, told) if told else []

    def on_link_ended(self, failure: LinkError) -> None:
        """Fail, unless all is on the device and waits for nothing: that may still succeed.

        Nothing more can be sent or compared.
        """
        cannot_end = not self.progress.is_all_sent or self._comparison is not None
        if cannot_end or self.portions is None or self.portions.is_gated:
            self.fail(failure)

    def expire(self, seconds: float) -> None:
        """Fail with ``LLM_TIMEOUT``, because the caller's limit of ``seconds`` is over."""
        self.fail(too_late(seconds, self.progress.how_far(f"cluster {self.cluster_id}")))

    def fail(self, error: LLMException) -> None:
        """Fail with an error. What is on the device is stopped."""
        own = error.with_status(error.status_code)  # a copy: others may fail with the same one
        own.__cause__ = error.__cause__
        self._close(TransferState.FAILED, own)
        self._news(self)

    def cancel(self) -> None:
        self._close(TransferState.CANCELLED, None)
        self._news(self)

    def _close(self, state: TransferState, error: LLMException | None) -> None:
        if self.portions is not None and state is not TransferState.DONE:
            self._arrived(self.portions.landed)  # layers may have landed that were not watched
        if not self.progress.on(END[state]):
            return
        if self._awaited is not None:
            self._awaited.drop(self)
        self.error = error
        if error is not None:
            error.peer = self.cluster_id
        if self._remote is not None:
            self.link.session.layer_events.finish(self)
            if state is not TransferState.DONE:
                failure = error or TransferError("the transfer was cancelled")
                self.link.session.layer_events.tell(self._remote.cache_id, NO_LAYERS, failure)
        if state is not TransferState.DONE:  # otherwise all has landed, and the device reports it in a moment
            if self.portions is not None:
                self.portions.stop()
            if self._comparison is not None:
                self._comparison.stop()

    @property
    def is_quiet(self) -> bool:
        """True if it has ended, the device has let go, and no checksum is made of its source."""
        is_read = self._comparison is not None and self._comparison.is_running
        is_held = self.portions is not None and not self.portions.is_quiet
        return not self.progress.is_open and not is_held and not is_read
