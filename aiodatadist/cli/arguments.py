"""From the command line to the function that does it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from aiodatadist import __version__
from aiodatadist.cli.bench_arguments import BENCH, add_bench
from aiodatadist.cli.chaos_arguments import CHAOS, add_chaos, chaos_command
from aiodatadist.cli.context_demo import ContextOptions, run_context_demo
from aiodatadist.cli.demo import MAX_TOKENS, DemoOptions, run_demo
from aiodatadist.cli.doctor_arguments import DOCTOR, add_doctor, doctor_command
from aiodatadist.cli.errors import wrong_input
from aiodatadist.cli.numbers import integer
from aiodatadist.cli.place import add_place_arguments, places

WORKERS = ("prefill", "decode", "prefill-v1", "decode-v1", "context")


class _Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise wrong_input(f"{message} (see {self.prog} --help)")


def parse(argv: Sequence[str]) -> Callable[[], int]:
    """What ``argv`` asks for, ready to be called.

    Raises:
        CommandError: an argument is wrong.
    """
    parser = _Parser(prog="aiodatadist", description="KV cache transfer for disaggregated LLM serving.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="a prefill and a decode process share a KV cache", description=_DEMO))
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
        "bench": lambda found: partial(_run_bench, found),
        "chaos": chaos_command,
        "doctor": doctor_command,
        "demo": _demo_command,
    }
    return commands_of[arguments.command](arguments)


def _demo_command(arguments: argparse.Namespace) -> Callable[[], int]:
    """Of the demo, or of one of its workers. Raises CommandError: arguments do not go together."""
    if arguments.worker:
        return partial(_run_worker, arguments.worker)
    if arguments.context_cache is not None:
        return _context_demo(arguments)
    return partial(
        run_demo,
        DemoOptions(
            arguments.prompt,
            arguments.tokens,
            arguments.port,
            arguments.seed,
            arguments.json,
            arguments.layered,
            arguments.v1,
            arguments.plot,
            arguments.trace,
            *places(arguments),
        ),
    )


def _show_help(parser: argparse.ArgumentParser) -> int:
    """Without a command: the help, where a script that lost a word does not take it for output; argparse's code for that."""
    parser.print_help(sys.stderr)
    return 2


_DEMO = (
    "Starts a prefill and a decode process. Prefill runs a small Llama-style model over a text, decode pulls the KV "
    "cache block by block and continues the text, and the tokens are compared with those of a single process."
)


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--prompt", type=Path, metavar="FILE", help="the text to read (default: the project's README)")
    demo.add_argument("--tokens", type=integer(1, MAX_TOKENS), default=64, metavar="N", help="tokens to write (64)")
    demo.add_argument("--port", type=integer(0, 65535), default=0, metavar="P", help="prefill's port (any free one)")
    demo.add_argument("--seed", type=integer(0, 2**32 - 1), default=0, metavar="S", help="weights and sampling (0)")
    demo.add_argument("--json", action="store_true", help="only the result, for machines")
    demo.add_argument("--layered", action="store_true", help="send each layer while the next is computed")
    demo.add_argument("--v1", action="store_true", help="with the v1 interface: LLMModel, pull_kv, merge_kv, predict")
    demo.add_argument(
        "--plot", type=Path, metavar="FILE", help="with --layered: draw the timeline (needs the extra plot)"
    )
    demo.add_argument("--trace", type=Path, metavar="FILE", help="with --layered: the timeline for Perfetto, as JSON")
    demo.add_argument(
        "--context-cache",
        nargs="?",
        const="memory:",
        metavar="URL",
        help="read the prompt twice, and load its KV cache the second time (memory:)",
    )
    add_place_arguments(demo)
    demo.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)


def _context_demo(arguments: argparse.Namespace) -> Callable[[], int]:
    for name in ("layered", "v1", "plot", "trace", "port", "device_ip", "local_comm_res"):
        if getattr(arguments, name):
            raise wrong_input(
                f"--{name.replace('_', '-')} does not go with --context-cache: nothing travels between two workers there"
            )
    options = ContextOptions(
        arguments.context_cache,
        arguments.prompt,
        arguments.tokens,
        arguments.seed,
        arguments.json,
        places(arguments)[0].device,
    )
    return partial(run_context_demo, options)


def _run_bench(arguments: argparse.Namespace) -> int:
    from aiodatadist.cli.bench.command import run_bench  # noqa: PLC0415 - opens the native libraries
    from aiodatadist.cli.bench_arguments import bench_options  # noqa: PLC0415

    return run_bench(bench_options(arguments))


def _run_worker(name: str) -> int:
    # Here and not at the top: the workers need numpy, and the other commands do not.
    if name == "context":
        from aiodatadist.cli.context_worker import run_context_worker  # noqa: PLC0415

        return run_context_worker()
    from aiodatadist.cli.decode import decode  # noqa: PLC0415
    from aiodatadist.cli.decode_v1 import decode_v1  # noqa: PLC0415
    from aiodatadist.cli.prefill import prefill  # noqa: PLC0415
    from aiodatadist.cli.prefill_v1 import prefill_v1  # noqa: PLC0415
    from aiodatadist.cli.worker import run_worker  # noqa: PLC0415

    work = {"prefill": prefill, "decode": decode, "prefill-v1": prefill_v1, "decode-v1": decode_v1}
    return run_worker(work[name])
