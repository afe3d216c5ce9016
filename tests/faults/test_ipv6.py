"""Two processes that are linked over ::1: channels, messages and heartbeats. As a program: the one that listens."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from aiodatadist import BlocksCacheKey, LLMClusterInfo, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from aiodatadist._testing.ports import free_port
from aiodatadist.testing import cluster_info, linked_pair, open_cluster, verify
from tests import children
from tests.faults.peer import DESC
from tests.test_pull import moved

BRISK = {"heartbeat_interval": 0.2, "heartbeat_misses": 4}


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")


@asynccontextmanager
async def listening_process() -> AsyncIterator[tuple[children.Process, LLMClusterInfo]]:
    """Run cluster 1 in its own process, on the same kind of loop."""
    process = await children.create_subprocess_exec(
        sys.executable, "-m", "tests.faults.test_ipv6", type(asyncio.get_running_loop()).__module__,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        info = LLMClusterInfo(1)
        info.append_local_ip_info("::1", 0)
        info.append_remote_ip_info("::1", int(await process.stdout.readline()))
        yield process, info
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_link_over_ipv6_moves_blocks_and_has_heartbeats() -> None:
    async with (
        listening_process() as (process, info),
        open_cluster(2, LLMRole.DECODER, device_id=1, listen_ip_info=None, **BRISK) as decoder,
    ):
        cache = await decoder.blocks(DESC)
        assert await decoder.datadist.link_clusters([info], 10_000) == (
            LLMStatusCode.LLM_SUCCESS,
            [LLMStatusCode.LLM_SUCCESS],
        )
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
        verify(decoder.memory(cache), cache, moved(DESC, {0: 3}))
        process.send_signal(signal.SIGSTOP)  # its connections stay: only the silence says it
        async with asyncio.timeout(20):
            reason = await decoder.datadist.wait_link_closed(1)
        assert "no heartbeat for" in str(reason)


async def test_a_cluster_that_listens_on_ipv6_says_so() -> None:
    port = free_port()
    async with open_cluster(1, listen_ip_info=f"[::1]:{port}") as cluster:
        assert cluster.datadist.listen_address == ("::1", port)
        assert repr(cluster_info(cluster)) == f"<LLMClusterInfo 1 at [::1]:{port}>"
        with pytest.raises(LLMException, match=rf"^init: \[::1\]:{port} is in use"):
            await LLMDataDist(LLMRole.MIX, 2, LLMConfig(listen=f"[::1]:{port}")).init()


@pytest.mark.parametrize(("everywhere", "host"), [("::", "127.0.0.1"), ("::", "::1"), ("0::0", "127.0.0.1")])
async def test_a_cluster_that_listens_on_all_addresses_takes_peers_of_both_families(
    everywhere: str, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "aiodatadist")
    async with (
        open_cluster(1, listen_ip_info=f"[{everywhere}]:0", auth_key="a secret of 16 bytes") as owner,
        open_cluster(2, device_id=1, auth_key="a secret of 16 bytes") as cluster,
    ):
        assert owner.datadist.listen_address is not None
        any_address, port = owner.datadist.listen_address
        assert any_address == everywhere
        info = LLMClusterInfo(1)
        info.append_remote_ip_info(host, port)
        status, _ = await cluster.datadist.link_clusters([info], 10_000)
        assert status is LLMStatusCode.LLM_SUCCESS
        with pytest.raises(LLMException, match=rf"^init: \[{everywhere}\]:{port} is in use"):
            await LLMDataDist(
                LLMRole.MIX, 3, LLMConfig(listen=f"[{everywhere}]:{port}", auth_key="a secret of 16 bytes")
            ).init()
    assert "::ffff:" not in caplog.text


async def test_a_machine_without_dual_stack_says_that_ipv4_peers_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    async with open_cluster(1, listen_ip_info="[::]:0", auth_key="a secret of 16 bytes"):
        pass
    assert "peers with IPv4 addresses are refused" in caplog.text


async def test_both_modes_link_over_ipv6() -> None:
    for one_sided in (True, False):
        async with linked_pair(DESC, listen_ip_info="[::1]:0", enable_remote_cache_accessible=one_sided) as pair:
            _, decoder, _, cache = pair
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [5], [1])
            verify(decoder.memory(cache), cache, moved(DESC, {1: 5}))


async def test_a_log_line_shows_an_address_that_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    info = LLMClusterInfo(1)
    info.append_remote_ip_info("::1", 1)
    async with open_cluster(2) as cluster:
        status, _ = await cluster.datadist.link_clusters([info], 5000)
    assert status is LLMStatusCode.LLM_LINK_FAILED
    assert "at [::1]:1: " in caplog.text


async def listen() -> None:
    async with open_cluster(1, LLMRole.PROMPT, listen_ip_info="[::1]:0", **BRISK) as cluster:
        await cluster.blocks(DESC)
        assert cluster.datadist.listen_address is not None
        print(cluster.datadist.listen_address[1], flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    os.environ.setdefault("AIODATADIST_RUNTIME", "soft")
    factory = uvloop.new_event_loop if sys.argv[1].startswith("uvloop") else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(listen())
