"""How to reach a peer."""

from __future__ import annotations

from ipaddress import IPv4Address

from aiodatadist.values import checks
from aiodatadist.values.descriptors import LLMRole


def _as_integer(ip: str | int, name: str) -> int:
    """The number that stands for an IPv4 address here: its four network bytes read little-endian."""
    if isinstance(ip, int):
        return checks.integer(ip, name, checks.UINT32)
    checks.instance(ip, name, str)
    try:
        return int.from_bytes(IPv4Address(ip).packed, "little")
    except ValueError:
        raise RuntimeError(f"{name} is {ip!r}: it has to be an IPv4 address") from None


class LLMClusterInfo:
    """One peer for ``link_clusters`` and ``unlink_clusters``: its cluster id and the address it listens on."""

    def __init__(self, remote_cluster_id: int | None = None, remote_role_type: LLMRole | int | None = None) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local: list[tuple[int, int]] = []
        self._remote: list[tuple[int, int]] = []
        if remote_cluster_id is not None:
            self.remote_cluster_id = remote_cluster_id
        if remote_role_type is not None:
            self.remote_role_type = remote_role_type

    @property
    def remote_cluster_id(self) -> int | None:
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, value: int) -> None:
        self._remote_cluster_id = checks.integer(value, "remote_cluster_id", checks.UINT64)

    @property
    def remote_role_type(self) -> LLMRole | int | None:
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, value: LLMRole | int) -> None:
        self._remote_role_type = checks.instance(value, "remote_role_type", int)

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Kept for compatibility; a client's own address is of no consequence here."""
        self._local.append((_as_integer(ip, "ip"), checks.integer(port, "port", checks.UINT16)))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Where the peer listens. Raises RuntimeError: the text is not an IPv4 address."""
        self._remote.append((_as_integer(ip, "ip"), checks.integer(port, "port", checks.UINT16)))

    @property
    def local_ip_info_list(self) -> list[tuple[int, int]]:
        return list(self._local)

    @property
    def remote_ip_info_list(self) -> list[tuple[int, int]]:
        return list(self._remote)

    @property
    def remote_addresses(self) -> list[tuple[str, int]]:
        """The remote list with the addresses as text."""
        return [(str(IPv4Address(ip.to_bytes(4, "little"))), port) for ip, port in self._remote]

    def __repr__(self) -> str:
        where = ", ".join(f"{host}:{port}" for host, port in self.remote_addresses)
        return f"<LLMClusterInfo {self._remote_cluster_id} at {where}>"
