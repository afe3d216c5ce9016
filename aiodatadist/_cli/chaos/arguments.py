"""The command line of ``aiodatadist chaos``."""

from __future__ import annotations

import argparse
import importlib.util
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from aiodatadist._cli.chaos.profiles import PROFILES, Load, Profile
from aiodatadist._cli.kit.errors import meant, wrong_input
from aiodatadist._cli.kit.numbers import integer, seconds
from aiodatadist._cli.kit.options import add_json, add_loop, add_seed, check_target

CHAOS = (
    "Two processes move stamped blocks in every way there is, while they are killed, stopped and kept busy, the network "
    "between them delays, cuts and corrupts, and softnpu's device fails and hangs. Every byte is compared, and at rest "
    "nothing may be left. What a seed decides comes again with it; what time decides does not. docs/chaos.md has more."
)


def add_chaos(chaos: argparse.ArgumentParser) -> None:
    chaos.add_argument("--seconds", type=seconds(1.0), default=30.0, metavar="S", help="of all profiles together (30)")
    add_seed(chaos, "of operations and faults (a new one)")
    chaos.add_argument(
        "--profile", default="one-sided", metavar="NAME[,NAME]",
        help=f"all, or of: {', '.join(PROFILES)} (one-sided)",
    )  # fmt: skip
    chaos.add_argument(
        "--faults", metavar="NAME[,NAME]", help="these of the program and no others, for instance kill,hang (all)"
    )
    chaos.add_argument(
        "--load", choices=get_args(Load), default="full",
        help="full: no pauses; idle: long ones; busy: beside threads and loops that compute (full)",
    )  # fmt: skip
    add_loop(chaos, None, "event loop of all profiles (each its own)")
    chaos.add_argument("--clusters", type=integer(1, 64), default=2, metavar="N", help="of the owner's process (2)")
    chaos.add_argument(
        "--gib", type=integer(0, 64), default=0, metavar="N",
        help="of a further cache of 80 layers in each cluster, as in production (0: none)",
    )  # fmt: skip
    add_json(chaos)
    chaos.add_argument("--side", help=argparse.SUPPRESS)


def chaos_command(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return the run that the arguments describe, ready to be called.

    Raises:
        CommandError: if there is no such profile, or it cannot run here.
    """
    if arguments.side is not None:
        return partial(_run_side, arguments.side)
    check_target("--json", arguments.json)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    chosen = {name: getattr(arguments, name) for name in ("load", "clusters", "gib")}
    if arguments.loop is not None:
        chosen["loop"] = arguments.loop
    return partial(_run_chaos, arguments, seed, _profiles(arguments.profile, chosen))


def _profiles(text: str, chosen: dict[str, Any]) -> list[Profile]:
    """Return the profiles with these names, with the chosen options applied."""
    if text == "all":
        every = [replace(profile, **chosen) for profile in PROFILES.values()]
        return [profile for profile in every if not _missing(profile)]
    found = []
    for name in dict.fromkeys(text.split(",")):
        if name not in PROFILES:
            raise wrong_input(f"--profile: {name!r} is not one of all, {', '.join(PROFILES)}{meant(name, PROFILES)}")
        profile = replace(PROFILES[name], **chosen)
        if missing := _missing(profile):
            raise wrong_input(f"--profile {name}: {missing}")
        found.append(profile)
    return found


def _missing(profile: Profile) -> str:
    """Return what a profile needs that is missing here, or an empty string."""
    from aiodatadist._testing.servers import missing_mooncake, missing_redis  # noqa: PLC0415 - opens the native libraries

    if profile.loop == "uvloop" and importlib.util.find_spec("uvloop") is None:
        return "uvloop is not installed: pip install uvloop"
    look = {"redis": missing_redis, "mooncake": missing_mooncake}.get(profile.engine)
    return "" if look is None else look()


def _run_chaos(arguments: argparse.Namespace, seed: int, profiles: list[Profile]) -> int:
    from aiodatadist._cli.chaos.command import ChaosOptions, run_chaos  # noqa: PLC0415 - opens the native libraries
    from aiodatadist._cli.chaos.program import FAULTS  # noqa: PLC0415

    faults = FAULTS if arguments.faults is None else arguments.faults.split(",")
    for name in faults:
        if name not in FAULTS:
            raise wrong_input(f"--faults: {name!r} is not one of {', '.join(FAULTS)}{meant(name, FAULTS)}")
    return run_chaos(ChaosOptions(arguments.seconds, seed, profiles, faults, arguments.json, arguments.loop))


def _run_side(text: str) -> int:
    from aiodatadist._cli.chaos.command import run_side  # noqa: PLC0415 - opens the native libraries

    return run_side(text)
