"""Messages between the command and its processes: one JSON object per line, on their stdin and stdout."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from aiodatadist._cli.chaos.profiles import Profile
from aiodatadist._cli.kit.pipes import Message

# ---- orders ----


class Peers(Message):
    """Owners' clusters: where to reach them, and the ids of their caches."""

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
    """Push 128 MiB, for a stop to meet it."""

    kind: Literal["push_large"] = "push_large"


class Healed(Message):
    """A fault is over; ``at`` is the machine's monotonic clock. Of these clusters a good transfer is awaited."""

    kind: Literal["healed"] = "healed"
    fault: str
    clusters: list[int]
    at: float


class Stage(Message):
    """A stage of a look at everything.

    ``drain`` lets operations end, ``part`` ends the links, ``audit`` looks, ``resume`` continues. What is found with
    ``is_first`` is what later looks are compared with.
    """

    kind: Literal["stage"] = "stage"
    name: Literal["drain", "part", "audit", "resume", "end"]
    is_first: bool = False


Order: TypeAlias = Peers | Fault | PushLarge | Healed | Stage
ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])


# ---- reports ----


class Listening(Message):
    """A process is ready; its clusters, if they listen."""

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
    """By ``cluster/generation``, when the last transfer began that brought blocks of it."""
    retired: dict[str, float] = Field(default_factory=dict)
    """By ``cluster/generation``, when it was gone."""


class Copying(Message):
    """The first bytes of a large push have come."""

    kind: Literal["copying"] = "copying"


class Violated(Message):
    """Something is not as it was promised."""

    kind: Literal["violated"] = "violated"
    rule: str
    what: str


class Reached(Message):
    """A stage is over.

    Attributes:
        belongings: what the process had, the first time that it was at rest.
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
        life: how often it was started before.
        clusters: of the owner's.
        url: of the pool, for a context cache.
        group: what communicators of this run are called, for links by rank table.
        belongings: what the process had in its first life, at rest.
    """

    name: str
    profile: Profile
    seed: int
    life: int = 0
    clusters: list[int]
    url: str = ""
    group: str = ""
    belongings: dict[str, int] = Field(default_factory=dict)
