"""Parse the command line into the function that carries it out."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NoReturn

from aiodatadist import __version__
from aiodatadist._cli.bench.arguments import BENCH, add_bench, bench_command
from aiodatadist._cli.chaos.arguments import CHAOS, add_chaos, chaos_command
from aiodatadist._cli.demo.arguments import DEMO, add_demo, demo_command
from aiodatadist._cli.doctor.arguments import DOCTOR, add_doctor, doctor_command
from aiodatadist._cli.kit.errors import CommandError, meant, wrong_input


class _Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise wrong_input(f"{message} (see {self.prog} --help)")


def _unknown_option(option: str, parser: argparse.ArgumentParser) -> CommandError:
    known = re.findall(r"--[a-z0-9-]+", parser.format_usage())
    near = meant(option.partition("=")[0], known)
    return wrong_input(f"unrecognized argument: {option}{near} (see {parser.prog} --help)")


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
    _check_command(argv, commands.choices)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        raise _unknown_option(unknown[0], commands.choices.get(arguments.command, parser))
    if arguments.command is None:
        return partial(_show_help, parser)
    commands_of: dict[str, Callable[[argparse.Namespace], Callable[[], int]]] = {
        "bench": bench_command,
        "chaos": chaos_command,
        "doctor": doctor_command,
        "demo": demo_command,
    }
    return commands_of[arguments.command](arguments)


def _check_command(argv: Sequence[str], known: Iterable[str]) -> None:
    """Raise CommandError if the first word is no command: argparse would list them all, without the one that was meant."""
    for word in argv[:1]:
        if not word.startswith("-") and word not in known:
            near = meant(word, known) or f": must be {', '.join(known)}"
            raise wrong_input(f"{word!r} is not a command{near} (see aiodatadist --help)")


def _show_help(parser: argparse.ArgumentParser) -> int:
    """Print the help to stderr, so that no script takes it for output, and return argparse's exit code."""
    parser.print_help(sys.stderr)
    return 2
