"""``python -m aiodatadist.blocking run script.py args...`` runs a script that was written for LLM-DataDist, unchanged."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from aiodatadist._as_program import imported
from aiodatadist._blocking import stand_ins


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script as ``python script.py args...`` would, with :mod:`aiodatadist.blocking` as ``llm_datadist``.

    Exceptions of the script, SystemExit included, are not caught. In a program, Ctrl-C ends it without a traceback.
    """
    parser = argparse.ArgumentParser(prog="python -m aiodatadist.blocking", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script")
    run.add_argument("script", type=Path)
    run.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    wanted = parser.parse_args(argv)
    if not wanted.script.is_file():
        parser.error(f"there is no file {wanted.script}")
    stand_ins.install()
    stand_ins.install_for_children()
    sys.argv = [str(wanted.script), *wanted.args]
    sys.path[0] = str(wanted.script.resolve().parent)
    runpy.run_path(str(wanted.script), run_name="__main__")


if __name__ == "__main__":
    imported()
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
