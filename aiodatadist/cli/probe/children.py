"""Child processes of a probe: started with an order, killed at their limit, and what they told until then."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from aiodatadist.cli.probe.report import Call, Ending, Outcome, StepReport
from aiodatadist.cli.probe.step import Step

GRACE = 2.0
"""Seconds that a far end has to end when the near end is gone."""

REAP = 10.0
"""Seconds for a killed process to be gone: one that is stuck in a driver may never be."""

FIRST, LAST = 60, 20
"""Calls of a step that a report keeps: these from its beginning, and these from its end."""

LAST_WORDS = 2000


@dataclass
class Ended:
    """How a child ended, and what it told."""

    ending: Ending
    status: int | None
    seconds: float
    said: str
    outcome: Outcome | None = None
    calls: list[Call] = field(default_factory=list)


def start(order: dict[str, Any], link: socket.socket | None) -> subprocess.Popen[bytes]:
    """A child with an order; ``link`` becomes its, too."""
    if link is not None:
        order = {**order, "link": link.fileno()}
    child = subprocess.Popen(
        [sys.executable, "-m", "aiodatadist.cli.probe.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[link.fileno()] if link is not None else [],
        start_new_session=True,
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(order).encode() + b"\n")
        child.stdin.flush()
    return child


def wait(child: subprocess.Popen[bytes], limit: float) -> Ended:
    """Until it ended, or was killed at its limit."""
    began = time.monotonic()
    ending: Ending = "finished"
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        kill(child)
        ending = "killed at the limit"
        out, err = _rest(child)
    seconds = time.monotonic() - began
    if ending == "finished" and child.returncode:
        ending = "crashed"
    ended = Ended(ending, child.returncode, seconds, err.decode(errors="replace")[-LAST_WORDS:])
    _read(ended, out)
    return ended


def _rest(child: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What a killed child had told. One that does not die keeps its pipes: what came so far has to do."""
    try:
        return child.communicate(timeout=REAP)
    except subprocess.TimeoutExpired as error:
        return error.stdout or b"", (error.stderr or b"") + b"\n(the process cannot be killed)"


def kill(child: subprocess.Popen[bytes]) -> None:
    """SIGKILL, with all that it started. It is a session of its own, so its number is its group's."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _read(ended: Ended, out: bytes) -> None:
    """Calls that returned, and last those that did not."""
    begun: dict[int, Call] = {}
    for line in out.splitlines():
        try:
            told = json.loads(line)
            if "outcome" in told:
                ended.outcome = Outcome.model_validate(told["outcome"])
                continue
            call = Call.model_validate(told["call"])
        except (ValueError, KeyError, ValidationError):
            continue  # the last line of a child that was killed while it wrote
        if "begin" in told:
            begun[told["begin"]] = call
        else:
            begun.pop(told["end"], None)
            ended.calls.append(call)
    ended.calls += begun.values()


# ---- a step ----


def report_of(step: Step, near: Ended, far: Ended | None) -> StepReport:
    """What became of a step. A child that did not finish has no outcome but its end."""
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


def run_alone(step: Step, order: dict[str, Any]) -> StepReport:
    child = start({**order, "step": step.number}, None)
    with ending(child):
        return report_of(step, wait(child, step.limit), None)


def run_together(step: Step, order: dict[str, Any], far_device: int, far_resource: str) -> StepReport:
    """With a far end on another device of this host."""
    ours, theirs = socket.socketpair()
    far_order = {**order, "step": "far", "device": far_device, "options": {"resource": far_resource}}
    with ours, theirs:
        far = start(far_order, theirs)
        with ending(far):
            theirs.close()
            near = start({**order, "step": step.number}, ours)
            with ending(near):
                ours.close()
                ended, far_ended = _wait_both(near, far, step.limit)
    return report_of(step, ended, far_ended)


def run_near(step: Step, order: dict[str, Any], link: socket.socket) -> StepReport:
    """With a far end behind a connection."""
    near = start({**order, "step": step.number}, link)
    with ending(near):
        link.close()
        return report_of(step, wait(near, step.limit), None)


def _wait_both(near: subprocess.Popen[bytes], far: subprocess.Popen[bytes], limit: float) -> tuple[Ended, Ended]:
    """The far end is read from beside the near end, so that neither waits for a full pipe."""
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(wait, far, limit + GRACE)
        try:
            ended = wait(near, limit)
            with contextlib.suppress(TimeoutError):
                reading.result(GRACE)
        finally:
            kill(far)
        return ended, reading.result()


@contextmanager
def ending(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Also where the probe is interrupted, no child is left."""
    try:
        yield
    finally:
        kill(child)
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(REAP)
