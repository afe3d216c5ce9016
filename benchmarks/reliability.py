"""Measure how well each promise of docs/reliability.md holds on this machine.

One line for each row of that page: what was measured, and the bar. `--write` puts the figures into the page, in English and
in Chinese. It takes some four minutes; `--short` is a tenth of it, for tests. Rows that other benchmarks measure are theirs:
R1 is of benchmarks.killed, R9 of benchmarks.scale, R27 of benchmarks.priorities, and R29 is `aiodatadist chaos`.

    python -m benchmarks.reliability --write
    python -m benchmarks.reliability --rows R7,R13

Each row has an event loop of its own, and faults of one do not reach the next. Time is from the event until the awaiting call
returns. Nothing here looks at the median alone where a promise is about the worst.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import anyio

from benchmarks import reliability_links, reliability_memory, reliability_transfers
from benchmarks.common import arguments, report
from benchmarks.reliability_rows import Figure, write_page

MEASURES = {**reliability_links.MEASURES, **reliability_transfers.MEASURES, **reliability_memory.MEASURES}
ORDER = sorted(MEASURES, key=lambda row: int(row[1:]))


def measure(rows: Sequence[str], short: bool) -> list[Figure]:
    """Measure the rows, one after the other."""
    found = []
    for row in rows:
        print(f"{row} ...", end="\r", file=sys.stderr, flush=True)
        found.append(anyio.run(MEASURES[row], short))
        if not found[-1].holds:
            print(f"{row} does not hold: {found[-1].english}; {found[-1].bar}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Run the benchmark. Return the exit code: 0 if all promises hold."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", default=",".join(ORDER), metavar="R[,R]", help="these and no others (all)")
    parser.add_argument("--short", action="store_true", help="a tenth of it: for tests, not for the page")
    parser.add_argument(
        "--write", action="store_true", help="put the figures into docs/reliability.md and its Chinese twin"
    )
    given = parser.parse_args()
    rows = given.rows.split(",")
    if unknown := [row for row in rows if row not in MEASURES]:
        parser.error(f"--rows: {unknown[0]!r} is none of {', '.join(ORDER)}")
    if given.short and given.write:
        parser.error("--write: figures of --short are not for the page")
    found = measure(rows, given.short)
    report("reliability", [each.line() for each in found], given.json)
    if given.write:
        write_page(found)
    return 0 if all(each.holds for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
