"""``python -m tests.mutants [NAME ...]``: fails if a mutant survives its tests, or the tests fail without a mutant.

With ``--chaos`` a minute of ``aiodatadist chaos`` takes the place of the tests, for the mutants that it has to find.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.runner import Laboratory, Mutant

AT_ONCE = 2
"""Runs of pytest at a time. Mutants of C have one folder, and run one after the other."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run these mutants only")
    parser.add_argument("--list", action="store_true", help="show all mutants and their promises")
    parser.add_argument("--chaos", action="store_true", help="run chaos, one mutant after the other, in place of tests")
    arguments = parser.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := set(arguments.names) - known.keys():
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    mutants = [known[name] for name in arguments.names] or list(MUTANTS)
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name:28} {mutant.promise}")
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.chaos:
            sys.exit(run_chaos([mutant for mutant in mutants if mutant.chaos], Laboratory(Path(folder))))
        sys.exit(run(mutants, Path(folder)))


def run(mutants: list[Mutant], folder: Path) -> int:
    """Return the number of complaints."""
    complaints = 0
    laboratory = Laboratory(folder)
    for strict in sorted({mutant.strict for mutant in mutants}):
        tests = tuple(sorted({test for mutant in mutants if mutant.strict == strict for test in mutant.tests}))
        ended = laboratory.run_tests(tests, strict)
        if ended.returncode != pytest.ExitCode.OK:
            print(f"the tests fail without a mutant:\n{ended.stdout}{ended.stderr}")
            return 1
    for mutant, line, is_killed in _all(laboratory, mutants):
        complaints += not is_killed
        print(f"{'killed  ' if is_killed else 'SURVIVED'} {mutant.name:28} {line}", flush=True)
        if not is_killed:
            print(f"         {mutant.promise}")
    print(f"{len(mutants)} mutants, {len(mutants) - complaints} killed")
    return min(complaints, 1)


def run_chaos(mutants: list[Mutant], laboratory: Laboratory) -> int:
    """Return the number of mutants that a minute of chaos did not find, at most 1.

    Whether the real code has a violation is for ``make chaos`` to say.
    """
    survivors = 0
    for mutant in mutants:
        ended = laboratory.run_chaos(mutant)
        *_, last = ended.stdout.splitlines() or [ended.stderr]
        is_killed = ended.returncode == 1 and "violations" in last
        survivors += not is_killed
        print(f"{'killed  ' if is_killed else 'SURVIVED'} {mutant.name:28} {last}", flush=True)
    print(f"{len(mutants)} mutants, {len(mutants) - survivors} killed")
    return min(survivors, 1)


def _all(laboratory: Laboratory, mutants: list[Mutant]) -> list[tuple[Mutant, str, bool]]:
    native = [mutant for mutant in mutants if mutant.file.startswith("native/")]
    others = [mutant for mutant in mutants if mutant not in native]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        in_c = pool.submit(lambda: [_one(laboratory, mutant) for mutant in native])
        found = list(pool.map(lambda mutant: _one(laboratory, mutant), others))
        return [*in_c.result(), *found]


def _one(laboratory: Laboratory, mutant: Mutant) -> tuple[Mutant, str, bool]:
    began = time.monotonic()
    ended = laboratory.run(mutant)
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    what = failed[0].partition(" - ")[0] if failed else f"pytest ended with {ended.returncode}"
    is_killed = ended.returncode == pytest.ExitCode.TESTS_FAILED
    if not is_killed and ended.returncode != pytest.ExitCode.OK:
        what += f"\n{ended.stdout}{ended.stderr}"
    return mutant, f"{time.monotonic() - began:4.1f} s  {what}", is_killed


if __name__ == "__main__":
    main()
