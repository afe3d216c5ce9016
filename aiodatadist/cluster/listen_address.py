"""Where a cluster listens: an address, also where its configuration has the name of a host."""

from __future__ import annotations

import ipaddress

from aiodatadist.cluster.host_names import HostNames
from aiodatadist.config.llm_config import LLMConfig
from aiodatadist.errors import ParamInvalid, explained
from aiodatadist.values.addresses import is_address


async def find_listen_address(config: LLMConfig) -> tuple[str, int] | None:
    """An IP address and the port; None: the cluster does not listen. A name is looked up, and stands for the first IPv4
    address that it has, or else for its first.

    Raises:
        ParamInvalid: ``listen_ip_info`` is no address, or a name that is not found, or on a network without ``auth_key``.
    """
    address = config.listen_address
    if address is None:
        return None
    host, port = address
    if not is_address(host):
        host = await _address_of(host, config)
        config.check_listening_on(ipaddress.ip_address(host))
    return host, port


async def _address_of(name: str, config: LLMConfig) -> str:
    try:
        return (await HostNames().addresses_of(name))[0]
    except OSError as error:
        raise ParamInvalid(
            f"listen_ip_info is {config.listen_ip_info!r}: the host name {name!r} is not found: {explained(error)}",
            hint="give the address of a network card of this machine instead",
        ) from error
