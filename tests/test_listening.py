"""A cluster listens where its configuration says, also if that is the name of a host; peers are told an address."""

from __future__ import annotations

import ipaddress

import pytest

from aiodatadist import LLMConfig, LLMRole, ParamInvalid
from aiodatadist._cluster import host_names
from aiodatadist._cluster.listen_address import find_listen_address
from aiodatadist.testing import cluster_info, open_cluster
from tests.test_host_names import answer

KEY = b"a secret of both ends"


def answers(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let the name service give these addresses for every name, in this order."""

    monkeypatch.setattr(host_names, "getaddrinfo", lambda *_, **__: answer(list(addresses)))


async def test_peers_link_to_the_address_of_a_name() -> None:
    async with open_cluster(1, listen_ip_info="localhost:0") as owner, open_cluster(2, device_id=1) as other:
        assert owner.datadist.listen_address is not None
        host, port = owner.datadist.listen_address
        assert ipaddress.ip_address(host).is_loopback
        assert port
        status, _ = await other.datadist.link_clusters([cluster_info(owner)])
        assert status.name == "LLM_SUCCESS"


async def test_name_that_is_not_found_is_named() -> None:
    with pytest.raises(
        ParamInvalid, match=r"listen_ip_info is 'no-such-host.invalid:0': the host name 'no-such-host.invalid' is"
    ):
        async with open_cluster(1, listen_ip_info="no-such-host.invalid:0"):
            pass


async def test_cluster_whose_new_name_is_not_found_goes_on_as_it_was() -> None:
    async with open_cluster(1) as cluster:
        before = cluster.datadist.listen_address
        with pytest.raises(ParamInvalid, match=r"the host name 'no-such-host.invalid' is not found"):
            await cluster.datadist.switch_role(LLMRole.DECODER, {"llm.listenIpInfo": "no-such-host.invalid:0"})
        assert cluster.datadist.listen_address == before
        await cluster.datadist.switch_role(LLMRole.DECODER, {"llm.listenIpInfo": "localhost:0"})
        assert cluster.datadist.listen_address not in (None, before)


async def test_name_of_a_network_address_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, "192.0.2.7")
    with pytest.raises(
        ParamInvalid, match=r"is 'node-7:26000', which is 192.0.2.7: listening on a network needs auth_key"
    ):
        await find_listen_address(LLMConfig(listen="node-7:26000"))
    assert await find_listen_address(LLMConfig(listen="node-7:26000", auth_key=KEY)) == ("192.0.2.7", 26000)


@pytest.mark.parametrize(
    ("known", "taken"),
    [(("::1", "127.0.0.2", "127.0.0.3"), "127.0.0.2"), (("::1",), "::1"), (("127.0.0.1", "::1"), "127.0.0.1")],
)
async def test_first_ipv4_address_is_taken_or_else_the_first(
    known: tuple[str, ...], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, *known)
    assert await find_listen_address(LLMConfig(listen="node-7:1")) == (taken, 1)


async def test_address_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, "127.0.0.9")
    assert await find_listen_address(LLMConfig(listen="127.0.0.1:1")) == ("127.0.0.1", 1)
    assert await find_listen_address(LLMConfig(listen="[::1]:1")) == ("::1", 1)
    assert await find_listen_address(LLMConfig()) is None
