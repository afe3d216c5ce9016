"""Layers of a peer's transfers as they land here, so that a consumer can start before the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import anyio

from aiodatadist._concurrency.signal import Signal
from aiodatadist._device import give_way
from aiodatadist._link.control.questions import AGAIN_SECONDS, MOST_AGAIN_SECONDS, PendingQuestions
from aiodatadist._values import peer_budget
from aiodatadist._values.foreign import printable
from aiodatadist._wire.messages import Landed, Message, Ping, Pong, Watch
from aiodatadist._wire.reasons import reason_of
from aiodatadist.errors import LinkError, LLMException, LLMStatusCode, ParamInvalid, ProtocolError, TransferError


class LandedLayers(NamedTuple):
    """Layers from ``first`` to ``stop``, of ``tensors`` tensors each; 0 if the sender does not say how many."""

    first: int
    stop: int
    tensors: int


NO_LAYERS = LandedLayers(0, 0, 0)


class LayerReceiver:
    """The layers of one cache as a peer's transfer fills them. Returned by ``CacheManager.receive_layers``."""

    def __init__(self, layer_events: LayerEvents, cache_id: int, num_tensors: int, tensors_per_layer: int) -> None:
        self._layer_events = layer_events
        self._landed = bytearray(num_tensors)  # a 1 for each tensor, because the sender may count in other layers
        self._tensors_per_layer = tensors_per_layer
        self._cache_id = cache_id
        self._call = 0
        self._asked_at = 0.0
        self._events = [Signal() for _ in range(max(1, num_tensors // tensors_per_layer))]
        self._failure: LLMException | None = None

    @property
    def landed(self) -> list[int]:
        """The layers that have landed."""
        return [i for i, event in enumerate(self._events) if event.is_set()]

    async def layer(self, layer_index: int) -> None:
        """Wait until all bytes of a layer have landed.

        Set your own time limit: a transfer that fails before it has found this cache is not reported here.

        Raises:
            ParamInvalid: if there is no such layer.
            LLMException: if this is not the event loop of the cluster.
            ForkError: if this is not the process of the cluster.
            TransferError: if the peer's transfer failed; it has the status of that failure.
            LinkError: if the link ended first.
        """
        self._layer_events.check_here()
        if not 0 <= layer_index < len(self._events):
            raise ParamInvalid(f"layer_index is {layer_index}: the cache has {len(self._events)} layers")
        event = self._events[layer_index]
        pause = AGAIN_SECONDS
        while not event.is_set():
            if self._failure is not None:
                raise type(self._failure)(*self._failure.args, status_code=self._failure.status_code)
            if not await self._news_within(pause, event):
                self._ask_again()
                pause = min(2 * pause, MOST_AGAIN_SECONDS)
        await give_way()

    async def _news_within(self, seconds: float, event: Signal) -> bool:
        """Wait until the layer has landed or has failed, and return True. Return False if the time is over first."""
        with anyio.move_on_after(seconds):
            while not event.is_set() and self._failure is None:
                await self._layer_events.wait_news()
            return True
        return False

    def _ask_again(self) -> None:
        """Ask the peer to repeat its reports, which may have been lost. All callers that wait here share one question."""
        now = anyio.current_time()
        if self._call and now - self._asked_at >= AGAIN_SECONDS:
            self._asked_at = now
            self._layer_events.ask_again(self._message(self._call))

    def _message(self, call: int, *, on: bool = True) -> Watch:
        """Return the message that starts or stops the events. ``call`` is 0 if the peer knows no such numbers."""
        return Watch(cache_id=self._cache_id, on=on, call=call)

    def _asked(self, call: int) -> Watch:
        """Note the number of the question and when it is asked, and return it."""
        self._call, self._asked_at = call, anyio.current_time()
        return self._message(call)

    def _stopped(self) -> Watch:
        """Return the message that stops the events."""
        return self._message(self._call, on=False)

    def _take(self, message: Landed) -> None:
        if message.watch not in (0, self._call):
            return  # an event of an earlier watch
        self._land(LandedLayers(message.first, message.stop, message.tensors or self._tensors_per_layer))
        if message.reason:
            self._failure = TransferError(printable(message.reason), status_code=LLMStatusCode.of(message.status))

    def _land(self, layers: LandedLayers) -> None:
        """Note tensors that have landed, and set the layers that are complete now."""
        end, each = len(self._landed), self._tensors_per_layer
        first, stop = min(layers.first * layers.tensors, end), min(layers.stop * layers.tensors, end)
        self._landed[first:stop] = b"\1" * (stop - first)
        for layer in range(first // each, -(-stop // each)):
            if layer < len(self._events) and all(self._landed[layer * each : (layer + 1) * each]):
                self._events[layer].set()


class Sender(Protocol):
    """A layered transfer of this end into a peer's cache."""

    def on_watched(self) -> list[LandedLayers]:
        """Report layers from now on, because the peer watches. Return those that have landed."""

    def on_link_ended(self, failure: LinkError) -> None:
        """Start nothing more on the link, which is ending."""


class _Watched:
    """A cache whose layers the peer watches, and the events that it was sent since. ``call`` is the watch's number."""

    __slots__ = ("_failure", "_ranges", "call")

    def __init__(self, call: int) -> None:
        self.call: int = call
        self._ranges: list[LandedLayers] | tuple[()] = ()  # a list once layers have landed: a peer may watch thousands
        self._failure: Landed | None = None

    def told(self, message: Landed) -> None:
        """Remember an event that is sent to the peer."""
        told = LandedLayers(message.first, message.stop, message.tensors)
        if message.reason:
            self._failure = message
            return
        if not isinstance(self._ranges, list):
            self._ranges = []
        last = self._ranges[-1] if self._ranges else NO_LAYERS
        if last.stop == told.first and last.tensors == told.tensors:
            self._ranges[-1] = last._replace(stop=told.stop)
        elif not any(a <= told.first and told.stop <= b and tensors == told.tensors for a, b, tensors in self._ranges):
            self._ranges.append(told)

    def again(self, cache_id: int) -> list[Landed]:
        """Return the events that the peer was sent, to be sent again."""
        said = [Landed(cache_id=cache_id, watch=self.call, **told._asdict()) for told in self._ranges]
        return said if self._failure is None else [*said, self._failure]


class LayerEvents:
    """The layer events of one link: those of caches that this end watches, and those that the peer watches."""

    def __init__(
        self,
        post: Callable[[Message], None],
        check_here: Callable[[], None],
        questions: PendingQuestions,
        is_numbered: Callable[[], bool],
        post_again: Callable[[Message], None],
    ) -> None:
        """Set up the events of a link.

        Args:
            is_numbered: returns True if the peer knows the ``call`` of a ``watch``.
            post_again: repeats a message. A receiver uses it, as ``ask_again``, if it heard nothing for a while.
        """
        self._post = post
        self.ask_again = post_again
        self._questions = questions
        self._is_numbered = is_numbered
        self.check_here = check_here
        self._receivers: dict[int, LayerReceiver] = {}
        self._watched: dict[int, _Watched] = {}
        self._active: dict[Sender, int] = {}  # and the cache of each
        self._senders: dict[int, dict[Sender, None]] = {}  # the same, by cache
        self._news = Signal()

    # ---- receiving ----

    def watch(self, cache_id: int, num_tensors: int, tensors_per_layer: int) -> LayerReceiver:
        """Return a receiver for the layers of a cache. Raises ParamInvalid if the cache has one already."""
        if cache_id in self._receivers:
            raise ParamInvalid(f"layers of cache {cache_id} are being received already")
        receiver = self._receivers[cache_id] = LayerReceiver(self, cache_id, num_tensors, tensors_per_layer)
        return receiver

    async def announce(self, receiver: LayerReceiver) -> None:
        """Wait until the peer knows that the receiver's cache is watched. The caller handles the end of the link."""
        if self._is_numbered():
            await self._questions.ask(receiver._asked, Pong)
        else:
            self._post(receiver._message(0))
            await self._questions.ask(lambda call: Ping(call=call), Pong)

    def unwatch(self, cache_id: int) -> None:
        """Stop watching a cache, and tell the peer."""
        if (receiver := self._receivers.pop(cache_id, None)) is not None:
            self._post(receiver._stopped())

    async def wait_news(self) -> None:
        """Wait until the peer reports something, or the link ends."""
        await self._news.wait()

    def on_landed(self, message: Landed) -> None:
        """Pass the peer's event to the receiver of its cache."""
        receiver = self._receivers.get(message.cache_id)
        if receiver is not None:
            receiver._take(message)
            self._wake()

    def _wake(self) -> None:
        self._news.wake()

    def end(self, failure: LinkError) -> None:
        """Fail the receivers, because the link has ended."""
        for receiver in self._receivers.values():
            receiver._failure = receiver._failure or failure
        self._wake()

    # ---- sending ----

    def begin(self, sender: Sender, cache_id: int) -> None:
        """Note that a transfer into a peer's cache begins."""
        self._active[sender] = cache_id
        self._senders.setdefault(cache_id, {})[sender] = None

    def finish(self, sender: Sender) -> None:
        """Note that a transfer into a peer's cache has ended."""
        cache_id = self._active.pop(sender, None)
        if cache_id is not None:
            senders = self._senders[cache_id]
            del senders[sender]
            if not senders:
                del self._senders[cache_id]

    def is_watched(self, cache_id: int) -> bool:
        """Return True if the peer watches the layers of this cache of its own."""
        return cache_id in self._watched

    def stop_sending(self, failure: LinkError) -> None:
        """Tell the transfers that the link is ending: nothing more starts on it."""
        for sender in list(self._active):
            sender.on_link_ended(failure)

    def tell(self, cache_id: int, layers: LandedLayers, error: LLMException | None = None) -> None:
        """Tell the peer that layers have landed or, with an error, that no more will. Free if the peer does not watch."""
        watched = self._watched.get(cache_id)
        if watched is None:
            return
        status, reason = (0, "")
        if error is not None:
            status, reason = int(error.status_code), reason_of(error)
        landed = Landed(cache_id=cache_id, status=status, reason=reason, watch=watched.call, **layers._asdict())
        watched.told(landed)
        self._post(landed)

    def on_watch(self, message: Watch) -> None:
        """Start or stop reporting a cache's layers to the peer.

        If the peer repeats the message, send it again what it was told since the first one. An older message is out of date,
        and ignored.
        """
        cache_id, call = message.cache_id, message.call
        known = self._watched.get(cache_id)
        if not message.on:
            if known is not None and call in (0, known.call):
                del self._watched[cache_id]
            return
        if call:
            self._post(Pong(call=call))
        if known is None or call == 0 or call > known.call:
            self._begin_watching(cache_id, call)
        elif call == known.call:
            for landed in known.again(cache_id):
                self._post(landed)

    def _begin_watching(self, cache_id: int, call: int) -> None:
        if cache_id not in self._watched and len(self._watched) >= peer_budget.WATCHED_CACHES:
            raise ProtocolError(f"the peer watches more than {peer_budget.WATCHED_CACHES} caches")
        self._watched[cache_id] = _Watched(call)
        for sender in list(self._senders.get(cache_id, ())):
            for layers in sender.on_watched():
                self.tell(cache_id, layers)
