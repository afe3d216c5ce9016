"""HCCL's demands on the two devices of a link, checked first: HCCL would return a number, or wait for 120 s."""

from __future__ import annotations

from aiodatadist._transport.contract import Endpoint
from aiodatadist._values.foreign import printable
from aiodatadist.errors import IncompatiblePeer

GIVE = "LLMConfig.local_comm_res"


def check_ends(mine: Endpoint, peer: Endpoint, *, needs_address: bool) -> None:
    """Check that one rank table can have both devices, and that both ends mean the same by it.

    Args:
        needs_address: True if the link is RoCE, between network cards.

    Raises:
        IncompatiblePeer: if it cannot; the message has the value, the rule and the cure.
    """
    _check_servers(mine, peer)
    _check_devices(mine, peer)
    _check_pods(mine, peer)
    if needs_address:
        for whose, end in (("this", mine), ("the peer's", peer)):
            _check_address(whose, end)


def _machine(end: Endpoint) -> str:
    """Return the machine of an endpoint, without the user. Containers of one machine have its boot id, too."""
    return end.host.rpartition(":")[0]


def _check_servers(mine: Endpoint, peer: Endpoint) -> None:
    """Check that one server id is not used on two machines.

    Containers with separate networks may have the same address on two machines: HCCL would use HCCS, to a wrong card.
    """
    if mine.server_id == peer.server_id and _machine(mine) != _machine(peer):
        raise IncompatiblePeer(
            f"both ends have server_id {mine.server_id} but run on two machines: it must name one machine",
            hint=f"give each its own server_id in {GIVE}",
        )


def _check_devices(mine: Endpoint, peer: Endpoint) -> None:
    is_one_machine = mine.server_id == peer.server_id or _machine(mine) == _machine(peer)
    if is_one_machine and mine.device_id == peer.device_id:
        raise IncompatiblePeer(
            f"both ends are device {mine.device_id} of server {mine.server_id}: HCCL links different devices only",
            hint="run one of them on another device: device_id, or ASCEND_RT_VISIBLE_DEVICES",
        )
    if mine.device_ip and mine.device_ip == peer.device_ip:
        raise IncompatiblePeer(
            f"devices {mine.device_id} and {printable(peer.device_id)} both have device_ip {mine.device_ip}: "
            "in a rank table it must belong to one device",
            hint=f"look with hccn_tool -i N -ip -g, and correct {GIVE}, or /etc/hccn.conf",
        )


def _check_pods(mine: Endpoint, peer: Endpoint) -> None:
    if bool(mine.super_pod_id) != bool(peer.super_pod_id):
        whose, other = ("this", "the peer's") if mine.super_pod_id else ("the peer's", "this")
        pod = printable(mine.super_pod_id or peer.super_pod_id)
        raise IncompatiblePeer(
            f"{whose} device names its super pod, {pod}, and {other} names none: HCCL would treat both as one pod's",
            hint=f"both ends need {GIVE} of version 1.2, or none",
        )


def _check_address(whose: str, end: Endpoint) -> None:
    if not end.device_ip:
        raise IncompatiblePeer(
            f"{whose} device {printable(end.device_id)} of server {printable(end.server_id)} has no device_ip: this link is "
            "RoCE, which needs the address of the device's network card",
            hint=f"see hccn_tool -i {printable(end.device_id)} -ip -g there; /etc/hccn.conf or {GIVE} can say it, too",
        )
