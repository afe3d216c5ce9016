"""Links to other engines' workers: made when they are first needed, and made again when they are needed after they broke."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from ipaddress import ip_address

import anyio
from pydantic import BaseModel, ConfigDict, Field

from aiodatadist.concurrency.signal import Signal
from aiodatadist.concurrency.spawner import Spawner
from aiodatadist.datadist import LLMDataDist
from aiodatadist.errors import LinkTimeout, LLMException, LLMStatusCode
from aiodatadist.values.cluster_info import LLMClusterInfo

logger = logging.getLogger(__name__)


class PeerAddress(BaseModel):
    """Where a worker listens, as JSON carries it. ``host``: an address, or a name that is looked up for each link."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cluster_id: int = Field(ge=0, lt=2**64)
    host: str = Field(min_length=1)
    port: int = Field(ge=1, le=65535)

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass
class _Attempt:
    """To make a link."""

    over: Signal = field(default_factory=Signal)
    error: LLMException | None = None


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
        self._attempts: dict[tuple[int, str], _Attempt] = {}
        self._watched: set[int] = set()

    async def link(self, peer: PeerAddress) -> None:
        """Until there is a link. All who want one at the same time share an attempt.

        Raises:
            LinkTimeout: there is none within ``seconds``. LLMException: there cannot be.
        """
        if peer.cluster_id in self._watched:
            return
        key = peer.cluster_id, peer.place
        attempt = self._attempts.get(key)
        if attempt is None:
            attempt = self._attempts[key] = _Attempt()
            self._tasks.start_soon(self._try, peer, attempt)
        await attempt.over.wait()
        if attempt.error is not None:
            raise copy(attempt.error)

    async def _try(self, peer: PeerAddress, attempt: _Attempt) -> None:
        attempt.error = LinkTimeout(f"no link to {peer.place}: this end is closed")
        try:
            millis = round(1000 * self._seconds)
            status, _ = await self._datadist.link_clusters([await self._info(peer)], millis)
            if status in {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}:
                attempt.error = None
                self.watch(peer.cluster_id)
            else:
                attempt.error = LinkTimeout(f"no link to {peer.place}: {status.name}", status_code=status)
        except LLMException as error:
            attempt.error = error
        except (OSError, ValueError, RuntimeError) as error:  # no such host, or no address that can be linked to
            attempt.error = LinkTimeout(f"no link to {peer.place}: {error}")
        finally:
            del self._attempts[peer.cluster_id, peer.place]
            attempt.over.set()

    async def end(self, peer: PeerAddress) -> None:
        """No byte lands through it any more, whether the peer answers within ``seconds`` or not."""
        await self._datadist.unlink_clusters([LLMClusterInfo(peer.cluster_id)], round(1000 * self._seconds))

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
        self._on_closed(number)

    @staticmethod
    async def _info(peer: PeerAddress) -> LLMClusterInfo:
        """Raises OSError: there is no such host. RuntimeError: it is no address to link to."""
        address = peer.host
        try:
            ip_address(address)
        except ValueError:
            found = await anyio.getaddrinfo(address, peer.port, type=socket.SOCK_STREAM)
            address = str(found[0][4][0])
        info = LLMClusterInfo(peer.cluster_id)
        info.append_remote_ip_info(address, peer.port)
        return info
