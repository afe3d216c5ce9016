"""The portions of one destination on the device, and the waits for layers that only the host can see."""

from __future__ import annotations

from collections.abc import Callable
from operator import index

from aiodatadist._counting.callbacks import Raised, attempt
from aiodatadist._device import Gate, Layering, Program, StreamTransfer, TransferState
from aiodatadist._layered.progress import Event, Progress, Stage
from aiodatadist._layered.route import Route
from aiodatadist._values.transfer_priority import TransferPriority
from aiodatadist.errors import InternalError, LLMException, TransferError, TransferTimeout


class Portions:
    """The portions of one destination that are on the device.

    Args:
        progress: tells how many layers were sent, and whether the destination is open.
        device_event: returns the handle of the event behind a layer, if the device can wait for that.
        ready: called when the next layer is final.
        passed: called with the number of layers that have landed, by a program that the device continues.
        ended: called when a portion or a wait has ended, with the number of layers of whose arrival it is the proof (0 if
            none), its state and its error.

    Attributes:
        nbytes, ranges, transfer_seconds: sums over the portions that have ended.
    """

    def __init__(
        self,
        route: Route,
        progress: Progress,
        device_event: Callable[[int], int] | None,
        priority: TransferPriority,
        ready: Callable[[], None],
        passed: Callable[[int], None],
        ended: Callable[[int, TransferState, LLMException | None], None],
    ) -> None:
        self.nbytes = 0
        self.ranges = 0
        self.transfer_seconds = 0.0
        self._route = route
        self._progress = progress
        self._device_event = device_event
        self._priority = priority
        self._takes_gates = route.link.session.channels.traits.takes_gates
        self._ready = ready
        self._passed = passed
        self._ended = ended
        self._transfers: dict[StreamTransfer, int] = {}
        self._waits: dict[StreamTransfer, int] = {}
        self._wait_stream = ""
        self._gate: Gate | None = None
        self._gate_seconds = 0.0
        self._layering: Layering | None = None
        self._is_watched = False

    def __len__(self) -> int:
        """Return the number of portions that are on the device."""
        return len(self._transfers)

    @property
    def is_failing(self) -> bool:
        """True if a portion has failed whose channel is being closed."""
        return any(transfer.is_failing for transfer in self._transfers)

    @property
    def is_quiet(self) -> bool:
        """True if the device has let go of all of them."""
        return not self._transfers and not self._waits

    @property
    def has_no_channel(self) -> bool:
        """True if a transfer that was stopped half-way has taken the channel away."""
        return self._route.has_no_channel

    async def reach(self) -> None:
        """Have the next channel opened. Raises LLMException if the peer or the device refuses."""
        await self._route.reach()

    def stop(self) -> None:
        """Stop all of them. Each ends in a moment, when the device has let go of its memory."""
        for transfer in [*self._transfers, *self._waits]:
            transfer.cancel()

    # ---- layers that the host sends ----

    def launch(self, first: int, stop: int) -> None:
        """Send layers, counted from the first that travels; none if the caller's code ends the destination.

        Raises:
            LLMException: if that is not possible now.
        """
        route, program = self._route, Program()
        if self._device_event is not None and self._takes_gates:
            for number in range(first, stop):  # layers may be computed on several streams
                program.wait_number(self._event(route.layers[number]))
            if not self._progress.is_open:  # the caller's code has ended it
                return
        link_channel = route.channel()
        link_channel.channel.add_put(program, route.part(first, stop))
        seconds, priority = route.seconds * (stop - first), self._priority
        # A program that waits for an event holds its stream, so more urgent layers have another one.
        stream = "layers" if priority is TransferPriority.NORMAL else f"layers {priority}"
        transfer = route.link.running.launch(
            program, "put", link_channel, route.entry, route.remote, seconds, stream, priority, is_ordered=True
        )
        self._transfers[transfer] = stop
        transfer.add_done_callback(self._portion_ended)

    def _portion_ended(self, transfer: StreamTransfer) -> None:
        stop = self._transfers.pop(transfer)
        self.nbytes += transfer.nbytes
        self.ranges += transfer.ranges
        self.transfer_seconds += transfer.transfer_seconds
        # An earlier portion that is still there has failed, and will report it: then this arrival proves nothing.
        is_proof = not any(before < stop for before in self._transfers.values())
        self._ended(stop if is_proof else 0, transfer.state, self._of_gate(transfer.shut_gate, transfer.error))

    def _event(self, layer: int) -> int:
        """Return the caller's event behind a layer.

        Raises TransferError if the caller's code raised, or did not return a handle.
        """
        find = self._device_event
        if find is None:
            raise InternalError("this destination waits for no events")
        try:
            return attempt(lambda: index(find(layer)))
        except Raised as raised:
            raise TransferError(f"device_event({layer}) {raised}") from raised.__cause__

    # ---- channels that take no gates: a layer is sent when the host has seen that it is final ----

    @property
    def wants_events(self) -> bool:
        """True if the host must see the event behind each layer before the layer is sent."""
        return self._device_event is not None and not self._takes_gates

    def wait_for_event(self, number: int) -> None:
        """Wait for the event behind a layer. The layer is ready when it has been recorded."""
        event = self._event(self._route.layers[number])
        if self._progress.is_open:  # otherwise the caller's code has ended it
            self._wait_on_host(Program().wait_number(event), number, self._route.seconds)

    def _wait_on_host(self, program: Program, number: int, seconds: float) -> None:
        """Take a layer as ready when this program, which only waits, has ended. Such programs end in the order of layers.

        Gates are all waited for at once. Events are waited for one by one, as they are recorded. In between, their
        stream is idle, and must not be used for gates, behind which they would be held.
        """
        running = self._route.link.running
        self._wait_stream = self._wait_stream or running.idle_stream("events" if self._gate is None else "gates")
        wait = running.device_stream(self._wait_stream).submit(program, seconds)
        self._waits[wait] = number
        wait.add_done_callback(self._waited)

    def _waited(self, wait: StreamTransfer) -> None:
        number = self._waits.pop(wait)
        if wait.state is TransferState.DONE:
            self._ready()
        else:
            self._ended(0, wait.state, self._of_gate(None if self._gate is None else number, wait.error))

    # ---- gates ----

    def launch_gated(self, gate: Gate, seconds: float, group: int) -> None:
        """Launch all layers as one program, which the device holds at each gate.

        Args:
            seconds: time for each layer to be computed.
            group: the number of layers that are sent at a time.
        """
        self._gate, self._gate_seconds = gate, seconds
        if not self._takes_gates:
            for number, layer in enumerate(self._route.layers):
                self._wait_on_host(Program().wait_gate(gate.notify(layer)), number, seconds)
            return
        route = self._route
        link_channel = route.channel()
        program, count = Program(), len(route.layers)
        layering = Layering(count, route.tensors, group, gate.notifies, seconds)
        link_channel.channel.add_put(program, route.grid, layering)
        limit = route.seconds * group  # from when its last gate has opened
        # A stream with other work would make this wait for its compute, and later work for ours.
        stream = route.link.running.idle_stream("gated layers")
        transfer = route.link.running.launch(
            program, "put", link_channel, route.entry, route.remote, limit, stream, self._priority
        )
        self._layering = layering
        self._progress.on(Event.SEND, count)
        self._transfers[transfer] = count
        if self._is_watched or route.link.session.layer_events.is_watched(route.remote.cache_id):
            self.watch()
        transfer.add_done_callback(self._portion_ended)

    @property
    def is_gated(self) -> bool:
        """True if the device waits at a gate that is still shut."""
        return self._gate is not None and self._gate.is_shut

    @property
    def landed(self) -> int:
        """The number of layers that have landed, as far as a program behind gates says; 0 if there is none."""
        return 0 if self._layering is None else self._layering.landed

    def watch(self) -> None:
        """Report each layer when it lands from now on, not only the last."""
        self._is_watched = True
        if self._layering is not None:
            for transfer in self._transfers:
                self._passed(transfer.watch(self._passed))

    def landed_at(self, first: int, stop: int, heard: float) -> list[float]:
        """Return when layers, counted from the first, were known to have landed; ``heard`` is when the loop was told."""
        if self._layering is None:
            return [heard] * (stop - first)
        return [stamp / 1e9 for stamp in self._layering.landed_ns[first:stop]]

    def _of_gate(self, number: int | None, error: LLMException | None) -> LLMException | None:
        """Return the error of a wait for a gate, in the caller's words if the gate stayed shut for too long."""
        if number is None or not isinstance(error, TransferTimeout):
            return error
        return TransferTimeout(
            f"layer {self._route.layers[number]} was not recorded, or its compute did not end, within"
            f" {self._gate_seconds:g} s, the timeout of its EventLayerSynchronizer",
            hint="give EventLayerSynchronizer a longer timeout",
        )

    def give_back_gate(self) -> None:
        """Release the gate. Call it only once all are quiet, when nothing waits there."""
        if self._gate is not None:
            passed = self._progress.ready if self._layering is None else self._layering.landed
            self._gate.close(passed, is_stuck=self._progress.stage is Stage.STUCK)
