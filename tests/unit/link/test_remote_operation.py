"""An operation ends once: by itself, or as the transfer that it became."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aiodatadist import LLMException, ParamInvalid, StuckError, TransferError
from aiodatadist._device import TransferCompletion, TransferState
from aiodatadist._link.data.remote_operation import RemoteOperation, failed
from tests.clock import took


class Transfer(TransferCompletion):
    """A transfer that ends when the test says so."""

    __slots__ = ("cancellations",)

    def __init__(self) -> None:
        super().__init__()
        self.cancellations = 0

    @property
    def quiesce_seconds(self) -> float:
        return 1.0

    def _cancel(self) -> bool:
        self.cancellations += 1
        return True

    def end(self, state: TransferState, error: LLMException | None = None) -> None:
        self.nbytes, self.ranges, self.queue_seconds, self.transfer_seconds = 7, 2, 0.25, 0.5
        self._finish(state, error)

    def _let_go(self) -> None:
        pass

    def _what(self) -> str:
        return "the transfer"


def operation(patience: float = 5.0) -> RemoteOperation:
    return RemoteOperation("pull_blocks of cluster 7", patience)


@pytest.mark.parametrize("state", [s for s in TransferState if s is not TransferState.PENDING])
async def test_operation_ends_as_its_transfer_does(state: TransferState) -> None:
    errors = {TransferState.FAILED: TransferError("no"), TransferState.STUCK: StuckError("no")}
    mine, transfer = operation(), Transfer()
    mine.follow(transfer)
    assert not mine.is_done
    transfer.end(state, errors.get(state))
    assert (mine.state, mine.error) == (state, errors.get(state))
    assert (mine.nbytes, mine.ranges, mine.queue_seconds, mine.transfer_seconds) == (7, 2, 0.25, 0.5)


async def test_transfer_that_is_done_already_ends_it_at_once() -> None:
    mine, transfer = operation(), Transfer()
    transfer.end(TransferState.DONE)
    mine.follow(transfer)
    assert (mine.state, mine.nbytes) == (TransferState.DONE, 7)
    await mine.wait()


async def test_better_informed_error_of_the_transfer_is_the_operations() -> None:
    mine, transfer, better = operation(), Transfer(), TransferError("the peer died")
    transfer.add_done_callback(lambda done: done.replace_error(better))
    mine.follow(transfer)
    transfer.end(TransferState.CANCELLED)
    assert (mine.state, mine.error) == (TransferState.FAILED, better)


async def test_first_end_counts() -> None:
    mine, transfer = operation(), Transfer()
    mine.follow(transfer)
    mine.finish(TransferState.DONE)
    transfer.end(TransferState.FAILED, TransferError("too late"))
    mine.finish(TransferState.CANCELLED)
    assert (mine.state, mine.error) == (TransferState.DONE, None)


async def test_cancelling_it_stops_the_task_that_talks() -> None:
    mine = operation()

    async def talk() -> None:
        with mine.scope:
            await anyio.sleep_forever()
        if mine.scope.cancelled_caught:
            mine.finish(TransferState.CANCELLED)

    async with anyio.create_task_group() as group:
        group.start_soon(talk)
        await anyio.wait_all_tasks_blocked()
        assert mine.cancel()
    assert mine.is_cancelled
    assert not mine.cancel()


async def test_cancelling_it_cancels_the_transfer_once_there_is_one() -> None:
    mine, transfer = operation(), Transfer()
    mine.follow(transfer)
    assert mine.cancel()
    assert (transfer.cancellations, mine.scope.cancel_called, mine.is_done) == (1, False, False)
    transfer.end(TransferState.CANCELLED)
    assert mine.is_cancelled


async def test_task_that_was_told_to_stop_just_before_the_transfer_began_stops_the_transfer() -> None:
    mine, transfer = operation(), Transfer()
    mine.cancel()
    mine.follow(transfer)
    assert transfer.cancellations == 1


async def test_cancelled_waiter_returns_when_the_transfer_has_ended() -> None:
    mine, transfer = operation(), Transfer()
    mine.follow(transfer)
    waiting = asyncio.create_task(mine.wait())
    await anyio.wait_all_tasks_blocked()
    waiting.cancel()
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    assert transfer.cancellations == 1
    transfer.end(TransferState.CANCELLED)
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.autojump
async def test_operation_that_does_not_answer_a_cancellation_is_stuck_after_its_patience() -> None:
    mine = operation(30)
    mine.follow(Transfer())
    waiting = asyncio.create_task(mine.wait())
    await anyio.wait_all_tasks_blocked()
    with took(30):
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert mine.state is TransferState.STUCK
    assert mine.quiesce_seconds == 30


async def test_what_could_not_begin_has_failed() -> None:
    error = ParamInvalid("9 blocks")
    mine = failed("pull_blocks", error)
    assert (mine.state, mine.error) == (TransferState.FAILED, error)
    assert not mine.cancel()
    with pytest.raises(ParamInvalid, match="9 blocks"):
        await mine.wait()
    assert repr(mine) == "<pull_blocks failed>"
