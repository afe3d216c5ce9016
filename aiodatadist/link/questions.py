"""Questions to the peer, and its answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from aiodatadist.cache.names import Name
from aiodatadist.concurrency.signal import Signal
from aiodatadist.errors import FeatureNotEnabled, LLMStatusCode, ProtocolError
from aiodatadist.wire.messages import Claimed, Digests, Found, Message, Owned, Pong, Pulled

AGAIN_SECONDS = 1.0
"""After which something is said again that was not answered: then after twice that, and so on."""
MOST_AGAIN_SECONDS = 8.0

Answer = Found | Pulled | Pong | Owned | Claimed | Digests


class Question:
    """A question that is under way.

    Attributes:
        number: chosen by us; its answer has it, too.
        kind: what its answer has to be.
        name: of the cache that it is about, if it is a lookup.
        checksums: how many of them an answer has that tells of success.
        answered, answer: set together; without an answer where the peer does not know such questions.
        again: says it once more, later.
        revoked: caches that the peer took back meanwhile: an answer that tells of one was said before that.
        then: called behind that.
    """

    __slots__ = ("again", "answer", "answered", "checksums", "kind", "name", "number", "revoked", "then")

    def __init__(
        self,
        number: int,
        kind: type[Answer],
        name: Name | None,
        checksums: int = 0,
        then: Callable[[], object] | None = None,
    ) -> None:
        self.number = number
        self.kind = kind
        self.name = name
        self.checksums = checksums
        self.answered = Signal()
        self.answer: Answer | None = None
        self.again: asyncio.TimerHandle | None = None
        self.revoked: set[int] = set()
        self.then = then

    def settle(self, answer: Answer | None) -> None:
        """The peer's answer, or None: it does not know such questions."""
        self.rest()
        self.answer = answer
        self.answered.set()
        if self.then is not None:
            self.then()

    def rest(self) -> None:
        """It is not said again."""
        if self.again is not None:
            self.again.cancel()


class PendingQuestions:
    """All of one link, by the numbers that we gave them.

    Attributes:
        is_over: no answer comes any more.
        heard: how many answers came, to whatever question. While it grows the peer is working through what it was told.
    """

    def __init__(self, post: Callable[[Message], None], post_again: Callable[[Message], None] | None = None) -> None:
        """``post_again``: says what was said before; None: as ``post`` does."""
        self._post = post
        self._post_again = post_again or post
        self._numbers = itertools.count(1)
        self._open: dict[int, Question] = {}
        self._insisting: set[anyio.CancelScope] = set()
        self.is_over = False
        self.heard = 0

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def open(
        self,
        question: Callable[[int], Message],
        kind: type[Answer],
        name: Name | None = None,
        checksums: int = 0,
    ) -> Iterator[Question]:
        """Say something; an answer that comes within is in the call. Raises ProtocolError: it is too long to be said."""
        call = self._say(question, Question(next(self._numbers), kind, name, checksums))
        try:
            yield call
        finally:
            self.close(call)

    def start(
        self, question: Callable[[int], Message], kind: type[Answer], name: Name | None, then: Callable[[], object]
    ) -> Question:
        """Say something, and call ``then`` when the answer is there, unless it is closed before. Raises ProtocolError."""
        return self._say(question, Question(next(self._numbers), kind, name, then=then))

    def start_repeated(
        self, question: Callable[[int], Message], kind: type[Answer], then: Callable[[], object]
    ) -> Question:
        """As :meth:`start`, and say it again now and then until there is an answer: it, or the answer, may have been lost.
        It takes a timer, and no task: thousands may wait."""
        call = self.start(question, kind, None, then)
        self._repeat_after(AGAIN_SECONDS, call, question)
        return call

    def _repeat_after(self, pause: float, call: Question, question: Callable[[int], Message]) -> None:
        call.again = asyncio.get_running_loop().call_later(pause, self._repeat, pause, call, question)

    def _repeat(self, pause: float, call: Question, question: Callable[[int], Message]) -> None:
        if not self.is_over:
            self._post_again(question(call.number))
            self._repeat_after(min(2 * pause, MOST_AGAIN_SECONDS), call, question)

    def expect(self, kind: type[Answer], then: Callable[[], object], checksums: int = 0) -> Question:
        """As :meth:`start`, for something that the caller says, under the question's number."""
        call = Question(next(self._numbers), kind, None, checksums, then)
        self._open[call.number] = call
        return call

    def _say(self, question: Callable[[int], Message], call: Question) -> Question:
        self._post(question(call.number))
        self._open[call.number] = call
        return call

    def close(self, question: Question) -> None:
        """Its answer is not waited for any more."""
        question.rest()
        self._open.pop(question.number, None)

    async def ask(
        self,
        question: Callable[[int], Message],
        kind: type[Answer],
        name: Name | None = None,
        *,
        is_repeated: bool = True,
    ) -> Answer | None:
        """Say something and wait for the answer. The caller sets the deadline. ``is_repeated``: it may be said again.

        Raises FeatureNotEnabled: the peer is of an older version, which does not know such questions.
        """
        with self.open(question, kind, name) as call:
            await (self.persist(call, question) if is_repeated else call.answered.wait())
            if call.answer is None:
                raise FeatureNotEnabled(
                    f"the peer's version does not know what {kind.__name__.lower()!r} answers", hint="update the peer"
                )
            return call.answer

    async def persist(self, call: Question, question: Callable[[int], Message]) -> None:
        """Wait for the answer, and say it again now and then: it, or its answer, may have been lost."""
        pause = AGAIN_SECONDS
        while not call.answered.is_set():
            with anyio.move_on_after(pause):
                await call.answered.wait()
            if not call.answered.is_set():
                self._post_again(question(call.number))
                pause = min(2 * pause, MOST_AGAIN_SECONDS)

    def revoked(self, cache_id: int) -> None:
        """The peer takes this cache back. What it said of it before may still come, late or once more."""
        for call in self._open.values():
            if call.kind is Found:
                call.revoked.add(cache_id)

    def refused(self, number: int) -> bool:
        """The peer does not know the question of this number; whether there is one."""
        call = self._open.get(number)
        if call is not None:
            call.settle(None)
        return call is not None

    async def insist(self, question: Question, seconds: float) -> None:
        """Wait for an answer even if cancelled: for so long, and not when none can come any more."""
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + seconds) as scope:
            if self.is_over:
                return
            self._insisting.add(scope)
            try:
                await question.answered.wait()
            finally:
                self._insisting.discard(scope)

    def end(self) -> None:
        """The peer is not listened to any more: no answer comes."""
        self.is_over = True
        for scope in self._insisting:
            scope.cancel()

    def find(self, message: Answer) -> Question | None:
        """What a message answers; None: its caller does not wait any more.

        Raises:
            ProtocolError: that was another question, or it has more or fewer checksums than were asked for.
        """
        self.heard += 1
        call = self._open.get(message.call)
        if call is not None and not isinstance(message, call.kind):
            raise ProtocolError(
                f"the peer answered {message.type!r} where {call.kind.__name__.lower()!r} was asked for"
            )
        if call is not None and isinstance(message, (Pulled, Digests)):
            _check_count(call, message)
        return call


def _check_count(call: Question, message: Pulled | Digests) -> None:
    wanted = call.checksums if message.status == LLMStatusCode.LLM_SUCCESS else 0
    given = len(message.checksums)
    if given != wanted:
        raise ProtocolError(f"the peer sent {given} checksums where it was to send {wanted}")
