"""Questions: messages to the peer that it answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from aiodatadist._cache.names import Name
from aiodatadist._concurrency.signal import Signal
from aiodatadist._wire.messages import Claimed, Digests, Found, Message, Owned, Pong, Pulled
from aiodatadist.errors import FeatureNotEnabled, LLMStatusCode, ProtocolError

AGAIN_SECONDS = 1.0
"""Seconds after which a message is repeated if it has not been answered. The time doubles with each repetition."""
MOST_AGAIN_SECONDS = 8.0
"""The most seconds between two repetitions."""

REVOKED_CACHES = 1024
"""The latest revoked caches that are remembered one by one. Of older ones, the number of the last revocation is enough."""

Answer = Found | Pulled | Pong | Owned | Claimed | Digests


class Question:
    """A question that is under way.

    Attributes:
        number: the number that this end gave the question. Its answer has the same number.
        kind: the type that the answer must have.
        name: the name of the cache, if the question is a lookup.
        checksums: the number of checksums that the answer must have if it reports success.
        least_bytes, most_bytes: the numbers of bytes that the answer may report if it reports success.
        answered: set when the question is settled.
        answer: the peer's answer; None until then, and if the peer's version does not know such questions.
        again: the timer that repeats the question.
        asked_after: the number of revocations that had come from the peer when the question was asked.
        then: called when the question is settled.
    """

    __slots__ = (
        "again",
        "answer",
        "answered",
        "asked_after",
        "checksums",
        "kind",
        "least_bytes",
        "most_bytes",
        "name",
        "number",
        "then",
    )

    def __init__(
        self,
        number: int,
        kind: type[Answer],
        name: Name | None,
        checksums: int = 0,
        then: Callable[[], object] | None = None,
        least_bytes: int = 0,
        most_bytes: int = 2**64,
    ) -> None:
        self.number: int = number
        self.kind: type[Found] | type[Pulled] | type[Pong] | type[Owned] | type[Claimed] | type[Digests] = kind
        self.name: Name | None = name
        self.checksums: int = checksums
        self.least_bytes: int = least_bytes
        self.most_bytes: int = most_bytes
        self.answered: Signal = Signal()
        self.answer: Answer | None = None
        self.again: asyncio.TimerHandle | None = None
        self.asked_after: int = 0
        self.then: Callable[[], object] | None = then

    def settle(self, answer: Answer | None) -> None:
        """Set the peer's answer, or None if its version does not know such questions."""
        if self.again is not None:
            self.rest()
        self.answer = answer
        self.answered.set()
        if self.then is not None:
            self.then()

    def rest(self) -> None:
        """Stop repeating the question."""
        if self.again is not None:
            self.again.cancel()


class PendingQuestions:
    """The open questions of one link, by number.

    Args:
        post: sends a message to the peer.
        post_again: repeats a message; ``post`` if it is None.

    Attributes:
        is_over: True once no answer can come.
        heard: the number of answers to any question. While it grows, the peer is working through earlier messages.
    """

    def __init__(self, post: Callable[[Message], None], post_again: Callable[[Message], None] | None = None) -> None:
        self._post = post
        self._post_again = post_again or post
        self._numbers = itertools.count(1)
        self._open: dict[int, Question] = {}
        self._insisting: set[anyio.CancelScope] = set()
        self._revocations = 0
        self._revoked: dict[int, int] = {}  # the number of the last revocation, by cache; the oldest first
        self._forgotten = 0  # the highest number that was dropped from these
        self.is_over: bool = False
        self.heard: int = 0

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
        """Ask a question, and keep it open within the context. Raises ProtocolError if it is too long for a message."""
        call = self._say(question, Question(next(self._numbers), kind, name, checksums))
        try:
            yield call
        finally:
            self.close(call)

    def start(
        self,
        question: Callable[[int], Message],
        kind: type[Answer],
        name: Name | None,
        then: Callable[[], object],
        checksums: int = 0,
    ) -> Question:
        """Ask a question, and call ``then`` when it is settled, unless it is closed first.

        Raises ProtocolError if it is too long for a message.
        """
        return self._say(question, Question(next(self._numbers), kind, name, checksums, then))

    def start_repeated(
        self, question: Callable[[int], Message], kind: type[Answer], then: Callable[[], object]
    ) -> Question:
        """Ask a question, as :meth:`start` does, and repeat it until it is settled, in case a message is lost.

        The question takes a timer, but no task: thousands may wait.
        """
        call = self.start(question, kind, None, then)
        self._repeat_after(AGAIN_SECONDS, call, question)
        return call

    def _repeat_after(self, pause: float, call: Question, question: Callable[[int], Message]) -> None:
        call.again = asyncio.get_running_loop().call_later(pause, self._repeat, pause, call, question)

    def _repeat(self, pause: float, call: Question, question: Callable[[int], Message]) -> None:
        if not self.is_over:
            self._post_again(question(call.number))
            self._repeat_after(min(2 * pause, MOST_AGAIN_SECONDS), call, question)

    def expect(self, then: Callable[[], object], checksums: int, least_bytes: int, most_bytes: int) -> Question:
        """Open a request for a pull, as :meth:`start` does, that the caller sends under the question's number."""
        return self._keep(Question(next(self._numbers), Pulled, None, checksums, then, least_bytes, most_bytes))

    def _say(self, question: Callable[[int], Message], call: Question) -> Question:
        self._post(question(call.number))
        return self._keep(call)

    def _keep(self, call: Question) -> Question:
        call.asked_after = self._revocations
        self._open[call.number] = call
        return call

    def close(self, question: Question) -> None:
        """Close a question: its answer is no longer awaited."""
        if question.again is not None:
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
        """Ask a question, and return the answer. The caller sets the deadline. ``is_repeated`` allows repetitions.

        Raises FeatureNotEnabled if the peer's version is too old to know such questions.
        """
        with self.open(question, kind, name) as call:
            await (self.persist(call, question) if is_repeated else call.answered.wait())
            if call.answer is None:
                raise FeatureNotEnabled(
                    f"the peer's version does not know what {kind.__name__.lower()!r} answers", hint="update the peer"
                )
            return call.answer

    async def persist(self, call: Question, question: Callable[[int], Message]) -> None:
        """Wait until a question is settled, and repeat it meanwhile, because it or its answer may have been lost."""
        pause = AGAIN_SECONDS
        while not call.answered.is_set():
            with anyio.move_on_after(pause):
                await call.answered.wait()
            if not call.answered.is_set():
                self._post_again(question(call.number))
                pause = min(2 * pause, MOST_AGAIN_SECONDS)

    def revoked(self, cache_id: int) -> None:
        """Note that the peer revokes a cache. Earlier answers that name it may still come, late or repeated.

        This costs the same however many questions are open: a peer may revoke thousands of caches that it never had.
        """
        self._revocations += 1
        self._revoked.pop(cache_id, None)
        self._revoked[cache_id] = self._revocations
        if len(self._revoked) > REVOKED_CACHES:
            self._forgotten = self._revoked.pop(next(iter(self._revoked)))

    def is_revoked_since(self, question: Question, cache_id: int) -> bool:
        """Return True if the peer revoked a cache after the question was asked, or may have.

        An answer that names the cache may have been sent before that.
        """
        return self._revoked.get(cache_id, self._forgotten) > question.asked_after

    def refused(self, number: int) -> bool:
        """Settle a question that the peer's version does not know. Return False if there is none of this number."""
        call = self._open.get(number)
        if call is not None:
            call.settle(None)
        return call is not None

    async def insist(self, question: Question, seconds: float) -> None:
        """Wait for an answer even if cancelled, but at most ``seconds``, and only while an answer can come."""
        # Shielded: the caller may use its memory again only when the peer has said that it stopped.
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + seconds) as scope:
            if self.is_over:
                return
            self._insisting.add(scope)
            try:
                await question.answered.wait()
            finally:
                self._insisting.discard(scope)

    def end(self) -> None:
        """Note that no answer can come, because this end no longer listens to the peer."""
        self.is_over = True
        for scope in self._insisting:
            scope.cancel()

    def find(self, message: Answer) -> Question | None:
        """Return the question that a message answers; None if it has been closed.

        Raises:
            ProtocolError: if the question wants another type of answer, or another number of checksums, or if more bytes
                have been moved than it asked for.
        """
        self.heard += 1
        call = self._open.get(message.call)
        if call is not None and not isinstance(message, call.kind):
            raise ProtocolError(f"the peer answered {message.type!r}, but {call.kind.__name__.lower()!r} was asked for")
        if call is not None and isinstance(message, (Pulled, Digests)):
            _check_count(call, message)
        if call is not None and isinstance(message, Pulled):
            _check_figures(call, message)
        return call


def _check_figures(call: Question, message: Pulled) -> None:
    """Raise ProtocolError for figures that cannot be: they are added to those of all links."""
    if message.nbytes > call.most_bytes:
        raise ProtocolError(f"the peer moved {message.nbytes} bytes: it was asked for {call.most_bytes}")
    if message.status == LLMStatusCode.LLM_SUCCESS and message.nbytes < call.least_bytes:
        raise ProtocolError(f"the peer moved {message.nbytes} bytes: it was asked for at least {call.least_bytes}")
    if message.ranges > message.nbytes:
        raise ProtocolError(
            f"the peer moved {message.ranges} ranges of {message.nbytes} bytes in all: each has at least 1"
        )


def _check_count(call: Question, message: Pulled | Digests) -> None:
    wanted = call.checksums if message.status == LLMStatusCode.LLM_SUCCESS else 0
    given = len(message.checksums)
    if given != wanted:
        raise ProtocolError(f"the peer sent {given} checksums: it was asked for {wanted}")
