"""Profiles of runs: interface, mode, event loop, kind of softnpu, and faults. No I/O."""

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
        door: interface that is called: ``aiodatadist``, ``blocking``, ``legacy``, or a context cache.
        one_sided: False for request/response mode.
        loop: ``asyncio`` or ``uvloop``.
        strict: ``SOFTNPU_STRICT``.
        engine: engine of a context cache, ``redis`` or ``mooncake``; empty for memory of each process.
        is_calm: True if there are no faults; then nothing may fail, and links last until the end.
        is_checked: True if pulls and pushes have checksums, and bits flip in transit.
        relinks: True if the library relinks broken links.
        by_ranks: True if links are made by rank table: both ends ask for them, and no proxy is between them.
        load: ``full`` without pauses between operations, ``idle`` with long ones, ``busy`` beside threads that hold the
            interpreter and blocked event loops.
        clusters: number of clusters in the owner's process.
        gib: size of another cache in each cluster, of 80 layers as in production; 0 for none.
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
        """The interface of the owner's clusters."""
        return self.door if self.is_calm or self.door == "v1" else "await"

    @property
    def patience(self) -> float:
        """The most seconds for an operation: its time limit, an abort, and the time for which a process was stopped.

        HCCL and strict softnpu cannot stop waiting for a peer that has left: a further channel then takes 20 s, and a
        broken one 30 s.
        """
        return 75.0 if self.strict else 25.0

    @property
    def sides(self) -> tuple[str, ...]:
        """The processes of the run, in the order in which they start."""
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
