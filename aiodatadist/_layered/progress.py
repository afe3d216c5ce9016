"""The progress of a layered transfer at one destination, as a table of events and stages, without I/O or clock.

A destination is at one :class:`Stage`. How many of its layers have come how far is counted, from the first layer on:

======= ==========================================================================
offered layers that the source has called final; none if the device waits at gates
ready   layers that can be sent without waiting
sent    layers on the device. Behind gates, the device has them before they are ready
landed  layers at the peer, and compared with the source if that was asked for
told    layers that the transfer has announced to its caller
======= ==========================================================================

An event that the table does not list is a defect, and so is a layer that lands before it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from aiodatadist._device import TransferState
from aiodatadist.errors import InternalError

MAX_IN_FLIGHT = 2
"""Portions of one destination on its stream at a time. Layers that become ready in the meantime travel together."""


class Stage(Enum):
    """The stages of a destination. ``state`` is what callers see.

    ::

        LINKING -> FINDING -> SENDING -> DONE
           |          |          |
           +----------+----------+-----> FAILED, CANCELLED, STUCK
    """

    LINKING = "linking", TransferState.PENDING
    """The link is being re-established."""
    FINDING = "finding", TransferState.PENDING
    """The peer's cache is looked for, and a way to it."""
    SENDING = "sending", TransferState.PENDING
    """Layers leave as they become ready."""
    DONE = "done", TransferState.DONE
    FAILED = "failed", TransferState.FAILED
    CANCELLED = "cancelled", TransferState.CANCELLED
    STUCK = "stuck", TransferState.STUCK

    def __init__(self, word: str, state: TransferState) -> None:
        self.word = word
        self.state = state

    __hash__ = object.__hash__  # Enum's own is a call of Python, and each layer looks into the table several times


class Event(Enum):
    """Events at a destination. Some advance ``count``, an attribute of :class:`Progress`, to ``most`` at the most."""

    LINK = "link"
    """The link is there."""
    FIND = "find"
    """The peer's cache has been found, and can be reached."""
    OFFER = "offer", "offered", "total"
    READY = "ready", "ready", "total"
    SEND = "send", "sent", "total"
    LAND = "land", "landed", "sent"
    TELL = "tell", "told", "landed"
    FINISH = "finish"
    """All layers have landed."""
    FAIL = "fail"
    CANCEL = "cancel"
    STICK = "stick"
    """The device does not let go of the memory."""

    def __init__(self, word: str, count: str = "", most: str = "") -> None:
        self.word = word
        self.count = count
        self.most = most

    __hash__ = object.__hash__


END: Final[Mapping[TransferState, Event]] = {
    TransferState.DONE: Event.FINISH,
    TransferState.FAILED: Event.FAIL,
    TransferState.CANCELLED: Event.CANCEL,
    TransferState.STUCK: Event.STICK,
}
"""The event with which a destination ends in a state."""


def _ended(stage: Stage) -> Mapping[Event, Stage | None]:
    """Return the row of a stage in which a destination has ended: the first end stays, and no layer leaves or lands.

    A layer that arrives behind one that failed proves nothing about those before it.
    Gates still open, which is noted because they are given back by number. Layers that landed before are still told.
    """
    return {event: stage if event in (Event.READY, Event.TELL) else None for event in Event}


TABLE: Final[Mapping[Stage, Mapping[Event, Stage | None]]] = {
    Stage.LINKING: {
        Event.LINK: Stage.FINDING,
        Event.FAIL: Stage.FAILED,
        Event.CANCEL: Stage.CANCELLED,
        Event.TELL: Stage.LINKING,
    },
    Stage.FINDING: {
        Event.FIND: Stage.SENDING,
        Event.FAIL: Stage.FAILED,
        Event.CANCEL: Stage.CANCELLED,
        Event.TELL: Stage.FINDING,
    },
    Stage.SENDING: {
        Event.OFFER: Stage.SENDING,
        Event.READY: Stage.SENDING,
        Event.SEND: Stage.SENDING,
        Event.LAND: Stage.SENDING,
        Event.TELL: Stage.SENDING,
        Event.FINISH: Stage.DONE,
        Event.FAIL: Stage.FAILED,
        Event.CANCEL: Stage.CANCELLED,
        Event.STICK: Stage.STUCK,
    },
    **{stage: _ended(stage) for stage in (Stage.DONE, Stage.FAILED, Stage.CANCELLED, Stage.STUCK)},
}
"""The next stage, by stage and event. None if the event comes too late and changes nothing."""


class Progress:
    """The progress of one destination. Any code may read its attributes; only :meth:`on` changes them.

    Args:
        layers: layers of the source.
        is_linked: False if the link is being re-established.

    Attributes:
        stage: see :class:`Stage`.
        total: the number of layers.
        offered, ready, sent, landed, told: numbers of layers, from the first on. They only grow.
    """

    __slots__ = ("landed", "layers", "offered", "ready", "sent", "stage", "told", "total")

    def __init__(self, layers: range, *, is_linked: bool = True) -> None:
        self.layers = layers
        self.total = len(layers)
        self.stage = Stage.FINDING if is_linked else Stage.LINKING
        self.offered = self.ready = self.sent = self.landed = self.told = 0

    def on(self, event: Event, count: int = 0) -> bool:
        """Apply an event. Return True if the stage or a count has changed.

        Args:
            count: the number of layers, from the first on, that have come as far as the event says.

        Raises:
            InternalError: if the event cannot happen at this stage.
        """
        try:
            after = TABLE[self.stage][event]
        except KeyError:
            raise self._defect(event, count) from None
        if after is None:
            return False
        if event.count:
            if count > getattr(self, event.most):
                raise self._defect(event, count)
            if count <= getattr(self, event.count):
                return False
            setattr(self, event.count, count)
        elif event is Event.FINISH and not self.is_all_landed:
            raise self._defect(event, count)
        self.stage = after
        return True

    def _defect(self, event: Event, count: int) -> InternalError:
        layers = f" of {count} layers" if event.count else ""
        return InternalError(
            f"{event.word!r}{layers} happened to a destination that is {self.stage.word}: of {self.total} layers, {self.sent}"
            f" were sent, and {self.landed} have landed"
        )

    @property
    def is_open(self) -> bool:
        """True until the destination has ended."""
        return self.stage.state is TransferState.PENDING

    @property
    def is_sending(self) -> bool:
        """True if the destination takes layers: its cache has been found, and it has not ended."""
        return self.stage is Stage.SENDING

    @property
    def is_all_sent(self) -> bool:
        """True once the device has all layers."""
        return self.sent == self.total

    @property
    def is_all_landed(self) -> bool:
        """True once the peer has all layers."""
        return self.landed == self.total

    def may_send(self, group: int, in_flight: int) -> bool:
        """Return True if the layers that are ready are worth sending now.

        Args:
            group: the number of layers to send at a time, unless they are the last.
            in_flight: portions that are on the device now.
        """
        waiting = self.ready - self.sent
        is_last = self.ready == self.total
        return (
            self.stage is Stage.SENDING and waiting > 0 and in_flight < MAX_IN_FLIGHT and (waiting >= group or is_last)
        )

    def how_far(self, peer: str) -> str:
        """Return how far the destination has got, in words for the caller; empty once all layers have landed."""
        if self.stage is Stage.LINKING:
            return f"the link to {peer} is not there yet"
        if self.stage is Stage.FINDING:
            return f"{peer} has not reported its cache yet"
        if self.is_all_landed:
            return ""
        layer = self.layers[self.landed]
        missing = f"layer {layer} {'has not landed' if self.ready > self.landed else 'was not ready'}"
        return f"{self.landed} of {self.total} layers have landed at {peer}, {missing}"
