"""Every transport keeps the contract."""

from __future__ import annotations

from aiodatadist._device import Device
from aiodatadist._testing.contracts import TransportContract
from aiodatadist._transport import TcpConfig, Transport, open_transport
from tests.connected_loopback import ConnectedLoopback


class TestLoopback(TransportContract):
    def transport(self, device: Device) -> Transport:
        return open_transport("loopback", device)


class TestHccl(TransportContract):
    def transport(self, device: Device) -> Transport:
        return open_transport("hccl", device)


class TestTcp(TransportContract):
    def transport(self, device: Device) -> Transport:
        return open_transport("tcp", device)

    @staticmethod
    def can_call_off(device: Device) -> bool:
        """Return True: it waits for its peer on the event loop."""
        return True


class TestAutoOverTcp(TestTcp):
    """``auto``, whose channels are offered data connections."""

    def transport(self, device: Device) -> Transport:
        return open_transport("auto", device)


class TestAutoOverHccl(TransportContract):
    """``auto``, whose channels are offered none: the suite offers them to endpoints with streams only."""

    def transport(self, device: Device) -> Transport:
        return open_transport("auto", device, tcp=TcpConfig(streams=0))


class TestConnectedLoopback(TransportContract):
    """``loopback`` with data connections, which the suite opens."""

    def transport(self, device: Device) -> Transport:
        return ConnectedLoopback(device)
