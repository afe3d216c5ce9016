"""The command line of ``aiodatadist bench``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiodatadist._cli.kit.errors import meant, wrong_input
from aiodatadist._cli.kit.numbers import integer, seconds
from aiodatadist._cli.kit.options import add_json, add_loop, add_seed, address
from aiodatadist._cli.kit.place import add_place_arguments, first_place, places
from aiodatadist._config.secret_files import read_key
from aiodatadist.errors import ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._cli.bench.options import BenchOptions

OPS = ("pull", "push", "layered", "copy")
MEMORIES = ("pool", "user", "host")
TRANSPORTS = ("auto", "hccl", "tcp", "loopback")
AGAINST = ("memcpy", "process_vm", "nixl", "mooncake")
SIZES = "16KiB,64KiB,256KiB,1MiB,2MiB"

MEASURING: dict[str, Any] = {
    "op": ["pull"],
    "memory": ["pool"],
    "block": SIZES,
    "blocks": None,
    "layers": 4,
    "batch": None,
    "concurrency": 1,
    "seed": 0,
    "seconds": 2.0,
    "warmup": 0.2,
    "windows": 10,
    "check": True,
    "against": [],
    "checksum": False,
    "json": None,
    "compare": None,
    "plot": None,
}
"""The options of the measuring end, with their defaults. argparse does not get these: the owner must see what was given."""

BENCH = (
    "Two processes are linked, blocks travel between them, and every byte is checked. The table has a row for each "
    "operation, kind of memory and size of block; beside it stands what a plain memcpy of the same ranges takes on one "
    "thread, measured in turns. On two machines: --role prefill --listen ADDRESS:PORT on one, --role decode --peer "
    "ADDRESS:PORT on the other."
)


def add_bench(bench: argparse.ArgumentParser) -> None:
    ends = bench.add_argument_group("the two ends")
    ends.add_argument("--role", choices=("both", "prefill", "decode"), default="both", help="which end is here (both)")
    ends.add_argument("--listen", metavar="HOST:PORT", help="where prefill listens (127.0.0.1:0)")
    ends.add_argument("--peer", metavar="HOST:PORT", help="decode: where prefill listens")
    ends.add_argument(
        "--auth-key-file", type=Path, metavar="FILE", help="a secret of both ends; needed beyond loopback"
    )
    ends.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="auto",
        help="auto: HCCL where it reaches the other end, or else TCP; loopback: inside one process (auto)",
    )
    add_loop(ends, "asyncio", "event loop (asyncio)")
    add_place_arguments(ends)
    load = bench.add_argument_group("what travels")
    load.add_argument("--op", type=_several(OPS), metavar="OP[,OP]", help=f"{', '.join(OPS)} (pull)")
    load.add_argument(
        "--memory", type=_several(MEMORIES), metavar="KIND[,KIND]",
        help="pool: the library's; user: the caller's own; host: pinned HOST memory (pool)",
    )  # fmt: skip
    load.add_argument("--block", metavar="SIZE[,SIZE]", help=f"of one tensor; A:B doubles ({SIZES})")
    load.add_argument("--blocks", type=integer(1, 2**31), metavar="N", help="of each cache (what the batches need)")
    load.add_argument("--layers", type=integer(1, 4096), metavar="N", help="of two tensors each (4)")
    load.add_argument("--batch", type=integer(1, 2**31), metavar="N", help="blocks per transfer (so that 128 MiB move)")
    load.add_argument("--concurrency", type=integer(1, 65536), metavar="N", help="transfers at a time (1)")
    add_seed(load, "which blocks (0)")
    how = bench.add_argument_group("how it is measured")
    how.add_argument("--seconds", type=seconds(0.001), metavar="S", help="of transfers for each row (2)")
    how.add_argument("--warmup", type=seconds(0.0), metavar="S", help="before that (0.2)")
    how.add_argument("--windows", type=integer(1, 1000), metavar="N", help="that the seconds are cut in (10)")
    how.add_argument("--check", action=argparse.BooleanOptionalAction, help="look at every byte at the end (yes)")
    how.add_argument(
        "--against", type=_several(AGAINST), metavar="NAME[,NAME]",
        help=f"in turns, on this machine: {', '.join(AGAINST)}; libraries are installed in ~/.cache/aiodatadist/bench",
    )  # fmt: skip
    how.add_argument(
        "--checksum", action="store_true", default=None, help="in turns, the same transfers with checksums: pull, push"
    )
    out = bench.add_argument_group("what comes of it")
    add_json(out)
    out.add_argument(
        "--compare", type=Path, metavar="FILE", help="an older --json: faster, slower, or within the spread"
    )
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs the extra plot)")
    bench.add_argument("--until-stdin-closes", action="store_true", help=argparse.SUPPRESS)


def bench_command(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return the run that the arguments describe, ready to be called."""
    return partial(_run_bench, arguments)


def _run_bench(arguments: argparse.Namespace) -> int:
    from aiodatadist._cli.bench.command import run_bench  # noqa: PLC0415 - opens the native libraries

    return run_bench(bench_options(arguments))


def bench_options(arguments: argparse.Namespace) -> BenchOptions:
    """Return the options that the arguments describe.

    Raises:
        CommandError: if two of them contradict each other, one makes no sense, or a file cannot be read.
    """
    # Here and not at the top: these open the native libraries.
    from aiodatadist._cli.bench.initiator import Lengths  # noqa: PLC0415
    from aiodatadist._cli.bench.options import BenchOptions, BenchRole  # noqa: PLC0415
    from aiodatadist._cli.bench.sizes import parse_sizes  # noqa: PLC0415
    from aiodatadist._cli.bench.workload import MemoryKind, Op  # noqa: PLC0415

    role = BenchRole(arguments.role)
    _check_ends(arguments)
    _fill_in(arguments)
    try:
        sizes = parse_sizes(arguments.block)
    except ValueError as error:
        raise wrong_input(f"--block: {error}") from None
    return BenchOptions(
        role=role,
        listen=arguments.listen,
        peer=None if arguments.peer is None else address("--peer", arguments.peer),
        auth_key=_secret(arguments.auth_key_file),
        ops=tuple(map(Op, arguments.op)),
        memories=tuple(map(MemoryKind, arguments.memory)),
        blocks_of=tuple(sizes),
        blocks=arguments.blocks,
        layers=arguments.layers,
        batch=arguments.batch,
        concurrency=arguments.concurrency,
        seed=arguments.seed,
        transport=arguments.transport,
        loop=arguments.loop,
        lengths=Lengths(arguments.seconds, arguments.windows, arguments.warmup, arguments.check),
        places=places(arguments, 2 if role is BenchRole.BOTH else 1),
        owner_arguments=_owner_arguments(arguments),
        against=tuple(arguments.against),
        checksum=arguments.checksum,
        json=arguments.json,
        compare=arguments.compare,
        plot=arguments.plot,
        until_stdin_closes=arguments.until_stdin_closes,
    )


def _check_ends(arguments: argparse.Namespace) -> None:
    if arguments.role == "decode" and arguments.peer is None:
        raise wrong_input("--role decode needs --peer: where prefill listens")
    if arguments.role != "decode" and arguments.peer is not None:
        raise wrong_input(f"--peer is for --role decode: --role {arguments.role} listens")
    if arguments.role == "decode" and arguments.listen is not None:
        raise wrong_input("--listen is for --role prefill: decode connects to --peer")
    if arguments.role == "prefill":
        _check_owner(arguments)
    if arguments.role != "both" and arguments.transport == "loopback":
        raise wrong_input("--transport loopback stays inside one process: it needs --role both")
    if arguments.listen is not None:
        address("--listen", arguments.listen)


def _check_owner(arguments: argparse.Namespace) -> None:
    given = [f"--{name}" for name in MEASURING if getattr(arguments, name) is not None]
    if given:
        has = "has" if len(given) == 1 else "have"
        raise wrong_input(
            f"{', '.join(given)} {has} no effect with --role prefill: the other end chooses what is measured"
        )


def _fill_in(arguments: argparse.Namespace) -> None:
    for name, default in MEASURING.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)


def _owner_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments for the owner that ``--role both`` starts: the common ones, and the owner's half of the others."""
    given = ["--role", "prefill", "--listen", arguments.listen or "127.0.0.1:0", "--loop", arguments.loop]
    given += ["--transport", arguments.transport]
    if arguments.auth_key_file is not None:
        given += ["--auth-key-file", str(arguments.auth_key_file)]
    return given + first_place(arguments)


def _several(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return an argparse converter for comma-separated words, each one of ``known``."""

    def convert(text: str) -> list[str]:
        words = list(dict.fromkeys(text.split(",")))
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}{meant(word, known)}")
        return words

    return convert


def _secret(file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        return read_key(file, "--auth-key-file")
    except ParamInvalid as error:
        raise wrong_input(str(error.args[0])) from error
