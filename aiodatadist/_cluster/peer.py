"""A linked cluster, as ``LLMDataDist.link_to`` returns it."""

from __future__ import annotations

from typing import Protocol

from aiodatadist._values.addresses import host_port


class _Links(Protocol):
    """The calls of an ``LLMDataDist`` that concern one link."""

    async def check_link_status(self, remote_cluster_id: int) -> None: ...
    async def notify(self, cluster_id: int, payload: bytes) -> None: ...
    async def wait_link_closed(self, cluster_id: int) -> str: ...
    async def unlink_from(self, cluster_id: int, *, timeout: float = 3.0, force: bool = False) -> None: ...


class Peer:
    """A cluster to which this one is linked. Returned by ``LLMDataDist.link_to``.

    It names the cluster, and not one link: with ``LLMConfig.relink`` it remains usable when the link is re-established.
    Dropping the object ends nothing.

    Attributes:
        cluster_id: the id of the peer.
        address: the host and port at which the peer listens.
    """

    __slots__ = ("_datadist", "address", "cluster_id")

    def __init__(self, datadist: _Links, cluster_id: int, address: tuple[str, int]) -> None:
        self._datadist = datadist
        self.cluster_id: int = cluster_id
        self.address: tuple[str, int] = address

    async def check(self) -> None:
        """Send the peer a message and wait for its answer, as ``LLMDataDist.check_link_status`` does."""
        await self._datadist.check_link_status(self.cluster_id)

    async def notify(self, payload: bytes) -> None:
        """Send the peer a notification, as ``LLMDataDist.notify`` does."""
        await self._datadist.notify(self.cluster_id, payload)

    async def wait_closed(self) -> str:
        """Wait until the link has ended, and return the reason, as ``LLMDataDist.wait_link_closed`` does."""
        return await self._datadist.wait_link_closed(self.cluster_id)

    async def unlink(self, *, timeout: float = 3.0, force: bool = False) -> None:
        """End the link, as ``LLMDataDist.unlink_from`` does."""
        await self._datadist.unlink_from(self.cluster_id, timeout=timeout, force=force)

    def __repr__(self) -> str:
        host, port = self.address
        return f"<Peer {self.cluster_id} at {host_port(host, port)}>"
