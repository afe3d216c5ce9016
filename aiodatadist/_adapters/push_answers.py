"""Answers to peers about their pushes, one after the other; each peer has its own queue.

A peer that accepts none has at most ``ANSWERS`` waiting. They are short: nothing of its requests is kept with them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable

from aiodatadist._adapters.peer_links import LinkedPeer
from aiodatadist._adapters.push_messages import PushMessage, Refused, Sent
from aiodatadist._concurrency.spawner import Spawner
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values import peer_budget
from aiodatadist._values.foreign import printable
from aiodatadist.errors import LLMException

logger = logging.getLogger(__name__)

Post = Callable[[LinkedPeer, PushMessage], Awaitable[None]]
"""Sends a message to a peer. Raises LLMException if that is impossible."""


class Answers:
    """The answers of one worker. ``len()`` is the number of peers that have not received all of theirs."""

    def __init__(self, tasks: Spawner, post: Post, incidents: Incidents) -> None:
        self._tasks = tasks
        self._post = post
        self._incidents = incidents
        self._queues: dict[LinkedPeer, deque[tuple[str, int, str | None]]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def sent(self, peer: LinkedPeer, transfer: str, number: int) -> None:
        """Tell a peer that all blocks are in place."""
        self._add(peer, (transfer, number, None))

    def refused(self, peer: LinkedPeer, transfer: str, number: int, reason: str) -> None:
        """Tell a peer that the blocks will not come, and that no more bytes of them land."""
        self._add(peer, (transfer, number, reason))

    def _add(self, peer: LinkedPeer, answer: tuple[str, int, str | None]) -> None:
        """Queue an answer if possible. A peer without a link knows that nothing comes; a full queue takes no more."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = deque()
            self._tasks.start_soon(self._send, peer, queue)
        if len(queue) >= peer_budget.ANSWERS:
            words = "cluster %d accepts no answers: the one about %s is dropped"
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
                    logger.debug("cluster %d gets no answer about %s: %s", peer.cluster_id, printable(transfer), error)
        finally:
            del self._queues[peer]
