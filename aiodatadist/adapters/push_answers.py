"""What peers are told of their pushes: one answer behind the other, and each peer has its own queue.

A peer that takes none keeps as many as ``ANSWERS`` waiting. They are short: nothing of what it asked for is kept with them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable

from aiodatadist.adapters.peer_links import LinkedPeer
from aiodatadist.adapters.push_messages import PushMessage, Refused, Sent
from aiodatadist.concurrency.spawner import Spawner
from aiodatadist.counting import Incident, Incidents
from aiodatadist.errors import LLMException
from aiodatadist.values import peer_budget
from aiodatadist.values.foreign import printable

logger = logging.getLogger(__name__)

Post = Callable[[LinkedPeer, PushMessage], Awaitable[None]]
"""Tells a peer something. Raises LLMException: it cannot."""


class Answers:
    """One worker's. ``len()`` is how many peers have not taken all of theirs."""

    def __init__(self, tasks: Spawner, post: Post, incidents: Incidents) -> None:
        self._tasks = tasks
        self._post = post
        self._incidents = incidents
        self._queues: dict[LinkedPeer, deque[tuple[str, int, str | None]]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def sent(self, peer: LinkedPeer, transfer: str, number: int) -> None:
        """All blocks are in place."""
        self._add(peer, (transfer, number, None))

    def refused(self, peer: LinkedPeer, transfer: str, number: int, reason: str) -> None:
        """Say that the blocks do not come, and that no further byte of them lands."""
        self._add(peer, (transfer, number, reason))

    def _add(self, peer: LinkedPeer, answer: tuple[str, int, str | None]) -> None:
        """Queue an answer if that is possible: a peer without a link knows that nothing comes, one that takes none waits."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = deque()
            self._tasks.start_soon(self._send, peer, queue)
        if len(queue) >= peer_budget.ANSWERS:
            words = "cluster %d takes no answers: it does not hear of %s"
            self._incidents.add(Incident.ANSWER_DROPPED, logger, words, peer.cluster_id, printable(answer[0]))
            return
        queue.append(answer)

    async def _send(self, peer: LinkedPeer, queue: deque[tuple[str, int, str | None]]) -> None:
        try:
            while queue:
                transfer, number, reason = queue.popleft()
                answer: PushMessage = Sent(transfer=transfer, number=number)
                if reason is not None:
                    answer = Refused(transfer=transfer, number=number, reason=reason)
                try:
                    await self._post(peer, answer)
                except LLMException as error:
                    logger.debug("cluster %d does not hear of %s: %s", peer.cluster_id, printable(transfer), error)
        finally:
            del self._queues[peer]
