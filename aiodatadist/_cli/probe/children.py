"""Child processes of a probe: started with an order, killed at their time limit, with the reports that they made.

Each step has an event loop for as long as it lasts: the rest of a probe is not asynchronous.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from pydantic import ValidationError

from aiodatadist._cli.kit.children import REAP_SECONDS, Child, open_child
from aiodatadist._cli.probe.report import Call, Ending, Outcome, StepReport
from aiodatadist._cli.probe.step import Step

GRACE = 2.0
"""Seconds that a far end has to end after the near end has ended."""

FIRST, LAST = 60, 20
"""The numbers of calls that a report keeps from the beginning and from the end of a step."""

LAST_WORDS = 2000


@dataclass
class Ended:
    """The end of a child, and its reports."""

    ending: Ending
    status: int | None
    seconds: float
    said: str
    outcome: Outcome | None
    calls: list[Call]


class Watched:
    """A child, and its reports so far."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._outcome: Outcome | None = None
        self._begun: dict[int, Call] = {}
        self._calls: list[Call] = []

    async def wait(self, limit: float) -> Ended:
        """Wait until the child has ended, and kill it at its limit."""
        began = time.monotonic()
        ending: Ending = "finished"
        said = ""
        with anyio.move_on_after(limit) as limited:
            await self._hear()
        seconds = time.monotonic() - began
        if limited.cancelled_caught:
            ending = "killed at the limit"
            self.kill()
            with anyio.move_on_after(REAP_SECONDS) as reaped:
                await self._hear()
            said = "\n(the process cannot be killed)" if reaped.cancelled_caught else ""
        elif self.child.process.returncode:
            ending = "crashed"
        return Ended(
            ending,
            self.child.process.returncode,
            seconds,
            self.child.last_words[-LAST_WORDS:] + said,
            self._outcome,
            [*self._calls, *self._begun.values()],  # those that did not return last
        )

    def kill(self) -> None:
        """Kill the child with all that it started."""
        self.child.signal(signal.SIGKILL)

    async def _hear(self) -> None:
        """Read the child's output until it has ended. May be called again after it was cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.child.keep_last_words)
            while (line := await self.child.line()) is not None:
                self._take(line)
            await self.child.process.wait()

    def _take(self, line: bytes) -> None:
        try:
            told = json.loads(line)
            if "outcome" in told:
                self._outcome = Outcome.model_validate(told["outcome"])
                return
            call = Call.model_validate(told["call"])
        except (ValueError, KeyError, ValidationError):
            return  # the vendor's libraries may print, too
        if "begin" in told:
            self._begun[told["begin"]] = call
        else:
            self._begun.pop(told["end"], None)
            self._calls.append(call)


@asynccontextmanager
async def open_end(order: dict[str, Any], link: socket.socket | None) -> AsyncIterator[Watched]:
    """Start a child with an order, and kill it at the end of the ``with`` block.

    It shares ``link``, which this process can then close.
    """
    fds = [] if link is None else [link.fileno()]
    if link is not None:
        order = {**order, "link": link.fileno()}
    command = [sys.executable, "-m", "aiodatadist._cli.probe.child"]
    async with open_child("probe", command, pass_fds=fds, grace=0.0) as child:
        await child.feed(json.dumps(order).encode() + b"\n")
        await child.close_orders()
        yield Watched(child)


# ---- a step ----


def report_of(step: Step, near: Ended, far: Ended | None) -> StepReport:
    """Return the report of a step. A child that did not finish has no outcome but its end."""
    found = near.outcome
    if found is None or near.ending != "finished":
        found = Outcome(verdict="differs", found=_death(near))
    far_calls = [call.model_copy(update={"end": "far"}) for call in far.calls] if far is not None else []
    return StepReport(
        step=step.number,
        title=step.title,
        expected=step.expected,
        decides=step.decides,
        outcome=found,
        ending=near.ending,
        status=near.status,
        seconds=round(near.seconds, 3),
        said=near.said if near.ending != "finished" else "",
        calls=shortened(near.calls) + shortened(far_calls),
    )


def _death(ended: Ended) -> str:
    last = next((call for call in reversed(ended.calls) if call.microseconds is None), None)
    where = f"in {last.function}" if last is not None else "outside any call"
    if ended.ending == "killed at the limit":
        return f"hangs {where}: killed after {ended.seconds:.0f} s"
    if ended.status is not None and ended.status < 0:
        return f"died of {signal.Signals(-ended.status).name} {where}"
    words = ended.said.strip().splitlines()[-1:] or ["it said nothing"]
    return f"ended with {ended.status}: {words[0]}"


def shortened(calls: list[Call]) -> list[Call]:
    return calls if len(calls) <= FIRST + LAST else calls[:FIRST] + calls[-LAST:]


async def run_alone(step: Step, order: dict[str, Any]) -> StepReport:
    """Run a step that needs one device."""
    async with open_end({**order, "step": step.number}, None) as near:
        return report_of(step, await near.wait(step.limit), None)


async def run_together(step: Step, order: dict[str, Any], far_device: int, far_resource: str) -> StepReport:
    """Run a step with a far end on another device of this host."""
    ours, theirs = socket.socketpair()
    far_order = {**order, "step": "far", "device": far_device, "options": {"resource": far_resource}}
    with ours, theirs:
        async with open_end(far_order, theirs) as far:
            theirs.close()
            async with open_end({**order, "step": step.number}, ours) as near:
                ours.close()
                return report_of(step, *await _wait_both(near, far, step.limit))


async def run_near(step: Step, order: dict[str, Any], link: socket.socket) -> StepReport:
    """Run a step with a far end behind a connection."""
    async with open_end({**order, "step": step.number}, link) as near:
        link.close()
        return report_of(step, await near.wait(step.limit), None)


async def _wait_both(near: Watched, far: Watched, limit: float) -> tuple[Ended, Ended]:
    """Wait for the near end, and then ``GRACE`` seconds for the far end.

    Both are read meanwhile, so that neither blocks on a full pipe.
    """
    ends: dict[Watched, Ended] = {}

    async def wait(end: Watched, seconds: float) -> None:
        ends[end] = await end.wait(seconds)
        if end is far:
            far_ended.set()

    far_ended = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, far, limit + GRACE)
        ends[near] = await near.wait(limit)
        with anyio.move_on_after(GRACE):
            await far_ended.wait()
        far.kill()
    return ends[near], ends[far]
