"""Channels over HCCL to peers that it reaches, and over TCP to all others. ``aiodatadist._wire.ways`` decides.

Memory is registered with HCCL. A channel over TCP needs no registration: its peer reaches what is lent to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from aiodatadist._transport.contract import (
    DEFAULT_RDMA,
    DEFAULT_TCP,
    Channel,
    ChannelOffer,
    Endpoint,
    RdmaConfig,
    Region,
    TcpConfig,
    Transport,
)
from aiodatadist._transport.hccl import HcclTransport
from aiodatadist._transport.tcp import TcpTransport

if TYPE_CHECKING:
    from aiodatadist._device import Device


class AutoTransport(Transport):
    """HCCL and TCP: a channel is over TCP if it is offered data connections."""

    name: ClassVar[str] = "auto"

    def __init__(
        self,
        device: Device,
        resource: str | None = None,
        rdma: RdmaConfig = DEFAULT_RDMA,
        tcp: TcpConfig = DEFAULT_TCP,
    ) -> None:
        super().__init__(device, resource, rdma, tcp)
        self._hccl = HcclTransport(device, resource, rdma, tcp)
        self._tcp = TcpTransport(device, None, rdma, tcp)
        self._endpoint = replace(self._hccl.endpoint, streams=tcp.streams)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def register(self, regions: Sequence[Region]) -> None:
        try:
            await self._hccl.register(regions)
        finally:
            self.epoch = self._hccl.epoch

    def is_private(self, region: Region) -> bool:
        return self._hccl.is_private(region)

    def withdraw(self, regions: Sequence[Region]) -> None:
        self._hccl.withdraw(regions)

    async def unregister(self, regions: Sequence[Region]) -> None:
        try:
            await self._hccl.unregister(regions)
        finally:
            self.epoch = self._hccl.epoch

    async def open_channel(self, offer: ChannelOffer, timeout: float) -> Channel:
        way: Transport = self._hccl if offer.sockets is None else self._tcp
        return await way.open_channel(offer, timeout)

    async def aclose(self) -> None:
        await self._hccl.aclose()
