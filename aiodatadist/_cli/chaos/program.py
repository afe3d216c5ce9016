"""The program of faults of a run: which occur, when, and for how long. Everything follows from the seed. No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from aiodatadist._cli.chaos.profiles import Profile
from aiodatadist._testing.toxics import (
    Bandwidth,
    Corrupt,
    Drop,
    Latency,
    LimitData,
    Reorder,
    Repeat,
    ResetPeer,
    Slicer,
    SlowClose,
    Timeout,
    Toxic,
)


@dataclass(frozen=True)
class Step:
    """A fault and its time.

    Attributes:
        pause: seconds before it.
        name: its name in the table.
        side: the process; empty for what is between the processes.
        seconds: its duration.
        toxic: fault of the network.
        spec: fault of softnpu, or of the process itself.
        number: the owner's cluster that is affected, counted modulo their number.
    """

    pause: float
    name: str
    side: str = ""
    seconds: float = 0.0
    toxic: Toxic | None = None
    spec: str = ""
    number: int = 0


FAULTS = (
    "kill", "stop", "stop-copy", "spin", "hog", "clock", "full",
    "latency", "bandwidth", "slicer", "hold", "slowclose", "resetpeer", "limitdata", "corrupt", "drop", "repeat",
    "reorder", "down",
    "delay", "fail", "exec", "hang", "flip", "engine-kill", "engine-stop",
)  # fmt: skip
"""The names of all faults."""


def program(seed: int, profile: Profile, lane: str) -> Iterator[Step]:
    """Yield the faults of a lane, without end. Each lane has its own; lanes run side by side."""
    chance = random.Random(f"{seed}/{profile.name}/{lane}")
    draw = {"processes": _process, "network": _network, "devices": _device, "copies": _copy, "engine": _engine}[lane]
    while True:
        yield draw(chance, profile)


def _process(chance: random.Random, profile: Profile) -> Step:
    pause, side = chance.uniform(0.2, 1.2), chance.choice(profile.sides)
    names = ("kill", "stop", "stop", "spin", "hog", "clock", "full")
    name = chance.choice(names[: -1 if profile.door == "context" else None])
    if name == "kill":
        return Step(pause, name, side)
    if name == "stop":  # half of them so short that the peer is not lost
        return Step(pause, name, side, chance.choice((chance.uniform(0.02, 0.6), chance.uniform(1.2, 2.5))))
    if name == "spin":
        return Step(pause, name, side, chance.uniform(0.05, 0.5))
    return Step(pause, name, side, chance.uniform(0.2, 1.5), spec=chance.choice("+-") if name == "clock" else "")


def _copy(chance: random.Random, _: Profile) -> Step:
    """Return a copy of a stop so long that the puller is lost, and its memory is reused."""
    return Step(chance.uniform(0.1, 0.5), "stop-copy", "puller", chance.uniform(1.6, 2.2))


def _network(chance: random.Random, _: Profile) -> Step:
    toxics: tuple[Toxic, ...] = (
        Latency(chance.uniform(0.01, 0.2), chance.uniform(0, 0.2)),
        Bandwidth(chance.choice((4_000, 64_000))),
        Slicer(4, 3, chance.choice((0.0, 0.001))),
        Timeout(),
        Timeout(chance.uniform(0.1, 1.0)),
        SlowClose(chance.uniform(0.1, 0.5)),
        ResetPeer(chance.uniform(0.0, 0.2)),
        LimitData(chance.randrange(2000)),
        Corrupt(chance.uniform(0.02, 0.3)),
        Drop(chance.uniform(0.02, 0.3)),
        Repeat(chance.uniform(0.02, 0.5)),
        Reorder(chance.uniform(0.02, 0.5)),
    )
    number = chance.randrange(len(toxics) + 1)
    common = {"pause": chance.uniform(0.1, 0.8), "seconds": chance.uniform(0.2, 1.5), "number": chance.randrange(100)}
    if number == len(toxics):
        return Step(name="down", **common)  # type: ignore[arg-type]
    name = "hold" if isinstance(toxics[number], Timeout) else type(toxics[number]).__name__.lower()
    return Step(name=name, toxic=toxics[number], **common)  # type: ignore[arg-type]


def _engine(chance: random.Random, _: Profile) -> Step:
    name = chance.choice(("engine-kill", "engine-stop"))
    return Step(chance.uniform(0.5, 2.0), name, seconds=chance.uniform(0.1, 1.5))


def _device(chance: random.Random, profile: Profile) -> Step:
    pause, seconds = chance.uniform(0.3, 1.5), chance.uniform(0.2, 1.0)
    side = chance.choice(("owner", "puller"))
    call = chance.choice(("HcclBatchGet", "HcclBatchPut") if profile.one_sided else ("HcclBatchPut",))
    if not profile.one_sided:
        side = "owner"
    number = chance.randint(1, 5)
    if profile.is_checked and chance.random() < 0.6:  # of what the puller moves
        return Step(pause, "flip", "puller", seconds, spec=f"{call}:flip={chance.randrange(1 << 18)}@{number}")
    action = chance.choice(
        (
            f"delay={chance.randint(1, 300)}@{number}",
            f"fail=4@{number}",
            f"exec=507057@{number}",
            f"hang@{number}",
        )
    )
    return Step(pause, action.partition("=")[0].partition("@")[0], side, seconds, spec=f"{call}:{action}")
