"""Runs the demo with fake workers in a process of its own: ``drive_demo.py SCENARIO [arguments of the demo]``."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from aiodatadist import _cli as cli
from aiodatadist._cli.demo import arguments
from aiodatadist._cli.demo import command as demo
from aiodatadist._cli.kit import children

SCENARIO = sys.argv[1]


def fake_command(name: str) -> Sequence[str]:
    return [sys.executable, str(Path(__file__).with_name("fake_worker.py")), SCENARIO, name]


def run_with_fakes(options: demo.DemoOptions) -> int:
    return demo.run_demo(options, fake_command)


if __name__ == "__main__":
    setattr(arguments, "run_demo", run_with_fakes)  # noqa: B010 - with the next, all that this script changes
    setattr(children, "REAP_SECONDS", math.inf)  # noqa: B010 - a killed worker that is waited for in vain hangs the test
    sys.exit(cli.main(["demo", *sys.argv[2:]]))
