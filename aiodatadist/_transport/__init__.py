"""Transports: moving bytes between registered memory of two peers.

The contract is in ``contract``. Implementations are found by name, and no other room imports them. Promises: a channel
moves only what both ends registered, and the steps that it adds to a program follow the program's rules (order, one
end, no byte after it). It knows nothing of caches, keys and control messages.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from aiodatadist._transport.contract import (
    DEFAULT_RDMA,
    DEFAULT_TCP,
    EVERYTHING,
    Access,
    Channel,
    ChannelOffer,
    DataConnection,
    Endpoint,
    OpenSockets,
    RdmaConfig,
    Reach,
    Region,
    StillWritten,
    TcpConfig,
    Transport,
)
from aiodatadist.errors import ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._device import Device

TRANSPORTS = {
    "auto": "AutoTransport",
    "hccl": "HcclTransport",
    "loopback": "LoopbackTransport",
    "tcp": "TcpTransport",
}


def open_transport(
    name: str,
    device: Device,
    resource: str | None = None,
    rdma: RdmaConfig = DEFAULT_RDMA,
    tcp: TcpConfig = DEFAULT_TCP,
) -> Transport:
    """Return the transport of this name for a device. ``resource`` is the ``local_comm_res`` option.

    Raises:
        ParamInvalid: if there is no such transport, or the resource description is wrong.
    """
    if name not in TRANSPORTS:
        raise ParamInvalid(f"transport is {name!r}: must be {' or '.join(sorted(TRANSPORTS))}")
    module = import_module(f"aiodatadist._transport.{name}")
    transport: Transport = getattr(module, TRANSPORTS[name])(device, resource, rdma, tcp)
    return transport


__all__ = [
    "EVERYTHING",
    "TRANSPORTS",
    "Access",
    "Channel",
    "ChannelOffer",
    "DataConnection",
    "Endpoint",
    "OpenSockets",
    "RdmaConfig",
    "Reach",
    "Region",
    "StillWritten",
    "TcpConfig",
    "Transport",
    "open_transport",
]
