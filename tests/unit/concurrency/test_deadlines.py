"""Many deadlines with one timer: each is told once, in turn, the loop goes on, and none is kept longer than needed."""

from __future__ import annotations

import asyncio
import gc
import weakref
from time import monotonic

import pytest

from aiodatadist._concurrency import alarms as module
from aiodatadist._concurrency.completion import TransferCompletion, TransferState
from aiodatadist._concurrency.deadlines import Deadlines
from aiodatadist.errors import LLMStatusCode, TransferTimeout


class Transfer(TransferCompletion):
    """A transfer that ends when it is told to."""

    def __init__(self, told: list[Transfer]) -> None:
        super().__init__()
        self._told = told

    @property
    def quiesce_seconds(self) -> float:
        return 0.0

    def _cancel(self) -> bool:
        self._told.append(self)
        self._finish(TransferState.CANCELLED, None)
        return True

    def end(self) -> None:
        self._finish(TransferState.DONE, None)

    def _let_go(self) -> None:
        pass

    def _what(self) -> str:
        return "a transfer"


async def test_what_is_late_ends_with_a_timeout_in_the_order_of_deadlines() -> None:
    deadlines, told = Deadlines(), list[Transfer]()
    seconds = [0.03, 0.01, 0.02, 0.01]
    transfers = [Transfer(told) for _ in seconds]
    for transfer, limit in zip(transfers, seconds, strict=True):
        deadlines.add(transfer, limit)
    assert len(deadlines) == 4
    with pytest.raises(TransferTimeout, match=r"0\.03 s from the call") as failed:
        await transfers[0].wait()
    assert failed.value.status_code is LLMStatusCode.LLM_TIMEOUT
    assert told == [transfers[i] for i in (1, 3, 2, 0)]
    assert len(deadlines) == 0
    assert all(isinstance(transfer.error, TransferTimeout) for transfer in transfers)


async def test_what_has_ended_is_not_told_and_not_kept() -> None:
    deadlines, told = Deadlines(), list[Transfer]()
    kept, ended = Transfer(told), [Transfer(told) for _ in range(1000)]
    deadlines.add(kept, 3600)
    for transfer in ended:
        deadlines.add(transfer, 3600)
    gone = [weakref.ref(transfer) for transfer in ended]
    for transfer in ended:
        transfer.end()
    assert len(deadlines) == 1
    alarms = deadlines._alarms
    assert len(alarms._heap) < 200
    del transfer, ended
    gc.collect()
    assert not any(ref() for ref in gone)
    kept.end()
    assert alarms._timer is None
    assert not told


async def test_one_that_was_cancelled_by_its_caller_stays_cancelled() -> None:
    deadlines, transfer = Deadlines(), Transfer([])
    deadlines.add(transfer, 3600)
    transfer.cancel()
    assert transfer.is_cancelled
    deadlines.add(transfer, 3600)
    assert len(deadlines) == 0


async def test_the_loop_has_its_turn_between_two_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", 0.0)
    deadlines, told = Deadlines(), list[Transfer]()
    transfers = [Transfer(told) for _ in range(50)]
    for transfer in transfers:
        deadlines.add(transfer, 0.001)
    rounds: list[int] = []

    def tick() -> None:
        rounds.append(len(told))
        if len(told) < len(transfers):
            asyncio.get_running_loop().call_soon(tick)

    tick()
    with pytest.raises(TransferTimeout):
        await transfers[-1].wait()
    assert all(transfer.late_after for transfer in transfers)
    assert len(set(rounds)) > 10, "all were told in one go"


async def test_all_are_marked_before_the_first_is_told() -> None:
    """Mark all transfers first: the end of the first one could let one begin that is late itself."""
    deadlines, told = Deadlines(), list[Transfer]()
    transfers = [Transfer(told) for _ in range(20)]
    late: list[bool] = []
    transfers[0].add_done_callback(lambda _: late.extend(bool(transfer.late_after) for transfer in transfers))
    for transfer in transfers:
        deadlines.add(transfer, 0.001)
    end = monotonic() + 0.01
    while monotonic() < end:  # keeps the loop, so that all are due when it goes on
        pass
    with pytest.raises(TransferTimeout):
        await transfers[-1].wait()
    assert late == [True] * 20
