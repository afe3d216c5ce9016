"""Messages between the command and its processes: one JSON object per line, on their stdin and stdout."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from aiodatadist._cli.chaos.profiles import Profile
from aiodatadist._cli.kit.pipes import Message

# ---- orders ----


class Peers(Message):
    """The owner's clusters: their addresses, and the ids of their caches."""

    kind: Literal["peers"] = "peers"
    peers: dict[int, Peer]


class Peer(Message):
    port: int
    slots: int
    """The id of its contiguous cache."""


class Fault(Message):
    """A fault of the process itself. ``name`` is ``spin``, ``hog``, ``clock``, ``full`` or ``softnpu``."""

    kind: Literal["fault"] = "fault"
    name: str
    seconds: float
    spec: str = ""


class PushLarge(Message):
    """An order to push 128 MiB, so that a stop can interrupt it."""

    kind: Literal["push_large"] = "push_large"


class Healed(Message):
    """A fault has ended, at time ``at`` of the machine's monotonic clock.

    A successful transfer from these clusters is expected.
    """

    kind: Literal["healed"] = "healed"
    fault: str
    clusters: list[int]
    at: float


class Stage(Message):
    """A stage of a check of everything.

    ``drain`` lets operations end, ``part`` ends the links, ``audit`` checks, ``resume`` continues. Later checks are
    compared with the results of the one with ``is_first``.
    """

    kind: Literal["stage"] = "stage"
    name: Literal["drain", "part", "audit", "resume", "end"]
    is_first: bool = False


Order: TypeAlias = Peers | Fault | PushLarge | Healed | Stage
ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])


# ---- reports ----


class Listening(Message):
    """The process is ready. ``clusters`` are those that listen."""

    kind: Literal["listening"] = "listening"
    peers: dict[int, Peer]


class Told(Message):
    """The work done since the last report."""

    kind: Literal["told"] = "told"
    outcomes: dict[str, dict[str, int]] = Field(default_factory=dict)
    moved: int = 0
    checked: int = 0
    recoveries: list[tuple[str, float]] = Field(default_factory=list)
    seen: dict[str, float] = Field(default_factory=dict)
    """The start of the last transfer that returned blocks of it, by ``cluster/generation``."""
    retired: dict[str, float] = Field(default_factory=dict)
    """The time of its end, by ``cluster/generation``."""


class Copying(Message):
    """The first bytes of a large push have arrived."""

    kind: Literal["copying"] = "copying"


class Violated(Message):
    """A promise was broken."""

    kind: Literal["violated"] = "violated"
    rule: str
    what: str


class Reached(Message):
    """A stage has ended.

    Attributes:
        belongings: resources of the process when it was first at rest.
        resident: bytes of memory that it uses.
    """

    kind: Literal["reached"] = "reached"
    name: str
    belongings: dict[str, int] = Field(default_factory=dict)
    resident: int = 0


Report: TypeAlias = Listening | Told | Copying | Violated | Reached
REPORT: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


class SideSettings(Message):
    """The settings with which a process is started.

    Attributes:
        life: number of times that it was started before.
        clusters: the owner's clusters.
        url: URL of the pool, for a context cache.
        group: name of this run's communicators, for links by rank table.
        belongings: resources of the process at rest, in its first life.
    """

    name: str
    profile: Profile
    seed: int
    life: int = 0
    clusters: list[int]
    url: str = ""
    group: str = ""
    belongings: dict[str, int] = Field(default_factory=dict)
