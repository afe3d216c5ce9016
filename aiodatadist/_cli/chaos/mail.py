"""Questions and answers between the two sides, as notifications. Each must arrive once, and in order."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any

import anyio
import anyio.abc
from pydantic import BaseModel, ConfigDict, ValidationError

from aiodatadist import LLMException, NotLinked
from aiodatadist._cli.chaos.doors import Door
from aiodatadist._cli.chaos.side import Side
from aiodatadist._concurrency.signal import Signal

logger = logging.getLogger("aiodatadist.chaos")

SOONER = 10.0
"""Seconds before the end of an operation's patience in which an answer, or the end of the link, must come."""

Content = dict[str, Any]
Handler = Callable[[int, Content], Awaitable[Content]]


class _Content(BaseModel):
    """The fields of every notification."""

    model_config = ConfigDict(extra="allow")

    life: int
    number: int
    call: int = 0
    answers: int = 0


class Mail:
    """The notifications of one cluster.

    Args:
        handle: answers a peer's question.
    """

    def __init__(self, side: Side, door: Door, handle: Handler) -> None:
        self._side = side
        self._door = door
        self._handle = handle
        self._numbers, self._calls = count(1), count(1)
        self._last: dict[tuple[int, int], int] = {}
        self._answers: dict[int, Content] = {}
        self._came = Signal()
        self._handling = 0

    async def read(self) -> None:
        """Read notifications until cancelled."""
        async with anyio.create_task_group() as group:
            async for note in self._door.notifications():
                try:
                    content = _Content.model_validate_json(note.payload).model_dump(exclude_unset=True)
                except ValidationError:
                    self._side.violated("I6", f"a notification is not what was sent: {note.payload!r}")
                else:
                    self._take(note.cluster_id, content, group)

    def _take(self, cluster: int, content: Content, group: anyio.abc.TaskGroup) -> None:
        sender = cluster, content["life"]
        if content["number"] <= self._last.get(sender, 0):
            self._side.violated("I8", f"notification {content['number']} came after {self._last[sender]}: {content}")
        self._last[sender] = content["number"]
        if "answers" in content:
            self._answers[content["answers"]] = content
            self._came.wake()
        elif "call" in content:
            self._handling += 1
            group.start_soon(self._answer, cluster, content)

    async def _answer(self, cluster: int, content: Content) -> None:
        try:
            answer = await self._handle(cluster, content)
            await self._tell(cluster, {**answer, "answers": content["call"]})
        except LLMException:  # the link is gone, and with it who asked
            return
        except Exception:  # whatever it is, no answer may raise it
            self._side.violated("I7", f"{content}: {traceback.format_exc()}")
        finally:
            self._handling -= 1
            self._came.wake()

    async def wait_idle(self) -> None:
        """Wait until every question has been answered."""
        while self._handling:
            await self._came.wait()

    def content(self, content: Content) -> bytes:
        """Return a numbered notification. It must be sent before the next one is created."""
        return json.dumps({**content, "life": self._side.settings.life, "number": next(self._numbers)}).encode()

    async def _tell(self, cluster: int, content: Content) -> None:
        await self._door.tell(cluster, lambda: self.content(content))

    async def ask(self, cluster: int, question: Content) -> Content | None:
        """Ask a question, and return the answer, or None if the link ended before it came."""
        call = next(self._calls)
        async with anyio.create_task_group() as group:
            group.start_soon(self._until_parted, cluster, group.cancel_scope)
            with anyio.move_on_after(self._side.profile.patience - SOONER) as patience:
                with suppress(LLMException):
                    await self._tell(cluster, {**question, "call": call})
                    while call not in self._answers:
                        await self._came.wait()
            if patience.cancelled_caught:
                logger.warning("no answer to %s, call %d", question, call)
                self._side.violated("I3", f"cluster {cluster} is linked, and did not answer {question}")
            group.cancel_scope.cancel()
        return self._answers.pop(call, None)

    async def _until_parted(self, cluster: int, scope: anyio.CancelScope) -> None:
        with suppress(NotLinked):
            await self._door.wait_closed(cluster)
        scope.cancel()
