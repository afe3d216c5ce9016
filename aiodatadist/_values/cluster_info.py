"""The cluster id and the address of a peer to link to."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import overload

from aiodatadist._values import checks
from aiodatadist._values.addresses import host_port, is_host_name, parse_address
from aiodatadist._values.descriptors import LLMRole
from aiodatadist.errors import ParamInvalid


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


def check_address(value: tuple[str, int] | str, name: str) -> tuple[str, int]:
    """Return the host and port of a peer.

    Raises:
        TypeError, ValueError: if it is neither a text nor a tuple of a text and an int, or the port is no uint16.
        ParamInvalid: if the text is not an address with a port, or the port is 0.
    """
    if isinstance(value, str):
        host, port = parse_address(value, name)
    elif isinstance(value, tuple) and len(value) == 2:
        host = checks.instance(value[0], f"{name}[0]", str)
        port = checks.integer(value[1], f"{name}[1]", checks.UINT16)
    else:
        raise TypeError(f'{name} is {value!r}: must be (host, port) or a text like "host:26001"')
    if port == 0:
        raise ParamInvalid(f"{name} is {value!r}: a peer listens on a port above 0")
    return host, port


class LLMClusterInfo:
    """A peer for ``link_clusters`` and ``unlink_clusters``: its cluster id and the address it listens on.

    In one line: ``LLMClusterInfo(1, ("10.0.0.7", 26001))`` or ``LLMClusterInfo(1, "[::1]:26001")``.

    Args:
        remote_cluster_id: the id of the peer.
        remote_role_type: informational.
        address: where the peer listens: host and port, or a text like ``"host:26001"``. :meth:`append_remote_ip_info`
            sets it, too.

    Raises:
        TypeError, ValueError: if a type is wrong, or a number is outside its C type.
        ParamInvalid, RuntimeError: if the address cannot be one, or its port is 0.
    """

    @overload
    def __init__(
        self,
        remote_cluster_id: int | None = None,
        remote_role_type: LLMRole | int | None = None,
        *,
        address: tuple[str, int] | str | None = None,
    ) -> None: ...
    @overload
    def __init__(self, remote_cluster_id: int, address: tuple[str, int] | str, /) -> None: ...
    def __init__(
        self,
        remote_cluster_id: int | None = None,
        remote_role_type: LLMRole | int | tuple[str, int] | str | None = None,
        *,
        address: tuple[str, int] | str | None = None,
    ) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local: list[tuple[int | str, int]] = []
        self._remote: list[tuple[int | str, int]] = []
        if isinstance(remote_role_type, (tuple, str)):
            if address is not None:
                raise TypeError(f"address was given twice: {remote_role_type!r} and {address!r}")
            remote_role_type, address = None, remote_role_type
        if remote_cluster_id is not None:
            self.remote_cluster_id = remote_cluster_id
        if remote_role_type is not None:
            self.remote_role_type = remote_role_type
        if address is not None:
            self.append_remote_ip_info(*check_address(address, "address"))

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
                or a host name. A name is looked up whenever a link is made or re-established. The first of its
                addresses that accepts a connection counts, IPv4 first.
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


def only_address(info: LLMClusterInfo) -> tuple[str, int]:
    """Return the cluster's only remote address. Raises ParamInvalid if it has none or several."""
    addresses = info.remote_addresses
    if len(addresses) != 1:
        raise ParamInvalid(
            f"cluster {info.remote_cluster_id} has {len(addresses)} remote addresses: exactly one is needed",
            hint="append_remote_ip_info(host, port)",
        )
    return addresses[0]


def one_peer(peer: int | LLMClusterInfo, address: str | tuple[str, int] | None) -> tuple[int, tuple[str, int]]:
    """Return the id and the address of a peer.

    Raises TypeError, ValueError, RuntimeError or ParamInvalid if they are wrong, or the address is missing or given twice.
    """
    if isinstance(peer, LLMClusterInfo):
        if address is not None:
            raise TypeError(f"address is {address!r}: the LLMClusterInfo has the peer's address")
        info = peer
    elif address is None:
        raise TypeError('address is missing: give the peer\'s, for instance "host:26001"')
    else:
        info = LLMClusterInfo(checks.integer(peer, "peer", checks.UINT64), address=address)
    return checks.integer(info.remote_cluster_id, "remote_cluster_id", checks.UINT64), only_address(info)
