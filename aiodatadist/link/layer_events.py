"""What of a peer's layered transfers has landed here, layer by layer, for who wants to begin before the last one came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aiodatadist.concurrency.signal import Signal
from aiodatadist.device import give_way
from aiodatadist.errors import LinkError, LLMException, LLMStatusCode, ParamInvalid, ProtocolError, TransferError
from aiodatadist.wire.messages import Landed, Message, Watch
from aiodatadist.wire.reasons import printable

MAX_WATCHED = 65536


class LayerReceiver:
    """The layers of one cache as a peer's transfer fills them. From ``CacheManager.receive_layers``."""

    def __init__(self, layer_events: LayerEvents, cache_id: int, num_layers: int) -> None:
        self._layer_events = layer_events
        self._cache_id = cache_id
        self._events = [Signal() for _ in range(num_layers)]
        self._failure: LLMException | None = None

    @property
    def landed(self) -> list[int]:
        """The layers that are here."""
        return [i for i, event in enumerate(self._events) if event.is_set()]

    async def layer(self, layer_index: int) -> None:
        """Until all bytes of a layer are here.

        Raises:
            ParamInvalid: there is no such layer.
            LLMException: this is not the event loop of the cluster. ForkError: nor its process.
            TransferError: the peer's transfer failed, with its status.
            LinkError: the link ended first.
        """
        self._layer_events.check_here()
        if not 0 <= layer_index < len(self._events):
            raise ParamInvalid(f"layer_index is {layer_index}: the cache has {len(self._events)} layers")
        event = self._events[layer_index]
        while not event.is_set():
            if self._failure is not None:
                raise type(self._failure)(*self._failure.args, status_code=self._failure.status_code)
            await self._layer_events.wait_news()
        await give_way()

    def _take(self, message: Landed) -> None:
        for event in self._events[message.first : message.stop]:
            event.set()
        if message.reason:
            self._failure = TransferError(message.reason, status_code=LLMStatusCode.of(message.status))


class Sender(Protocol):
    """A layered transfer of this end into a cache of the peer's."""

    def on_watched(self) -> list[tuple[int, int]]:
        """The peer wants to hear of layers from now on; those that are there, as ranges."""

    def on_link_ended(self, failure: LinkError) -> None:
        """No new transfer starts on the link."""


class LayerEvents:
    """Both sides of it: what this end watches, and what the peer watches here."""

    def __init__(self, post: Callable[[Message], None], check_here: Callable[[], None]) -> None:
        self._post = post
        self.check_here = check_here
        self._receivers: dict[int, LayerReceiver] = {}
        self._watched: set[int] = set()
        self._active: dict[Sender, int] = {}
        self._news = Signal()

    # ---- receiving ----

    def watch(self, cache_id: int, num_layers: int) -> LayerReceiver:
        """Raises ParamInvalid: this cache is watched already."""
        if cache_id in self._receivers:
            raise ParamInvalid(f"layers of cache {cache_id} are being received already")
        receiver = self._receivers[cache_id] = LayerReceiver(self, cache_id, num_layers)
        self._post(Watch(cache_id=cache_id, on=True))
        return receiver

    def unwatch(self, cache_id: int) -> None:
        if self._receivers.pop(cache_id, None) is not None:
            self._post(Watch(cache_id=cache_id, on=False))

    async def wait_news(self) -> None:
        await self._news.wait()

    def on_landed(self, message: Landed) -> None:
        receiver = self._receivers.get(message.cache_id)
        if receiver is not None:
            receiver._take(message)
            self._wake()

    def _wake(self) -> None:
        self._news.wake()

    def end(self, failure: LinkError) -> None:
        """The link is over."""
        for receiver in self._receivers.values():
            receiver._failure = receiver._failure or failure
        self._wake()

    # ---- sending ----

    def begin(self, sender: Sender, cache_id: int) -> None:
        """A transfer into a cache of the peer's begins."""
        self._active[sender] = cache_id

    def finish(self, sender: Sender) -> None:
        self._active.pop(sender, None)

    def is_watched(self, cache_id: int) -> bool:
        """The peer wants to hear of layers in this cache of its."""
        return cache_id in self._watched

    def stop_sending(self, failure: LinkError) -> None:
        """No new transfer starts on the link."""
        for sender in list(self._active):
            sender.on_link_ended(failure)

    def tell(self, cache_id: int, first: int, stop: int, error: LLMException | None = None) -> None:
        """These layers are there; or, with an error, no more come. Costs nothing when the peer does not watch."""
        if cache_id not in self._watched:
            return
        status, reason = (0, "")
        if error is not None:
            status, reason = int(error.status_code), printable(error)
        self._post(Landed(cache_id=cache_id, first=first, stop=stop, status=status, reason=reason))

    def on_watch(self, cache_id: int, on: bool) -> None:
        if not on:
            self._watched.discard(cache_id)
            return
        if len(self._watched) >= MAX_WATCHED:
            raise ProtocolError(f"the peer watches more than {MAX_WATCHED} caches")
        self._watched.add(cache_id)
        for sender in [sender for sender, target in self._active.items() if target == cache_id]:
            for first, stop in sender.on_watched():
                self.tell(cache_id, first, stop)
