"""The command line of ``aiodatadist demo``."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiodatadist._cli.demo.command import DemoOptions, run_demo
from aiodatadist._cli.demo.context_demo import ContextOptions, run_context_demo
from aiodatadist._cli.demo.messages import MAX_TOKENS
from aiodatadist._cli.kit.errors import wrong_input
from aiodatadist._cli.kit.numbers import integer
from aiodatadist._cli.kit.options import add_seed, address, check_target
from aiodatadist._cli.kit.place import add_place_arguments, places

WORKERS = ("prefill", "decode", "prefill-v1", "decode-v1", "prefill-far", "decode-far", "context")
TOKENS, SEED, PORT = 64, 0, 0

DEMO = (
    "Starts a prefill and a decode process. Prefill runs a small Llama-style model over a text, decode pulls the KV "
    "cache block by block and continues the text, and the tokens are compared with those of a single process. On two "
    "machines: --listen ADDRESS:PORT on one, --peer ADDRESS:PORT on the other."
)


def add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--prompt", type=Path, metavar="FILE", help="the text to read (default: the project's README)")
    demo.add_argument("--tokens", type=integer(1, MAX_TOKENS), metavar="N", help="tokens to write (64)")
    demo.add_argument("--port", type=integer(0, 65535), metavar="P", help="prefill's port (any free one)")
    demo.add_argument("--listen", metavar="HOST:PORT", help="run prefill only, and wait there for decode")
    demo.add_argument(
        "--peer", metavar="HOST:PORT", help="run decode only: prefill listens there, and says all the rest"
    )
    demo.add_argument(
        "--auth-key-file", type=Path, metavar="FILE", help="a secret of both machines (AIODATADIST_AUTH_KEY_FILE)"
    )
    demo.add_argument("--transport", choices=("auto", "hccl", "tcp"), default="auto", help="how bytes travel (auto)")
    add_seed(demo, "of weights and sampling (0)")
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
    is_far = arguments.listen is not None or arguments.peer is not None
    if is_far:
        _check_far(arguments)
    elif arguments.auth_key_file is not None:
        raise wrong_input("--auth-key-file is for two machines: with --listen or --peer")
    at = places(arguments, 1 if is_far else 2)
    options = DemoOptions(
        prompt=arguments.prompt,
        tokens=TOKENS if arguments.tokens is None else arguments.tokens,
        port=PORT if arguments.port is None else arguments.port,
        seed=SEED if arguments.seed is None else arguments.seed,
        json=arguments.json,
        layered=arguments.layered,
        v1=arguments.v1,
        plot=arguments.plot,
        trace=arguments.trace,
        prefill_at=at[0],
        decode_at=at[-1],
        transport=arguments.transport,
        listen=arguments.listen,
        peer=None if arguments.peer is None else address("--peer", arguments.peer),
        key_file=arguments.auth_key_file or _key_file() if is_far else None,
    )
    return partial(run_demo, options)


def _key_file() -> Path | None:
    from aiodatadist._blocking.config import KEY_FILE  # noqa: PLC0415 - opens the native libraries

    name = os.environ.get(KEY_FILE)
    return Path(name) if name else None


def _check_key(option: str, host: str, _: int, key_file: Path | None) -> None:
    """Raise CommandError if the host is an address of a network, and no key is given."""
    try:
        is_near = ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: the library looks it up
        return
    if not is_near and key_file is None and not os.environ.get("AIODATADIST_TRUST"):
        raise wrong_input(
            f"{option}: {host} is on a network, where both ends must prove a key: name a folder of keys in "
            "AIODATADIST_TRUST, the same keys at both ends, or give --auth-key-file"
        )


def _check_far(arguments: argparse.Namespace) -> None:
    """Check the arguments of one half of a demo on two machines. Raises CommandError if some do not go together."""
    if arguments.listen is not None and arguments.peer is not None:
        raise wrong_input("--listen and --peer are the two ends of a demo: one command is one of them")
    for name in ("listen", "peer"):
        if (text := getattr(arguments, name)) is not None:
            _check_key(f"--{name}", *address(f"--{name}", text), arguments.auth_key_file or _key_file())
    if arguments.v1:
        raise wrong_input("--v1 is a demo on one machine: leave --listen and --peer out")
    if arguments.port is not None:
        raise wrong_input("--port is for a demo on one machine: --listen and --peer have the port in them")
    told = ("prompt", "tokens", "seed", "layered", "plot", "trace") if arguments.peer is not None else ()
    for name in told:
        given = getattr(arguments, name)
        if given is not None and given is not False:
            raise wrong_input(f"--{name} has no effect with --peer: the other end says what is done")


def _context_demo(arguments: argparse.Namespace) -> Callable[[], int]:
    for name in ("layered", "v1", "plot", "trace", "port", "listen", "peer", "device_ip", "local_comm_res"):
        if getattr(arguments, name):
            raise wrong_input(
                f"--{name.replace('_', '-')} does not go with --context-cache: nothing travels between two workers there"
            )
    options = ContextOptions(
        arguments.context_cache,
        arguments.prompt,
        TOKENS if arguments.tokens is None else arguments.tokens,
        SEED if arguments.seed is None else arguments.seed,
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
    from aiodatadist._cli.demo.far import decode_far, prefill_far  # noqa: PLC0415
    from aiodatadist._cli.demo.prefill import prefill  # noqa: PLC0415
    from aiodatadist._cli.demo.prefill_v1 import prefill_v1  # noqa: PLC0415
    from aiodatadist._cli.demo.worker import run_worker  # noqa: PLC0415

    work = {
        "prefill": prefill,
        "decode": decode,
        "prefill-v1": prefill_v1,
        "decode-v1": decode_v1,
        "prefill-far": prefill_far,
        "decode-far": decode_far,
    }
    return run_worker(work[name])
