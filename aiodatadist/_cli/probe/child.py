"""``python -m aiodatadist._cli.probe.child``: one step, or the far end of one.

A line on stdin names the step. Calls and findings go to stdout as lines of JSON. The vendor's libraries may print:
their stdout is stderr.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from aiodatadist._cli.kit.pipes import die_with_parent
from aiodatadist._cli.probe.bench import Bench, open_bench
from aiodatadist._cli.probe.calls import Tell, UnexpectedCode
from aiodatadist._cli.probe.far_end import serve_near
from aiodatadist._cli.probe.pair import FarEndFailed, open_pair
from aiodatadist._cli.probe.report import Outcome
from aiodatadist._cli.probe.step import Skip, Step
from aiodatadist._cli.probe.steps import STEPS
from aiodatadist.errors import FeatureNotEnabled, LLMException


def main() -> None:
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    out = os.dup(1)
    os.dup2(2, 1)
    die_with_parent()
    tell = Tell(out)
    link = socket.socket(fileno=order["link"]) if "link" in order else None
    options = order["options"]
    bench = open_bench(order["runtime"], order["device"], options, tell)
    if order["step"] == "far":
        assert link is not None
        serve_near(bench, link)
    else:
        step = next(step for step in STEPS if step.number == order["step"])
        found = run(step, bench, link)
        tell(outcome=found.model_dump())
    # A step may have left work behind a shut gate, or threads in the vendor's calls: the end of the process is the end of
    # both, without the libraries' own clean-up, which could wait for them.
    sys.stderr.flush()
    os._exit(0)


def run(step: Step, bench: Bench, link: socket.socket | None) -> Outcome:
    """Return the findings of the step. A call that fails although it must work is a finding, too."""
    try:
        if step.alone is not None:
            return step.alone(bench)
        assert step.together is not None
        assert link is not None
        return step.together(open_pair(bench, link))
    except (Skip, FeatureNotEnabled) as reason:
        return Outcome(verdict="skipped", because=str(reason))
    except (UnexpectedCode, FarEndFailed, LLMException, OSError) as error:
        return Outcome(verdict="differs", found=str(error))


if __name__ == "__main__":
    main()
