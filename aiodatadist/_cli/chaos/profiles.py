"""Profiles of runs: which interface, mode, event loop and softnpu, and which faults. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Door = Literal["await", "blocking", "v1", "context"]
Strictness = Literal["", "hccs", "roce"]
Load = Literal["full", "idle", "busy"]


@dataclass(frozen=True)
class Profile:
    """A kind of run.

    Attributes:
        door: whose calls are made: of ``aiodatadist``, its ``blocking``, its ``legacy``, or of a context
            cache.
        one_sided: or request/response.
        loop: ``asyncio`` or ``uvloop``.
        strict: ``SOFTNPU_STRICT``.
        engine: of a context cache: ``redis`` or ``mooncake``; none: memory of each process.
        is_calm: no faults; then nothing may fail, and links last until the end.
        is_checked: pulls and pushes have checksums, and bits flip in what moves.
        relinks: links that broke are made again by the library.
        by_ranks: links are by rank table: both ends ask for them, and no proxy is between them.
        load: ``full``: operations without a pause. ``idle``: with long ones. ``busy``: beside threads that take the
            interpreter, and event loops that stand still.
        clusters: of the owner's process.
        gib: size of a further cache of 80 layers, as in production, that each cluster has; 0: none.
    """

    name: str
    what: str
    door: Door = "await"
    one_sided: bool = True
    loop: str = "asyncio"
    strict: Strictness = ""
    engine: str = ""
    is_calm: bool = False
    is_checked: bool = False
    relinks: bool = False
    by_ranks: bool = False
    load: Load = "full"
    clusters: int = 2
    gib: int = 0

    @property
    def owner(self) -> str:
        """The door of the owner's clusters."""
        return self.door if self.is_calm or self.door == "v1" else "await"

    @property
    def patience(self) -> float:
        """Seconds that an operation may take, whatever happens: time limit, abort, and a process that stood still.

        HCCL, and strict softnpu, cannot be told to stop waiting for a peer that has left: a further channel takes 20 s
        then, and one that broke 30 s.
        """
        return 75.0 if self.strict else 25.0

    @property
    def sides(self) -> tuple[str, ...]:
        """Its processes, in the order in which they start."""
        return ("saver-1", "saver-2") if self.door == "context" else ("owner", "puller")

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes of the profile's program of faults."""
        if self.is_calm:
            return ()
        if self.door == "context":
            return ("processes", "engine") if self.engine else ("processes",)
        copies = ("copies",) if self.door == "await" and self.one_sided else ()
        if self.by_ranks:
            return ("processes", "devices", *copies)
        return ("processes", "network", "devices", *copies)


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("one-sided", "one-sided mode, asyncio"),
        Profile("request", "request/response mode, asyncio", one_sided=False),
        Profile("uvloop", "one-sided mode, uvloop", loop="uvloop"),
        Profile("request-uvloop", "request/response mode, uvloop", one_sided=False, loop="uvloop"),
        Profile("hccs", "one-sided mode, softnpu strict as between cards", strict="hccs"),
        Profile("roce", "one-sided mode, softnpu strict as between servers", strict="roce"),
        Profile("request-roce", "request/response mode, strict softnpu", one_sided=False, strict="roce"),
        Profile("checksum", "one-sided mode, with checksums and bits that flip", is_checked=True),
        Profile("relink", "one-sided mode, with links that come back by themselves", relinks=True),
        Profile("ranks", "one-sided mode, with links by rank table", by_ranks=True),
        Profile("blocking", "one-sided mode, without await", door="blocking"),
        Profile(
            "v1", "v1: roles, keys that are consumed, links that do one thing at a time", door="v1", one_sided=False
        ),
        Profile("context", "context caches, each with memory of its own", door="context"),
        Profile("redis", "context caches over Redis", door="context", engine="redis"),
        Profile("mooncake", "context caches over Mooncake", door="context", engine="mooncake"),
        Profile("calm", "one-sided mode without a fault", is_calm=True),
        Profile("calm-blocking", "both ends without await, without a fault", door="blocking", is_calm=True),
        Profile("calm-v1", "v1 without a fault", door="v1", one_sided=False, is_calm=True),
        Profile(
            "calm-redis", "context caches over Redis without a fault", door="context", engine="redis", is_calm=True
        ),
    )
}
