"""The cluster id and the address of a peer to link to."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

from aiodatadist.values import checks
from aiodatadist.values.addresses import host_port, is_host_name
from aiodatadist.values.descriptors import LLMRole


def _as_kept(ip: str | int, name: str) -> int | str:
    """Return an address in the form in which it is kept.

    An IPv4 address becomes the integer of its four network bytes read little-endian, as upstream keeps it. IPv6
    addresses and host names stay text.
    """
    if isinstance(ip, int):
        return checks.integer(ip, name, checks.UINT32)
    checks.instance(ip, name, str)
    try:
        address = ip_address(ip)
    except ValueError:
        if is_host_name(ip):
            return ip
        raise RuntimeError(f"{name} is {ip!r}: must be an IPv4 or IPv6 address, or the name of a host") from None
    return str(address) if isinstance(address, IPv6Address) else int.from_bytes(address.packed, "little")


def _as_text(ip: int | str) -> str:
    return ip if isinstance(ip, str) else str(IPv4Address(ip.to_bytes(4, "little")))


class LLMClusterInfo:
    """A peer for ``link_clusters`` and ``unlink_clusters``: its cluster id and the address it listens on."""

    def __init__(self, remote_cluster_id: int | None = None, remote_role_type: LLMRole | int | None = None) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local: list[tuple[int | str, int]] = []
        self._remote: list[tuple[int | str, int]] = []
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
        """Keep an address of the client, for compatibility; it has no effect here.

        Raises what :meth:`append_remote_ip_info` raises.
        """
        self._local.append((_as_kept(ip, "ip"), checks.integer(port, "port", checks.UINT16)))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Set the address at which the peer listens.

        Args:
            ip: an IPv4 address as text, or as the integer of its four network bytes read little-endian; IPv6 as text;
                or a host name. A name is looked up whenever a link is made, or made again. The first of its addresses
                that accepts a connection counts, IPv4 first.
            port: the port at that address.

        Raises:
            TypeError, ValueError: if a type is wrong, or a number is outside its C type.
            RuntimeError: if the text is neither an IP address nor a possible host name.
        """
        self._remote.append((_as_kept(ip, "ip"), checks.integer(port, "port", checks.UINT16)))

    @property
    def local_ip_info_list(self) -> list[tuple[int | str, int]]:
        """The local addresses as IP and port: IPv4 as an integer, IPv6 and names as text."""
        return list(self._local)

    @property
    def remote_ip_info_list(self) -> list[tuple[int | str, int]]:
        """The remote addresses as IP and port: IPv4 as an integer, IPv6 and names as text."""
        return list(self._remote)

    @property
    def remote_addresses(self) -> list[tuple[str, int]]:
        """The remote addresses as host and port, with every host as text."""
        return [(_as_text(ip), port) for ip, port in self._remote]

    def __repr__(self) -> str:
        where = ", ".join(host_port(*address) for address in self.remote_addresses)
        return f"<LLMClusterInfo {self._remote_cluster_id} at {where}>"
