"""Links from decode to each prefill service: made at the start, and again whenever a link has ended."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress

import anyio
from prometheus_client import Counter

from aiodatadist import LLMClusterInfo, LLMDataDist, LLMException, LLMStatusCode

from .answer import Refused

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
"""Seconds between two attempts: they double, and each is drawn from its upper half, so that services do not come in step."""


class PrefillLinks:
    """Links of a decode service.

    Args:
        peers: with a cluster id and an address each. A service that is started again has the same ones.
        wait_seconds: that a request waits for a link that is down.
        made: counts links.
    """

    def __init__(
        self, datadist: LLMDataDist, peers: Sequence[LLMClusterInfo], wait_seconds: float, made: Counter
    ) -> None:
        self._datadist = datadist
        self._peers = peers
        self._wait_seconds = wait_seconds
        self._made = made
        self._up = {_id(peer): anyio.Event() for peer in peers}

    @property
    def number_up(self) -> int:
        return sum(event.is_set() for event in self._up.values())

    async def keep(self) -> None:
        """Keep the links up, until cancelled."""
        async with anyio.create_task_group() as group:
            for peer in self._peers:
                group.start_soon(self._keep, peer)

    async def _keep(self, peer: LLMClusterInfo) -> None:
        cluster_id, pause = _id(peer), FIRST_PAUSE
        while True:
            status, _ = await self._datadist.link_clusters([peer])  # a failure is in the log, with its reason
            if status in {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}:
                self._made.inc()
                self._up[cluster_id].set()
                with suppress(LLMException):  # it was over before it was looked at
                    await self._datadist.wait_link_closed(cluster_id)
                self._up[cluster_id] = anyio.Event()
                pause = FIRST_PAUSE
            await anyio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def wait_up(self, cluster_id: int) -> None:
        """Wait until there is a link to that prefill service.

        Raises:
            Refused: 400 if this service was started without that peer; 410 if the link is not back in time.
        """
        if cluster_id not in self._up:
            raise Refused(400, f"cluster {cluster_id} is none of the prefill services {sorted(self._up)}")
        with anyio.move_on_after(self._wait_seconds):
            while not self._up[cluster_id].is_set():
                await self._up[cluster_id].wait()
            return
        raise Refused(410, f"there was no link to prefill service {cluster_id} within {self._wait_seconds:g} s")


def _id(peer: LLMClusterInfo) -> int:
    assert peer.remote_cluster_id is not None
    return peer.remote_cluster_id
