"""The command line of ``aiodatadist doctor``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiodatadist._cli.kit.errors import wrong_input
from aiodatadist._cli.kit.numbers import integer
from aiodatadist._cli.kit.options import add_json, address, check_target

EVERYWHERE = "0.0.0.0"
"""The host of --serve if it is given only a port: every address of the machine."""

DOCTOR = (
    "Says what was found on this machine. With --device: does 21 experiments with the vendor's libraries on that device "
    "and the next one, or one of another host (--peer), each in a child process that is killed at its limit, and says "
    "what is not as expected. docs/npu.md has more. Without --device, --peer looks at the way to a machine on which "
    "--serve runs: whether it is reached, the key, the MTU, and how fast bytes travel over TCP."
)


def add_doctor(doctor: argparse.ArgumentParser) -> None:
    add_json(doctor, may_lack_file=True)
    doctor.add_argument("--device", type=integer(0, 1023), metavar="N", help="probe this device, as the process counts")
    doctor.add_argument(
        "--pool", metavar="URL", help="open this pool of KV blocks, and report if its values are sealed"
    )
    doctor.add_argument(
        "--peer", metavar="HOST:PORT", help="look at the way to the host where --serve runs; with --device, probe both"
    )
    doctor.add_argument("--serve", metavar="[HOST:]PORT", help="be the peer of that, until Ctrl-C")
    doctor.add_argument(
        "--auth-key-file", type=Path, metavar="FILE", help="a secret of both ends, without --device (AIODATADIST_TRUST)"
    )
    doctor.add_argument(
        "--step", action="append", default=[], metavar="N", help="this experiment only; may be repeated"
    )
    doctor.add_argument("--rounds", type=integer(1, 100_000), default=1000, metavar="N", help="of step 15 (1000)")
    doctor.add_argument("--mib", type=integer(1, 256), default=64, metavar="N", help="MiB of long transfers (64)")
    doctor.add_argument("--limit", type=integer(1, 3600), metavar="S", help="seconds for each step (60 to 600)")
    doctor.add_argument(
        "--local-comm-res", type=Path, metavar="FILE", help="describes the device in HCCL's rank table (it is made)"
    )
    doctor.add_argument("--peer-local-comm-res", type=Path, metavar="FILE", help="the same for the next device")


def doctor_command(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return the command that the arguments describe, ready to be called.

    Raises:
        CommandError: if two of them contradict each other.
    """
    check_target("--json", arguments.json)
    if arguments.peer and arguments.serve:
        raise wrong_input("--peer and --serve are the two ends of a probe: one command is one of them")
    if arguments.device is None:
        for name in ("step", "local_comm_res", "peer_local_comm_res"):
            if getattr(arguments, name):
                raise wrong_input(f"--{name.replace('_', '-')} needs --device: which device is to be probed?")
        return _without_device(arguments)
    for name in ("pool", "auth_key_file"):
        if getattr(arguments, name) is not None:
            raise wrong_input(f"--{name.replace('_', '-')} and --device cannot be combined: run one command for each")
    return partial(_run_probe, arguments)


def _without_device(arguments: argparse.Namespace) -> Callable[[], int]:
    key_file: Path | None = arguments.auth_key_file
    if arguments.serve is not None:
        return partial(_run_serve, *address("--serve", arguments.serve, EVERYWHERE), key_file)
    peer = None if arguments.peer is None else (*address("--peer", arguments.peer), key_file)
    if peer is None and key_file is not None:
        raise wrong_input("--auth-key-file is for --peer and --serve")
    return partial(run_doctor, arguments.json, arguments.pool, peer)


def run_doctor(json: Path | None, pool: str | None, peer: tuple[str, int, Path | None] | None = None) -> int:
    from aiodatadist._cli.doctor.command import run_doctor  # noqa: PLC0415 - opens the native libraries
    from aiodatadist._cli.doctor.peer import Peer  # noqa: PLC0415 - the same

    return run_doctor(json, pool, None if peer is None else Peer(*peer))


def _run_serve(host: str, port: int, key_file: Path | None) -> int:
    from aiodatadist._cli.doctor.command import run_serve  # noqa: PLC0415 - the same

    return run_serve(host, port, key_file)


def _run_probe(arguments: argparse.Namespace) -> int:
    from aiodatadist._cli.probe.command import ProbeArguments, run_probe_command  # noqa: PLC0415 - the same

    return run_probe_command(
        ProbeArguments(
            arguments.device,
            arguments.peer,
            arguments.serve,
            arguments.json,
            arguments.rounds,
            arguments.mib,
            tuple(arguments.step),
            arguments.limit,
            arguments.local_comm_res,
            arguments.peer_local_comm_res,
        )
    )
