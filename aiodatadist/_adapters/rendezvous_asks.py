"""Questions to bootstrap servers, for a scheduler that must not wait: a request names a server, which may be silent."""

from __future__ import annotations

from concurrent.futures import Future, wait
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import monotonic

from aiodatadist._adapters import rendezvous
from aiodatadist._adapters.loop_service import LoopService
from aiodatadist._adapters.rendezvous_lines import Ranks
from aiodatadist._blocking.loop_door import LoopDoor
from aiodatadist._concurrency.scope import Scope
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._config.trust import Credential

MAX_ASKS = 64
"""Most servers that are being asked, or whose answers were not taken."""
KEPT_SECONDS = 5.0
"""Seconds after which an answer that was not taken is dropped: the engine may have been started again."""


@dataclass
class _Question:
    """A question. ``answered_at`` is a time of the monotonic clock, or 0; ``scope`` belongs to its task."""

    answer: Future[Ranks | None] = field(default_factory=Future)
    answered_at: float = 0.0
    scope: Scope = field(default_factory=Scope)

    @property
    def is_stale(self) -> bool:
        """True if its answer is too old."""
        return self.answer.done() and monotonic() - self.answered_at > KEPT_SECONDS

    @property
    def worth(self) -> int:
        """Its value: the question with the least makes room. A request can name any server, but few of them answer."""
        if not self.answer.done():
            return 1
        return 0 if self.answer.exception() else 2


class RendezvousAsks:
    """The questions of one thread. Construction and :meth:`close` wait."""

    def __init__(self, credential: Credential) -> None:
        self._credential = credential
        self._asked: dict[tuple[str, int], _Question] = {}
        self._service = LoopService("rendezvous question")
        self._door: LoopDoor[LoopService] = LoopDoor("RendezvousAsks")
        self._door.open_or_close(self._service, lambda: self._service.open(_nothing))

    def ask(self, host: str, port: int, seconds: float = 0.0) -> Ranks | None:
        """Return the ranks of the engine there, or None if some are missing, or no answer comes within ``seconds``.

        The question continues, and the next call for this address may have its answer. If too many others are asked
        meanwhile, the next call asks again. Raises what :func:`aiodatadist._adapters.rendezvous.ask` raises; the next
        call asks again.
        """
        place = host, port
        question = self._asked.get(place)
        if question is None or question.is_stale:
            question = self._start(place)
        answer = question.answer
        wait([answer], seconds)
        if not answer.done():
            return None
        del self._asked[place]
        return answer.result()

    def _start(self, place: tuple[str, int]) -> _Question:
        self._asked.pop(place, None)
        if len(self._asked) >= MAX_ASKS:
            self._make_room()
        question = self._asked[place] = _Question()
        self._door.thread.post(lambda: Spawner(self._service.group).start_soon(self._ask, place, question))
        return question

    def _make_room(self) -> None:
        """Forget the oldest question of those that are worth least."""
        least = min(self._asked, key=lambda place: self._asked[place].worth)
        self._door.thread.post(self._asked.pop(least).scope.cancel)

    async def _ask(self, place: tuple[str, int], question: _Question) -> None:
        with question.scope:
            try:
                ranks = await rendezvous.ask(*place, self._credential)
            except Exception as error:
                question.answered_at = monotonic()
                question.answer.set_exception(error)
            else:
                question.answered_at = monotonic()
                question.answer.set_result(ranks)

    def close(self) -> None:
        """Stop asking. May be called twice."""
        self._door.close()


async def _nothing(_: AsyncExitStack) -> None:
    """Do nothing: there is nothing to open."""
