"""Messages that are lost, come twice or late, as two ends in this process hear each other."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

import anyio
import pytest

from aiodatadist._concurrency.signal import Signal
from aiodatadist._link.control.wire import Wire
from aiodatadist._wire.frames import Unknown
from aiodatadist._wire.messages import Message

Fate = Literal["lost", "twice", "late", "kept"] | None
"""``kept``: comes in time, and once more in front of the next message that comes when ``Mishaps.again`` was called."""
Heard = Message | Unknown

LATE_SECONDS = 3.0
"""That a late message waits for the next one, which it lets pass."""


class Mishaps:
    """Mishaps of the messages that both ends' links in this process hear; ``decide`` chooses the fate of each."""

    def __init__(self, decide: Callable[[Heard], Fate]) -> None:
        self.decide = decide
        self.heard: list[str] = []
        self._news = Signal()
        self.happened: Counter[str] = Counter()
        self._ready: dict[Wire, deque[Heard]] = {}
        self._kept: dict[Wire, list[Heard]] = {}
        self._is_again = False
        self._receive = Wire.receive

    async def receive(self, wire: Wire) -> Heard:
        ready = self._ready.setdefault(wire, deque())
        while not ready:
            message = await self._receive(wire)
            if self._is_again:
                ready.extend(self._kept.pop(wire, []))
            fate = self.decide(message)
            self.happened[f"{message.type} {fate}"] += 1
            self._news.wake()
            if fate == "kept":
                self._kept.setdefault(wire, []).append(message)
            if fate == "late":
                with anyio.move_on_after(LATE_SECONDS):
                    ready.append(await self._receive(wire))
            if fate != "lost":
                ready.extend([message] * (2 if fate == "twice" else 1))
        self.heard.append(ready[0].type)
        self._news.wake()
        return ready.popleft()

    def again(self) -> None:
        """Repeat the kept message now, in front of what comes next."""
        self._is_again = True

    async def wait_happened(self, what: str) -> None:
        while not self.happened[what]:
            await self._news.wait()

    async def wait_heard(self, kind: str) -> None:
        while kind not in self.heard:
            await self._news.wait()


def once(*mishaps: tuple[str, Fate]) -> Callable[[Heard], Fate]:
    """Let each mishap happen to the first message of its kind, once those before it have happened."""
    left = deque(mishaps)

    def decide(message: Heard) -> Fate:
        if left and left[0][0] == message.type:
            return left.popleft()[1]
        return None

    return decide


def installed(monkeypatch: pytest.MonkeyPatch) -> Mishaps:
    """Install mishaps; none happen so far."""
    made = Mishaps(lambda _: None)

    async def receive(wire: Wire) -> Heard:
        return await made.receive(wire)

    monkeypatch.setattr(Wire, "receive", receive)
    monkeypatch.setattr(Wire, "hear", lambda *_: False)  # messages that come alone, too
    return made
