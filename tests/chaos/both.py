"""An owner and a puller of a chaos run in this process, without faults but those that a test plants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist._cli.chaos import sizes
from aiodatadist._cli.chaos.command import sides_of
from aiodatadist._cli.chaos.messages import Report, SideSettings, Stage, Violated
from aiodatadist._cli.chaos.profiles import PROFILES
from aiodatadist._cli.chaos.side import Side
from aiodatadist._cli.chaos.tally import GOOD
from aiodatadist._concurrency.signal import Signal

SMALL_BLOCK = 64 << 10
"""Bytes of a block of the cache for large pushes where none is made: a side writes all of that cache when it opens."""
MOST = 5000
"""Operations for which a defect may stay hidden: each is found within 400."""


class Both:
    """The two sides, and what they say."""

    def __init__(self, profile: str, name: str) -> None:
        self.found: list[tuple[str, str]] = []
        self.done: dict[tuple[str, str], int] = {}
        self._said = Signal()
        self._ended = 0
        kinds = sides_of(PROFILES[profile].door)
        self.owner, self.puller = (self._side(kinds[each], each, profile, name) for each in ("owner", "puller"))
        self._looks = 0

    def _side(self, kind: type[Side], side: str, profile: str, name: str) -> Side:
        made = kind(SideSettings(name=side, profile=PROFILES[profile], seed=1, clusters=[1], group=name))
        ended = made.tally.ended

        def told(operation: str, status: str) -> None:
            ended(operation, status)
            self.done[operation, status] = self.done.get((operation, status), 0) + 1
            self._ended += 1
            self._said.wake()

        made.tally.ended = told  # type: ignore[method-assign]
        made.say = self._take  # type: ignore[method-assign]
        return made

    def _take(self, report: Report) -> None:
        if isinstance(report, Violated):
            self.found.append((report.rule, report.what))
            self._said.wake()

    def good(self, operation: str) -> int:
        return self.done.get((operation, GOOD), 0)

    async def go_on(self) -> None:
        for side in (self.owner, self.puller):
            await side.reach(Stage(name="resume"))

    async def until(self, is_enough: Callable[[], Any]) -> None:
        """Wait until it is enough, or for ``MOST`` operations."""
        before = self._ended
        while not is_enough() and self._ended - before < MOST:
            await self._said.wait()

    async def look(self) -> None:
        """At rest, at everything."""
        for name in ("drain", "part", "audit"):
            for side in (self.puller, self.owner):
                await side.reach(Stage(name=name, is_first=not self._looks))
        self._looks += 1


@asynccontextmanager
async def both(profile: str, name: str = "", large_block: int = SMALL_BLOCK) -> AsyncIterator[Both]:
    """Linked as soon as they go on."""
    ends = Both(profile, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "LARGE_BLOCK", large_block)
        async with _opened(ends):
            yield ends


@asynccontextmanager
async def _opened(ends: Both) -> AsyncIterator[None]:
    async with ends.owner.opened() as peers, ends.puller.opened():
        await ends.puller.meet(peers)
        async with anyio.create_task_group() as group:
            ends.owner.start(group)
            ends.puller.start(group)
            yield
            group.cancel_scope.cancel()
