"""Questions to the peer, and its answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from aiodatadist.cache.names import Name
from aiodatadist.errors import FeatureNotEnabled, LLMStatusCode, ProtocolError
from aiodatadist.wire.messages import Claimed, Digests, Found, Message, Owned, Pong, Pulled

Answer = Found | Pulled | Pong | Owned | Claimed | Digests


class Question:
    """A question that is under way.

    Attributes:
        number: chosen by us; its answer has it, too.
        kind: what its answer has to be.
        name: of the cache that it is about, if it is a lookup.
        checksums: how many of them an answer has that tells of success.
        answered, answer: set together; without an answer where the peer does not know such questions.
    """

    def __init__(self, number: int, kind: type[Answer], name: Name | None, checksums: int) -> None:
        self.number = number
        self.kind = kind
        self.name = name
        self.checksums = checksums
        self.answered = anyio.Event()
        self.answer: Answer | None = None


class PendingQuestions:
    """All of one link, by the numbers that we gave them. ``is_over``: no answer comes any more."""

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        self._numbers = itertools.count(1)
        self._open: dict[int, Question] = {}
        self._insisting: set[anyio.CancelScope] = set()
        self.is_over = False

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
        call = Question(next(self._numbers), kind, name, checksums)
        self._post(question(call.number))
        self._open[call.number] = call
        try:
            yield call
        finally:
            del self._open[call.number]

    async def ask(
        self, question: Callable[[int], Message], kind: type[Answer], name: Name | None = None
    ) -> Answer | None:
        """Say something and wait for the answer. The caller sets the deadline.

        Raises FeatureNotEnabled: the peer is of an older version, which does not know such questions.
        """
        with self.open(question, kind, name) as call:
            await call.answered.wait()
            if call.answer is None:
                raise FeatureNotEnabled(
                    f"the peer's version does not know what {kind.__name__.lower()!r} answers", hint="update the peer"
                )
            return call.answer

    def refused(self, number: int) -> bool:
        """The peer does not know the question of this number; whether there is one."""
        call = self._open.get(number)
        if call is not None:
            call.answered.set()
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
