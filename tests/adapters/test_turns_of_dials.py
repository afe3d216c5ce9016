"""Dials that take turns: ticks are given by hand, so nothing here depends on a clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from aiodatadist._adapters import dials
from aiodatadist._adapters.dials import Dial, Dials, Stage


class Room:
    """Dials that end when they give way."""

    def __init__(self) -> None:
        self.dials = Dials()
        self.gone: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def dial(self, place: str, *requests: str) -> Dial:
        made = Dial(self.dials, place, None)
        for request in requests:
            made.join(request)

        async def run() -> None:
            with made.scope:
                await made.before_connecting()
                await anyio.sleep_forever()
            made.ended()
            self.gone.append(made.place)

        self.tasks.append(asyncio.create_task(run()))
        await wait_all_tasks_blocked()
        return made

    async def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.dials.tick()
            await wait_all_tasks_blocked()


@pytest.fixture
async def room(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Room]:
    monkeypatch.setattr(dials, "TICK_SECONDS", 10**6)
    monkeypatch.setattr(dials, "DIALS", 2)
    made = Room()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_a_silent_dial_gives_way_after_its_ticks_and_only_if_another_one_waits(room: Room) -> None:
    silent = [await room.dial(place, place) for place in "ab"]
    await room.tick(100)
    assert room.gone == []
    waiting = await room.dial("c", "c")
    assert waiting.stage is Stage.WAITING
    await room.tick()
    assert room.gone == ["a"], "the oldest, and no more than wait"
    assert [each.stage for each in (*silent, waiting)] == [Stage.CONNECTING] * 3
    await room.dial("d", "d")
    await room.tick()
    assert room.gone == ["a", "b"]
    await room.dial("e", "e")
    await room.tick(dials.SILENT_TICKS - 2)
    assert room.gone == ["a", "b"], "those that began last have not had their time"
    await room.tick()
    assert room.gone == ["a", "b", "c"]


async def test_what_took_the_connection_and_proves_nothing_gives_way_later(room: Room) -> None:
    mute, silent = await room.dial("mute", "a"), await room.dial("silent", "b")
    mute.connected()
    for number in range(20):
        await room.dial(f"waits{number}", f"{number}")
    await room.tick(dials.SILENT_TICKS)
    assert room.gone == ["silent"]
    assert silent.stage is Stage.CONNECTING
    await room.tick(dials.CONNECTED_TICKS - dials.SILENT_TICKS - 1)
    assert "mute" not in room.gone
    await room.tick()
    assert "mute" in room.gone
    assert mute.stage is Stage.CONNECTED


async def test_a_peer_that_has_proved_itself_makes_room_and_waits_for_none(room: Room) -> None:
    met, _ = await room.dial("met", "a"), await room.dial("b", "b")
    waiting = await room.dial("c", "c")
    met.met()
    assert waiting.stage is Stage.CONNECTING
    await room.tick(1000)
    assert "met" not in room.gone
    await met.before_connecting()


async def test_the_longest_line_loses_its_last_place_and_else_the_oldest(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dials, "WAITING", 4)
    for place in "ab":
        await room.dial(place, place)
    for place in ("long1", "long2", "long3", "short1"):
        await room.dial(place, place.rstrip("123"))
    await room.dial("x", "x")
    await room.dial("y", "y")
    assert room.gone == ["long3", "long2"]
    await room.dial("z", "z")
    assert room.gone == ["long3", "long2", "long1"]


async def test_a_place_of_several_requests_stands_in_the_lines_of_all(room: Room) -> None:
    for place in "ab":
        await room.dial(place, place)
    await room.dial("first", "one")
    shared = await room.dial("shared", "one", "two", "two")
    shared.part("two")
    await room.dial("third", "three")
    shared.join("four")
    shared.part("one")
    await room.tick(dials.SILENT_TICKS)
    assert shared.stage is Stage.CONNECTING, "of two turns one is request two's, which named it twice"
    shared.part("two")
    shared.part("four")
    assert not shared.scope.cancel_called, "it is under way"


async def test_a_place_for_which_no_request_waits_leaves_the_line(room: Room) -> None:
    for place in "ab":
        await room.dial(place, place)
    left = await room.dial("left", "one")
    left.part("one")
    await wait_all_tasks_blocked()
    assert room.gone == ["left"]


async def test_silent_places_are_remembered_until_they_answer(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dials, "SILENT_PLACES", 2)
    known = room.dials
    for place in "abc":
        known.learn(await room.dial(place, "one"), answered=False)
    assert [known.was_silent(place) for place in "abc"] == [True, True, False], "there was no room to dial c"
    for place in "de":
        known.learn(Dial(known, place, None, is_free=True), answered=False)
    assert [known.was_silent(place) for place in "bde"] == [False, True, True]
    known.learn(Dial(known, "d", None), answered=True)
    assert not known.was_silent("d")


# ---- without a task ----


class Waiting:
    """A dial that waits without a task, and what it was told."""

    def __init__(self, room: Room, place: str, *requests: str) -> None:
        self.told: list[str] = []
        self.dial = Dial(room.dials, place, None)
        for request in requests:
            self.dial.join(request)
        self.dial.wait_for_turn(lambda: self.told.append("begin"), self.leave)

    def leave(self) -> None:
        self.told.append("leave")
        self.dial.ended()


async def test_a_dial_begins_as_soon_as_there_is_room_and_only_once(room: Room) -> None:
    one, two, three = (Waiting(room, place, place) for place in "abc")
    assert (one.told, two.told, three.told) == (["begin"], ["begin"], [])
    one.dial.ended()
    assert three.told == ["begin"]
    assert three.dial.stage is Stage.CONNECTING
    three.dial.give_way()
    assert three.told == ["begin"], "its task is stopped, by its scope"
    assert three.dial.scope.cancel_called
    await three.dial.before_connecting()


async def test_a_dial_for_which_no_request_waits_leaves_the_line_without_a_task(room: Room) -> None:
    one, _, left, last = (Waiting(room, place, place) for place in "abcd")
    left.dial.part("c")
    one.dial.ended()
    assert (left.told, last.told) == (["leave"], ["begin"])


async def test_a_dial_that_is_crowded_out_leaves_the_line_without_a_task(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dials, "WAITING", 2)
    for place in "ab":
        Waiting(room, place, place)
    long = [Waiting(room, f"long{number}", "long") for number in range(2)]
    other, newest = Waiting(room, "other", "other"), Waiting(room, "long2", "long")
    assert [each.told for each in (*long, other, newest)] == [[], ["leave"], [], ["leave"]]
