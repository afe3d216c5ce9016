"""Fuzzes each reader for some seconds: ``python -m tests.fuzz --seconds 60 [NAME ...]``.

New inputs that reach new code are kept in ``build/fuzz/NAME``, and inputs that break a reader in ``build/fuzz/found``, as
``NAME-...``. The run fails if there is one. Without a package index, or without a wheel of atheris for this Python, the
readers of Python get small changes of the kept inputs instead.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from hashlib import sha256
from pathlib import Path

from tests import lanes
from tests.fuzz import native
from tests.fuzz.corpora import kept
from tests.fuzz.mutate import mutated
from tests.fuzz.readers import CORPUS, READERS

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "fuzz"
FOUND = BUILD / "found"
LIMITS = ("-timeout=5", "-rss_limit_mb=1024", "-max_len=65536")
"""An input that takes five seconds, or a gigabyte, counts as found."""


def fuzz(name: str, seconds: int, command: list[str]) -> bool:
    """Run one fuzzer. Return False if it has found something."""
    grown = BUILD / name
    grown.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(READERS[name].examples() if name in READERS else ()):
        (grown / f"example-{number}").write_bytes(data)
    options = [f"-max_total_time={seconds}", *LIMITS, f"-artifact_prefix={FOUND / name}-", "-print_final_stats=1"]
    ended = subprocess.run(
        [*command, *options, str(grown), str(CORPUS / name)], cwd=ROOT, check=False, capture_output=True, text=True
    )
    figures = [line for line in ended.stderr.splitlines() if "number_of_executed_units" in line]
    tried = figures[0].rpartition(":")[2].strip() if figures else "?"
    print(f"{name}: {tried} inputs, {'found something' if ended.returncode else 'nothing found'}", flush=True)
    if ended.returncode:
        print(ended.stderr[-4000:], flush=True)
    return not ended.returncode


def change(name: str, seconds: int) -> bool:
    """Read changed inputs for some seconds, where there is no fuzzer. Return False if one breaks the reader."""
    began, tried, inputs = time.monotonic(), 0, [*kept(name), *READERS[name].examples()]
    seed = time.time_ns()
    for data in mutated(inputs, seed, sys.maxsize):
        tried += 1
        try:
            READERS[name].check(data)
        except Exception:
            FOUND.mkdir(parents=True, exist_ok=True)
            (FOUND / f"{name}-{sha256(data).hexdigest()[:16]}").write_bytes(data)
            print(f"{name}: {tried} inputs, found something\n{traceback.format_exc()}", flush=True)
            return False
        if time.monotonic() - began > seconds:
            break
    print(f"{name}: {tried} changed inputs, nothing found", flush=True)
    return True


def python_of_lane() -> Path | None:
    """Return the lane's Python, with atheris; None if it cannot be made."""
    lane = lanes.LANES["fuzz"]
    try:
        lanes.make(lane)
    except SystemExit as error:
        print(f"{error}\nreaders of Python get small changes of the kept inputs instead", flush=True)
        return None
    return lane.python


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("names", nargs="*", help=f"of {', '.join((*READERS, *native.PROGRAMS))}; all if none is given")
    arguments = parser.parse_args()
    names = arguments.names or [*READERS, *native.PROGRAMS]
    if unknown := set(names) - {*READERS, *native.PROGRAMS}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    FOUND.mkdir(parents=True, exist_ok=True)
    python = python_of_lane() if set(names) & READERS.keys() else None
    are_whole = True
    for name in names:
        if name in native.PROGRAMS:
            are_whole &= fuzz(name, arguments.seconds, [str(native.built(name))])
        elif python is None:
            are_whole &= change(name, arguments.seconds)
        else:
            are_whole &= fuzz(name, arguments.seconds, [str(python), "-m", "tests.fuzz.engine", name])
    sys.exit(not are_whole)


if __name__ == "__main__":
    main()
