"""A peer may be named by its host. The name is looked up for each link, so a peer may move."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

import anyio
import pytest

from aiodatadist import LinkError, LinkPhase, LLMClusterInfo, LLMStatusCode
from aiodatadist.cluster import dial, host_names
from aiodatadist.link import connected
from aiodatadist.testing import Cluster, open_cluster
from tests.test_relink import QUICK, cut, until

pytestmark = pytest.mark.timeout(60)

NAME = "prefill-0.prefill"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that the name service knows of every name; none: it knows no name."""
    addresses: list[str] = []

    async def look_up(host: str, port: int | None, **_: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = {4: socket.AF_INET, 6: socket.AF_INET6}
        return [
            (families[ipaddress.ip_address(each).version], socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses
        ]

    monkeypatch.setattr(host_names, "getaddrinfo", look_up)
    return addresses


def named(cluster: Cluster, name: str = NAME) -> LLMClusterInfo:
    """Its port at a host of this name."""
    assert cluster.datadist.listen_address is not None
    info = LLMClusterInfo(cluster.datadist.cluster_id)
    info.append_remote_ip_info(name, cluster.datadist.listen_address[1])
    return info


async def test_a_peer_is_reached_by_the_name_of_its_host() -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt, "localhost")])
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        await decoder.datadist.check_link_status(1)


async def test_heartbeats_go_where_the_link_goes(known: list[str]) -> None:
    """The first address of the name takes no connection. Without heartbeats the link would not be made."""
    known += ["127.0.0.9", "127.0.0.1"]
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt)])
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors


async def test_an_address_that_does_not_answer_holds_up_the_next_one_no_longer_than_said(
    known: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known += ["127.0.0.9", "127.0.0.1"]
    silent = list[str]()

    async def connect(host: str, port: int, first: bytes = b"") -> socket.socket:
        if host == "127.0.0.9":
            silent.append(host)
            await anyio.sleep_forever()
        return await connected(host, port, first)

    monkeypatch.setattr("aiodatadist.cluster.dial.connected", connect)
    monkeypatch.setattr(dial, "ONE_OF_MANY_SECONDS", 0.05)
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt)])
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        assert silent == ["127.0.0.9"]


async def test_where_no_address_takes_a_connection_each_is_told(known: list[str]) -> None:
    known += ["127.0.0.8", "127.0.0.9", "127.0.0.8"]
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt)])
        (error,) = linked.errors
        assert isinstance(error, LinkError)
        assert f"no cluster can be reached at {NAME}:" in str(error)
        assert str(error).count("127.0.0.8: ") == str(error).count("127.0.0.9: ") == 1


async def test_a_name_that_is_not_found_is_named(known: list[str]) -> None:
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt)])
        told = str(linked.errors[0])
        assert f"{NAME}:" in told
        assert "the host name is not found: Name or service not known" in told


async def test_a_link_is_made_again_where_the_name_leads_by_then(known: list[str]) -> None:
    """As of a pod that has been started again elsewhere."""
    known.append("127.0.0.1")
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1, relink=QUICK) as decoder:
        linked = await decoder.datadist.link_clusters([named(prompt)])
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        engine, (_, port) = prompt.datadist._running(), prompt.datadist.listen_address or ("", 0)
        changes = decoder.datadist.link_changes()
        await engine.listen_elsewhere(("127.0.0.2", port))
        known[:] = ["127.0.0.2"]
        await cut(prompt)
        told = await until(changes, LinkPhase.LOST)
        told += await until(changes, LinkPhase.LINKED)
        assert told[-1].generation == 2


async def test_another_cluster_at_a_name_is_not_the_end_of_it(known: list[str]) -> None:
    """The name service may be behind: another pod has the address by now."""
    known.append("127.0.0.1")
    async with (
        open_cluster(1) as prompt,
        open_cluster(2, device_id=1, relink=QUICK) as decoder,
        open_cluster(3, device_id=2) as other,
    ):
        linked = await decoder.datadist.link_clusters([named(prompt)])
        assert linked.status is LLMStatusCode.LLM_SUCCESS, linked.errors
        _, port = prompt.datadist.listen_address or ("", 0)
        changes = decoder.datadist.link_changes()
        await prompt.datadist._running().listen_elsewhere(("127.0.0.2", port))
        await other.datadist._running().listen_elsewhere(("127.0.0.1", port))
        await cut(prompt)
        while "3 answered" not in str((await until(changes, LinkPhase.RELINKING))[-1].reason):
            pass
        known[:] = ["127.0.0.2"]
        assert (await until(changes, LinkPhase.LINKED, LinkPhase.GIVEN_UP))[-1].generation == 2


async def test_giving_up_while_a_name_is_looked_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def look_up(*_: Any, **__: Any) -> list[Any]:
        asked.set()
        await anyio.sleep_forever()
        return []

    monkeypatch.setattr(host_names, "getaddrinfo", look_up)
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        linking = asyncio.ensure_future(decoder.datadist.link_clusters([named(prompt)]))
        await asked.wait()
        linking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await linking
        linked = await decoder.datadist.link_clusters([named(prompt)], 50)
        assert linked.status is LLMStatusCode.LLM_TIMEOUT
