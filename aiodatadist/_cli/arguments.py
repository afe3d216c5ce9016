"""Parse the command line into the function that carries it out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from aiodatadist import __version__
from aiodatadist._cli.bench.arguments import BENCH, add_bench, bench_command
from aiodatadist._cli.chaos.arguments import CHAOS, add_chaos, chaos_command
from aiodatadist._cli.demo.arguments import DEMO, add_demo, demo_command
from aiodatadist._cli.doctor.arguments import DOCTOR, add_doctor, doctor_command
from aiodatadist._cli.kit.errors import wrong_input


class _Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise wrong_input(f"{message} (see {self.prog} --help)")


def parse(argv: Sequence[str]) -> Callable[[], int]:
    """Return the command that ``argv`` asks for, ready to be called.

    Raises:
        CommandError: if an argument is wrong.
    """
    parser = _Parser(prog="aiodatadist", description="KV cache transfer for disaggregated LLM serving.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_demo(commands.add_parser("demo", help="a prefill and a decode process share a KV cache", description=DEMO))
    doctor = commands.add_parser(
        "doctor", help="what was found on this machine, and what that means", description=DOCTOR
    )
    add_doctor(doctor)
    add_bench(commands.add_parser("bench", help="how fast a KV cache travels here", description=BENCH))
    add_chaos(commands.add_parser("chaos", help="what a KV cache survives here, with a seed", description=CHAOS))
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        return partial(_show_help, parser)
    commands_of: dict[str, Callable[[argparse.Namespace], Callable[[], int]]] = {
        "bench": bench_command,
        "chaos": chaos_command,
        "doctor": doctor_command,
        "demo": demo_command,
    }
    return commands_of[arguments.command](arguments)


def _show_help(parser: argparse.ArgumentParser) -> int:
    """Print the help to stderr, so that no script takes it for output, and return argparse's exit code."""
    parser.print_help(sys.stderr)
    return 2
