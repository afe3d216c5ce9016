"""``link_to`` and ``unlink_from``: one peer, seconds, and the reason is raised; and milliseconds that look like seconds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiodatadist import (
    LinkError,
    LinkTimeout,
    LLMClusterInfo,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    ParamInvalid,
    blocking,
    legacy,
)
from aiodatadist._testing.ports import free_port
from aiodatadist.testing import Cluster, cluster_info, open_cluster


def address_of(cluster: Cluster) -> tuple[str, int]:
    address = cluster.datadist.listen_address
    assert address is not None
    return address


async def test_a_peer_is_linked_by_its_id_and_address_and_has_the_calls_of_its_link() -> None:
    async with open_cluster(1, device_id=0) as prompt, open_cluster(2, device_id=1) as decoder:
        host, port = address_of(prompt)
        peer = await decoder.datadist.link_to(1, f"{host}:{port}", timeout=5.0)
        assert (peer.cluster_id, peer.address, repr(peer)) == (1, (host, port), f"<Peer 1 at {host}:{port}>")
        await peer.check()
        await peer.notify(b"hello")
        assert (await anext(aiter(prompt.datadist.notifications()))).payload == b"hello"
        await peer.unlink()
        with pytest.raises(NotLinked):
            await peer.check()
        await decoder.datadist.unlink_from(1)  # nothing is linked: no effect
        again = await decoder.datadist.link_to(cluster_info(prompt), timeout=5)
        await prompt.datadist.wait_linked(2)
        why, _ = await asyncio.gather(again.wait_closed(), prompt.datadist.unlink_from(2, timeout=5))
        assert "unlink" in why


async def test_a_link_over_ipv6_in_one_line() -> None:
    async with (
        open_cluster(1, device_id=0, listen_ip_info="[::1]:0") as prompt,
        open_cluster(2, device_id=1) as decoder,
    ):
        peer = await decoder.datadist.link_to(1, f"[::1]:{address_of(prompt)[1]}", timeout=5)
        assert str(peer.address[0]) == "::1"
        results = await decoder.datadist.link_clusters([LLMClusterInfo(1, address_of(prompt))], 5000)
        assert results.status is LLMStatusCode.LLM_ALREADY_LINK


async def test_a_link_that_fails_raises_the_reason() -> None:
    async with open_cluster(1, device_id=0) as prompt, open_cluster(2, device_id=1) as decoder:
        with pytest.raises(LinkError, match="no cluster can be reached") as absent:
            await decoder.datadist.link_to(7, ("127.0.0.1", free_port()))
        assert absent.value.status_code is LLMStatusCode.LLM_LINK_FAILED
        with pytest.raises(LinkError, match="cluster 7"):
            await decoder.datadist.link_to(7, address_of(prompt))  # another one listens there
        await decoder.datadist.link_to(1, address_of(prompt), timeout=5)
        with pytest.raises(LinkError, match="linked already") as twice:
            await decoder.datadist.link_to(1, address_of(prompt))
        assert twice.value.status_code is LLMStatusCode.LLM_ALREADY_LINK


async def test_a_time_limit_is_in_seconds() -> None:
    async with open_cluster(1, device_id=0) as prompt, open_cluster(2, device_id=1) as decoder:
        with pytest.raises(LinkTimeout):
            await decoder.datadist.link_to(1, address_of(prompt), timeout=1e-9)


@pytest.mark.parametrize(
    ("peer", "address", "error"),
    [
        (1, None, TypeError),
        ("1", "127.0.0.1:1", TypeError),
        (-1, "127.0.0.1:1", ValueError),
        (1, "127.0.0.1", ParamInvalid),
        (1, "127.0.0.1:0", ParamInvalid),
        (1, ("127.0.0.1", 0), ParamInvalid),
        (1, ("127.0.0.1", 65536), ValueError),
        (1, ("127.0.0.1", "1"), TypeError),
        (1, ("1.2.3", 1), RuntimeError),
        (1, 26001, TypeError),
        (LLMClusterInfo(1), None, ParamInvalid),
        (LLMClusterInfo(1, ("127.0.0.1", 1)), "127.0.0.1:1", TypeError),
        (LLMClusterInfo(None, address=("127.0.0.1", 1)), None, TypeError),
    ],
)
async def test_wrong_peers_are_refused_before_anything_starts(peer: Any, address: Any, error: type[Exception]) -> None:
    async with open_cluster(2) as decoder:
        with pytest.raises(error):
            await decoder.datadist.link_to(peer, address)
        assert decoder.datadist.figures().linking.statuses == {}


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        ("1", TypeError),
        (None, TypeError),
        (True, TypeError),
        (0, ParamInvalid),
        (-1, ParamInvalid),
        (1e9, ParamInvalid),
    ],
)
async def test_wrong_time_limits_are_refused(timeout: Any, error: type[Exception]) -> None:
    async with open_cluster(2) as decoder:
        for call in (
            decoder.datadist.link_to(1, "127.0.0.1:1", timeout=timeout),
            decoder.datadist.unlink_from(1, timeout=timeout),
        ):
            with pytest.raises(error, match="timeout is"):
                await call


async def test_few_milliseconds_are_suspected_once(caplog: pytest.LogCaptureFixture) -> None:
    async with open_cluster(2) as decoder:
        nowhere = LLMClusterInfo(7, ("127.0.0.1", free_port()))
        await decoder.datadist.unlink_clusters([nowhere], 50)
        assert "milliseconds" not in caplog.text
        for _ in range(2):
            await decoder.datadist.link_clusters([nowhere], 5)
            await decoder.datadist.unlink_clusters([nowhere], 49)
    told = [record.getMessage() for record in caplog.records if "milliseconds" in record.getMessage()]
    assert told == [
        "cluster 2: timeout of link_clusters() is 5, which is 5 ms: the vendor's time limits are in milliseconds; "
        "if 5 seconds are meant, pass 5000",
        "cluster 2: timeout of unlink_clusters() is 49, which is 49 ms: the vendor's time limits are in milliseconds; "
        "if 49 seconds are meant, pass 49000",
    ]


async def test_v1_links_one_peer_with_its_own_rules() -> None:
    config = legacy.LLMConfig(enable_cache_manager=False, listen="127.0.0.1:0")
    other = legacy.LLMConfig(enable_cache_manager=False, device_id=1)
    async with (
        legacy.LLMDataDist(LLMRole.PROMPT, 1, config) as prompt,
        legacy.LLMDataDist(LLMRole.DECODER, 2, other) as decoder,
    ):
        assert prompt.listen_address is not None
        with pytest.raises(ParamInvalid, match="DECODER"):
            await prompt.link_to(2, "127.0.0.1:1")
        with pytest.raises(LinkError, match="no cluster can be reached"):
            await decoder.link_to(7, ("127.0.0.1", free_port()))
        peer = await decoder.link_to(1, prompt.listen_address, timeout=5)
        await peer.check()
        await peer.unlink()
        await decoder.unlink_from(1)


async def test_v1_suspects_milliseconds_and_not_seconds(caplog: pytest.LogCaptureFixture) -> None:
    config = legacy.LLMConfig(enable_cache_manager=False, listen="127.0.0.1:0")
    other = legacy.LLMConfig(enable_cache_manager=False, device_id=1)
    async with (
        legacy.LLMDataDist(LLMRole.PROMPT, 1, config) as prompt,
        legacy.LLMDataDist(LLMRole.DECODER, 2, other) as decoder,
    ):
        assert prompt.listen_address is not None
        await decoder.link_to(1, prompt.listen_address, timeout=5)
        await decoder.unlink_from(1, timeout=0.049, force=True)
        assert "milliseconds" not in caplog.text
        await decoder.unlink_clusters([LLMClusterInfo(1, prompt.listen_address)], 49)
        assert "timeout of unlink_clusters() is 49" in caplog.text


def test_without_await_the_reason_is_raised_as_well() -> None:
    prompt, decoder = blocking.LLMDataDist(LLMRole.MIX, 1), blocking.LLMDataDist(LLMRole.MIX, 2)
    try:
        prompt.init(blocking.LLMConfig(listen="127.0.0.1:0", enable_cache_manager=True))
        decoder.init(blocking.LLMConfig(enable_cache_manager=True, device_id=1))
        assert prompt.listen_address is not None
        with pytest.raises(LinkError, match="no cluster can be reached"):
            decoder.link_to(7, ("127.0.0.1", free_port()))
        decoder.link_to(1, prompt.listen_address, timeout=5)
        decoder.check_link_status(1)
        decoder.unlink_from(1)
        with pytest.raises(NotLinked):
            decoder.check_link_status(1)
    finally:
        decoder.finalize()
        prompt.finalize()
