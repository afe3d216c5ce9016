"""The leases of other engines that this worker's requests hold while they wait: named again before their time is up."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from aiodatadist._adapters.hold_messages import MAX_HELD, Held, Hold, LetGo
from aiodatadist._adapters.peer_links import LinkedPeer, PeerAddress, PeerLinks
from aiodatadist._concurrency.signal import Signal
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist.errors import LLMException

logger = logging.getLogger(__name__)

Leases = Sequence[tuple[PeerAddress, Held]]
"""A request's leases, one at each worker that has blocks of it."""
OFTEN = 3
"""Messages in the time of a lease: two may be late or lost."""
SHORTEST, LONGEST = 0.5, 20.0
"""Limits of the seconds between two messages: a router wrote the lease's time."""


@dataclass
class _Waiting:
    """A request that waits. ``due`` is when its leases are named next."""

    leases: Leases
    every: float
    due: float


class Holds:
    """The holds of one worker's requests, on its event loop. All are named by one task, many in a message.

    Args:
        post: sends a message to a peer.
    """

    def __init__(
        self, links: PeerLinks, tasks: Spawner, post: Callable[[LinkedPeer, Hold | LetGo], Awaitable[None]]
    ) -> None:
        self._links = links
        self._tasks = tasks
        self._post = post
        self._waiting: dict[str, _Waiting] = {}
        self._news = Signal()
        self._is_running = False
        self._telling: set[PeerAddress] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, request: str, leases: Leases, seconds: float) -> None:
        """Hold a request's leases until it lets go. ``seconds`` is the time that they have without that."""
        every = min(max(seconds / OFTEN, SHORTEST), LONGEST)
        self._waiting[request] = _Waiting(leases, every, _now())
        self._wake()

    def let_go(self, request: str, leases: Leases = ()) -> None:
        """Hold a request's leases no longer.

        Args:
            leases: of which the owners are told that the request lets go. A lease that only one request may take needs
                no such word: it ends when that request has taken or released it.
        """
        self._waiting.pop(request, None)
        for owner, mine in _by_owner(leases).items():
            self._tasks.start_soon(self._tell, owner, LetGo, mine)

    def lost(self, peer: LinkedPeer) -> None:
        """Name what a peer keeps again soon, because the link to it has ended."""
        now = _now()
        for each in self._waiting.values():
            if any(owner.cluster_id == peer.cluster_id for owner, _ in each.leases):
                each.due = now
        self._wake()

    def _wake(self) -> None:
        if not self._waiting:
            return
        if self._is_running:
            self._news.wake()
        else:
            self._is_running = True
            self._tasks.start_soon(self._name_again)

    async def _name_again(self) -> None:
        try:
            while self._waiting:
                self._name_due()
                with anyio.move_on_at(min(each.due for each in self._waiting.values())):
                    await self._news.wait()
        finally:
            self._is_running = False

    def _name_due(self) -> None:
        now = _now()
        due = [each for each in self._waiting.values() if each.due <= now]
        for each in due:
            each.due = now + each.every
        for owner, held in _by_owner([lease for each in due for lease in each.leases]).items():
            if owner not in self._telling:  # an owner that is slow is told again later
                self._telling.add(owner)
                self._tasks.start_soon(self._hold, owner, held)

    async def _hold(self, owner: PeerAddress, held: Sequence[Held]) -> None:
        try:
            await self._tell(owner, Hold, held)
        finally:
            self._telling.discard(owner)

    async def _tell(self, owner: PeerAddress, kind: type[Hold | LetGo], held: Sequence[Held]) -> None:
        """Tell an owner, if it is linked or can be dialled now."""
        try:
            peer = await self._links.link_to_tell(owner)
            for first in range(0, len(held), MAX_HELD):
                await self._post(peer, kind(held=tuple(held[first : first + MAX_HELD])))
        except LLMException as error:
            logger.debug("cluster %d is not told of %d leases: %s", owner.cluster_id, len(held), error)


def _now() -> float:
    return asyncio.get_running_loop().time()  # anyio knows the time only within a task


def _by_owner(leases: Leases) -> dict[PeerAddress, list[Held]]:
    found: defaultdict[PeerAddress, list[Held]] = defaultdict(list)
    for owner, held in leases:
        found[owner].append(held)
    return found
