"""Links to other engines' workers: made when they are first needed, and made again when they are needed after they broke."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
from pydantic import BaseModel, ConfigDict, Field

from aiodatadist.concurrency.spawner import Spawner
from aiodatadist.datadist import LLMDataDist
from aiodatadist.errors import LinkTimeout, LLMException, LLMStatusCode
from aiodatadist.values.cluster_info import LLMClusterInfo

logger = logging.getLogger(__name__)


class PeerAddress(BaseModel):
    """Where a worker listens, as JSON carries it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cluster_id: int = Field(ge=0, lt=2**64)
    host: str = Field(min_length=1)
    port: int = Field(ge=1, le=65535)

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"


class PeerLinks:
    """One worker's.

    Args:
        seconds: that making a link may take.
        on_closed: called with the cluster id of a link that was used and is gone.
    """

    def __init__(self, datadist: LLMDataDist, tasks: Spawner, seconds: float, on_closed: Callable[[int], None]) -> None:
        self._datadist = datadist
        self._tasks = tasks
        self._seconds = seconds
        self._on_closed = on_closed
        self._locks: dict[int, anyio.Lock] = {}
        self._watched: set[int] = set()

    async def link(self, peer: PeerAddress) -> None:
        """Until there is a link. Raises LinkTimeout: there is none within ``seconds``."""
        number = peer.cluster_id
        async with self._locks.setdefault(number, anyio.Lock()):
            if number in self._watched:
                return
            millis = round(1000 * self._seconds)
            status, _ = await self._datadist.link_clusters([self._info(peer)], millis)
            if status not in {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}:
                raise LinkTimeout(f"no link to {peer.place}: {status.name}", status_code=status)
            self.watch(number)

    async def end(self, peer: PeerAddress) -> None:
        """No byte lands through it any more, whether the peer answers within ``seconds`` or not."""
        await self._datadist.unlink_clusters([self._info(peer)], round(1000 * self._seconds))

    def watch(self, number: int) -> None:
        """Also of a link that the peer made."""
        if number not in self._watched:
            self._watched.add(number)
            self._tasks.start_soon(self._watch, number)

    async def _watch(self, number: int) -> None:
        try:
            await self._datadist.wait_link_closed(number)
        except LLMException:  # it was over already
            logger.debug("the link to cluster %d was over before it was watched", number)
        self._watched.discard(number)
        self._locks.pop(number, None)
        self._on_closed(number)

    @staticmethod
    def _info(peer: PeerAddress) -> LLMClusterInfo:
        info = LLMClusterInfo(peer.cluster_id)
        info.append_remote_ip_info(peer.host, peer.port)
        return info
