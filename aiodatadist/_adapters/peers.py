"""The addresses that an engine dials. A router or a client says where other engines are, and is not trusted.

An address is compared as it is, a name as it is written: before it matches, nothing is looked up and no socket is
opened.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from aiodatadist._values.addresses import is_address, is_host_name
from aiodatadist._values.foreign import printable
from aiodatadist.errors import LinkError

MAX_RULES: Final = 1024
"""The most rules of an engine: each address is compared with all of them on the event loop."""
_RANGE: Final = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?")


class NotAPeer(LinkError):
    """The address is not in ``peers``, or its link leads elsewhere. Nothing was dialled or looked up."""


def _range(value: Any) -> Any:
    """Return ``7``, ``"7"`` or ``"7-12"`` as the first and the last number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    if isinstance(value, str):
        found = _RANGE.fullmatch(value.replace(" ", ""))
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError('must be a number, or a range such as "26000-26007"')
        return int(found[1]), int(found[2] or found[1])
    return value


Port = Annotated[int, Field(ge=1, le=65535)]
ClusterId = Annotated[int, Field(ge=0, lt=2**64)]


class PeerRule(BaseModel):
    """Addresses that may be dialled.

    Attributes:
        host: an IP address, a network such as ``"10.0.0.0/24"``, or a name as offers have it. A ``*`` in a name stands
            for any characters but dots: ``"prefill-*.prefill.ns.svc"``.
        ports: a port, or a range such as ``"26000-26007"``. None means any.
        cluster_ids: a cluster id, or a range. None means any.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    host: Annotated[str, Field(min_length=1, max_length=253)]
    ports: Annotated[tuple[Port, Port], BeforeValidator(_range)] | None = None
    cluster_ids: Annotated[tuple[ClusterId, ClusterId], BeforeValidator(_range)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        return {"host": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.network is None and not is_host_name(self.host.replace("*", "x")):
            raise ValueError(f"host is {self.host!r}: must be an IP address, a network, or a name, which may contain *")
        return self

    @property
    def network(self) -> IPv4Network | IPv6Network | None:
        """The network of the rule; None if it is a name."""
        try:
            return ip_network(self.host)
        except ValueError:
            return None


class Peers:
    """The addresses that one engine dials.

    Args:
        rules: one of them must match. Without a rule, nothing is dialled.
    """

    def __init__(self, rules: Sequence[PeerRule]) -> None:
        self._networks = [(rule, network) for rule in rules if (network := rule.network) is not None]
        self._names = [(rule, _pattern(rule.host)) for rule in rules if rule.network is None]

    def why_not(self, host: str, port: int, cluster_id: int | None = None) -> str:
        """Return why this address is not dialled, in a line that can be logged, or an empty text if it may be.

        Args:
            cluster_id: the cluster that is expected there; None if no cluster is.
        """
        rules = self._rules_for(host)
        if not rules:
            return f"{printable(host)} is not in peers"
        if any(_is_within(port, rule.ports) and _is_within(cluster_id, rule.cluster_ids) for rule in rules):
            return ""
        who = "" if cluster_id is None else f", cluster {cluster_id}"
        return f"port {port} of {printable(host)}{who} is not in peers"

    def _rules_for(self, host: str) -> list[PeerRule]:
        address = _as_address(host)
        if address is None:
            name = host.lower().rstrip(".")
            # A resolver takes "127.1" and "0x7f000001" for addresses. So only names match a rule, even "*".
            return [rule for rule, pattern in self._names if is_host_name(name) and pattern.fullmatch(name)]
        if address.is_unspecified:  # the kernel would dial this machine, whatever network was meant
            return []
        return [rule for rule, network in self._networks if address in network]

    def share_of(self, host: str) -> PeerRule | None:
        """Return the rule that allowed a name, or None if the name is listed without ``*``.

        The name counts among the rule's look-ups, because a client can invent names, but not rules.
        """
        rules = self._rules_for(host)
        return None if any("*" not in rule.host for rule in rules) else next(iter(rules), None)

    def check(self, host: str, port: int, cluster_id: int | None = None) -> None:
        """Raise NotAPeer if this address is not dialled."""
        why = self.why_not(host, port, cluster_id)
        if why:
            raise NotAPeer(f"offer refused: {why}", hint="Settings.peers lists the addresses that this engine dials")


LOOPBACK: Final = tuple(PeerRule(host=host) for host in ("127.0.0.0/8", "::1", "localhost"))


def _pattern(host: str) -> re.Pattern[str]:
    first, *others = map(re.escape, host.lower().rstrip(".").split("*"))
    if not others:
        return re.compile(first)
    *inner, last = others
    # Each star but the last takes as little as it can, and never more later: backtracking would take hours for ten stars.
    return re.compile("".join([first, *(f"(?>[^.]*?{part})" for part in inner), "[^.]*", last]))


def is_loopback(host: str) -> bool:
    """Return True if the host is this machine, whatever its network is."""
    return not Peers(LOOPBACK).why_not(host, 1)


def is_every_address(host: str) -> bool:
    """Return True for ``0.0.0.0`` and ``::``, on which a process listens, and which no process can dial."""
    address = _as_address(host)
    return address is not None and address.is_unspecified


def is_same_host(one: str, other: str) -> bool:
    """Return True for one address, or one name, however it is written. Nothing is looked up."""
    addresses = _as_address(one), _as_address(other)
    if addresses == (None, None):
        return one.lower().rstrip(".") == other.lower().rstrip(".")
    return addresses[0] == addresses[1]


def _as_address(host: str) -> IPv4Address | IPv6Address | None:
    """Return the address, or None for a name, and for an address with anything but a card's name behind it.

    An IPv4 address in IPv6 notation becomes the IPv4 address, to which the kernel sends as well.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if "%" in host and not is_address(host):
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_within(number: int | None, limits: tuple[int, int] | None) -> bool:
    return limits is None or number is None or limits[0] <= number <= limits[1]
