"""The address at which a cluster listens, also if its configuration names a host."""

from __future__ import annotations

import ipaddress

from aiodatadist._cluster.host_names import HostNames
from aiodatadist._config.llm_config import LLMConfig, check_listening_on
from aiodatadist._values.addresses import is_address
from aiodatadist.errors import ParamInvalid, explained


async def find_listen_address(config: LLMConfig) -> tuple[str, int] | None:
    """Return the IP address and port to listen on; None if the cluster does not listen.

    A host name is looked up, and stands for its first IPv4 address, or else for its first address.

    Raises:
        ParamInvalid: if ``listen_ip_info`` is not an address, a name that is not found, or on a network without a key.
    """
    address = config.listen_address
    if address is None:
        return None
    host, port = address
    if not is_address(host):
        host = await _address_of(host, config)
        check_listening_on(config, ipaddress.ip_address(host))
    return host, port


async def _address_of(name: str, config: LLMConfig) -> str:
    try:
        return (await HostNames().addresses_of(name))[0]
    except OSError as error:
        raise ParamInvalid(
            f"listen_ip_info is {config.listen_ip_info!r}: the host name {name!r} is not found: {explained(error)}",
            hint="give the address of a network card of this machine instead",
        ) from error
