"""``python -m tests.abi [--fetch]``: run the gate and print what it found.

Exit status: 0 our headers hold, 1 they do not, 2 the gate could not be run.
"""

import argparse
import sys

from . import SOURCES, CannotCheck, check, compiler, vendor_headers
from .declarations import parse_version


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.abi", description="Check native/*.h against vendor headers.")
    parser.add_argument("--fetch", action="store_true", help=f"download {vendor_headers.REQUIREMENT} if need be")
    parser.add_argument("--vendor-version", type=parse_version, metavar="X.Y", help="of the headers, if they are old")
    options = parser.parse_args()
    try:
        compiler.require()
        headers = vendor_headers.fetch() if options.fetch else vendor_headers.locate()
        report = check.check(SOURCES, headers, options.vendor_version)
    except CannotCheck as reason:
        print(f"abi: {reason}", file=sys.stderr)
        return 2
    print(f"native/*.h against {headers.include[0]}", report, sep="\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
