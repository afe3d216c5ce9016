"""The command line of ``aiodatadist demo``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiodatadist._cli.demo.command import MAX_TOKENS, DemoOptions, run_demo
from aiodatadist._cli.demo.context_demo import ContextOptions, run_context_demo
from aiodatadist._cli.kit.errors import wrong_input
from aiodatadist._cli.kit.numbers import integer
from aiodatadist._cli.kit.options import add_seed, check_target
from aiodatadist._cli.kit.place import add_place_arguments, places

WORKERS = ("prefill", "decode", "prefill-v1", "decode-v1", "context")

DEMO = (
    "Starts a prefill and a decode process. Prefill runs a small Llama-style model over a text, decode pulls the KV "
    "cache block by block and continues the text, and the tokens are compared with those of a single process."
)


def add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--prompt", type=Path, metavar="FILE", help="the text to read (default: the project's README)")
    demo.add_argument("--tokens", type=integer(1, MAX_TOKENS), default=64, metavar="N", help="tokens to write (64)")
    demo.add_argument("--port", type=integer(0, 65535), default=0, metavar="P", help="prefill's port (any free one)")
    add_seed(demo, "of weights and sampling (0)", 0)
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


def demo_command(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return the demo, or one of its workers, ready to be called.

    Raises:
        CommandError: if arguments do not go together.
    """
    if arguments.worker:
        return partial(_run_worker, arguments.worker)
    for name in ("plot", "trace"):
        check_target(f"--{name}", getattr(arguments, name))
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


def _run_worker(name: str) -> int:
    # Here and not at the top: the workers need numpy, and the other commands do not.
    if name == "context":
        from aiodatadist._cli.demo.context_worker import run_context_worker  # noqa: PLC0415

        return run_context_worker()
    from aiodatadist._cli.demo.decode import decode  # noqa: PLC0415
    from aiodatadist._cli.demo.decode_v1 import decode_v1  # noqa: PLC0415
    from aiodatadist._cli.demo.prefill import prefill  # noqa: PLC0415
    from aiodatadist._cli.demo.prefill_v1 import prefill_v1  # noqa: PLC0415
    from aiodatadist._cli.demo.worker import run_worker  # noqa: PLC0415

    work = {"prefill": prefill, "decode": decode, "prefill-v1": prefill_v1, "decode-v1": decode_v1}
    return run_worker(work[name])
