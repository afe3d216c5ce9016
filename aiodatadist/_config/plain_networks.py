"""The option ``tcp_plain_networks``: networks on which bytes travel without seals."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final, Self

from aiodatadist._values import checks
from aiodatadist._values.foreign import shown
from aiodatadist.errors import ParamInvalid

MAX_NETWORKS: Final = 64


@dataclass(frozen=True)
class PlainNetworks:
    """Networks whose every machine and cable is trusted."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """Read networks that are joined by commas. Raises ParamInvalid."""
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        if len(parts) > MAX_NETWORKS:
            raise ParamInvalid(f"{name} has {len(parts)} networks: the limit is {MAX_NETWORKS}")
        networks = []
        for part in parts:
            try:
                networks.append(ip_network(part))
            except ValueError as error:
                raise ParamInvalid(
                    f"{name} has {shown(part)}: must be networks such as 10.1.0.0/16, joined by commas",
                    hint=str(error),
                ) from None
        return cls(tuple(networks))

    def __contains__(self, host: str) -> bool:
        """Return True for an address in one of the networks; False for anything else."""
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self.networks)


def joined_networks(value: Any) -> str | None:
    """Check the option; an empty text counts as None."""
    name = "tcp_plain_networks"
    networks = PlainNetworks.parse(checks.instance(value, name, str), name)
    return ",".join(map(str, networks.networks)) or None
