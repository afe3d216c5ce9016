"""What the command and its processes tell each other: one JSON object per line, on their stdin and stdout."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


# ---- orders ----


class Peers(_Message):
    """Owners' clusters: where to reach them, and the ids of their caches."""

    kind: Literal["peers"] = "peers"
    peers: dict[int, Peer]


class Peer(_Message):
    port: int
    slots: int
    """The id of its contiguous cache."""


class Fault(_Message):
    """One of a process's own. ``name`` is ``spin``, ``hog``, ``clock``, ``full`` or ``softnpu``."""

    kind: Literal["fault"] = "fault"
    name: str
    seconds: float
    spec: str = ""


class PushLarge(_Message):
    """Push 128 MiB, for a stop to meet it."""

    kind: Literal["push_large"] = "push_large"


class Healed(_Message):
    """A fault is over; ``at`` is the machine's monotonic clock. Of these clusters a good transfer is awaited."""

    kind: Literal["healed"] = "healed"
    fault: str
    clusters: list[int]
    at: float


class Stage(_Message):
    """Of a look at everything: ``drain`` lets operations end, ``part`` ends the links, ``audit`` looks, ``resume`` goes on.

    With ``is_first`` what is found is what later ones are compared with.
    """

    kind: Literal["stage"] = "stage"
    name: Literal["drain", "part", "audit", "resume", "end"]
    is_first: bool = False


Order: TypeAlias = Peers | Fault | PushLarge | Healed | Stage
ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])


# ---- reports ----


class Listening(_Message):
    """A process is ready; its clusters, if they listen."""

    kind: Literal["listening"] = "listening"
    peers: dict[int, Peer]


class Told(_Message):
    """What was done since the last time."""

    kind: Literal["told"] = "told"
    outcomes: dict[str, dict[str, int]] = {}
    moved: int = 0
    checked: int = 0
    recoveries: list[tuple[str, float]] = []
    seen: dict[str, float] = {}
    """By ``cluster/generation``, when the last transfer began that brought blocks of it."""
    retired: dict[str, float] = {}
    """By ``cluster/generation``, when it was gone."""


class Copying(_Message):
    """The first bytes of a large push have come."""

    kind: Literal["copying"] = "copying"


class Violated(_Message):
    """Something is not as it was promised."""

    kind: Literal["violated"] = "violated"
    rule: str
    what: str


class Reached(_Message):
    """A stage is over. ``belongings``: what the process had, the first time that it was at rest."""

    kind: Literal["reached"] = "reached"
    name: str
    belongings: dict[str, int] = {}


Report: TypeAlias = Listening | Told | Copying | Violated | Reached
REPORT: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


class SideSettings(_Message):
    """How a process is started.

    Attributes:
        life: how often it was started before.
        clusters: of the owner's.
        url: of the pool, for a context cache.
        group: what communicators of this run are called, for links by rank table.
        belongings: what the process had in its first life, at rest.
    """

    name: str
    profile: str
    seed: int
    life: int = 0
    clusters: list[int]
    url: str = ""
    group: str = ""
    belongings: dict[str, int] = {}
