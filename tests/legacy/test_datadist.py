"""LLMDataDist in the KvCacheManager mode: which mode it is, who may link, and what links say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio.lowlevel
import pytest

import aiodatadist
from aiodatadist import CacheKey, FeatureNotEnabled, LLMClusterInfo, LLMRole, LLMStatusCode, ParamInvalid
from aiodatadist._testing.views import cut_link
from aiodatadist.legacy import KvCacheManager, LLMConfig, LLMDataDist, LLMReq, ModelRunner
from aiodatadist.testing import inside
from tests.legacy.pairs import OK, POOL, SLOTS, filled, info_of, locks_of, open_one, options, pair
from tests.legacy.test_kv_cache_manager import refused

S = LLMStatusCode


def absent(cluster_id: int) -> LLMClusterInfo:
    info = LLMClusterInfo(cluster_id)
    info.append_remote_ip_info("127.0.0.1", 1)
    return info


# ---- modes ----


@pytest.mark.parametrize("extra", [{}, {"llm.EnableCacheManager": "0"}, {"llm.EnableRemoteCacheAccessible": "1"}])
async def test_without_its_option_there_is_a_kv_cache_manager_and_no_other(extra: dict[str, str]) -> None:
    datadist = LLMDataDist(LLMRole.DECODER, 2)
    with pytest.raises(RuntimeError, match="not initialised"):
        _ = datadist.kv_cache_manager
    await datadist.init({"ge.flowGraphMemMaxSize": "1048576", **extra})
    try:
        assert isinstance(datadist.kv_cache_manager, KvCacheManager)
        await datadist.init({"ge.flowGraphMemMaxSize": "1048576", **extra})  # a second time it does nothing
        calls: dict[str, Callable[[], Any]] = {
            "cache_manager": lambda: datadist.cache_manager,
            "link": lambda: datadist.link("x", {1: 0, 2: 1}, "{}"),
            "unlink": lambda: datadist.unlink(1),
            "query_register_mem_status": lambda: datadist.query_register_mem_status(1),
            "wait_register_mem_status": lambda: datadist.wait_register_mem_status(1),
        }
        for what, call in calls.items():
            await refused(call, S.LLM_PARAM_INVALID, f"{what} belongs to the CacheManager mode")
    finally:
        await datadist.finalize()
        await datadist.finalize()


@pytest.mark.parametrize("extra", [{"llm.EnableCacheManager": "1"}, {"llm.LocalCommRes": ""}])
async def test_with_its_option_it_is_the_front_doors(extra: dict[str, str]) -> None:
    datadist = LLMDataDist(LLMRole.DECODER, 2)
    await datadist.init(extra)
    try:
        assert isinstance(datadist.cache_manager, aiodatadist.CacheManager)
        assert await datadist.link_clusters([]) == (S.LLM_PARAM_INVALID, [])
        assert await datadist.unlink_clusters([absent(8)]) == (OK, [OK])
        calls: dict[str, Callable[[], Any]] = {
            "kv_cache_manager": lambda: datadist.kv_cache_manager,
            "add_model": lambda: datadist.add_model({}, ModelRunner()),
            "complete_request": lambda: datadist.complete_request(LLMReq(1)),
            "check_capacity": lambda: datadist.check_capacity(1),
        }
        for what, call in calls.items():
            await refused(call, S.LLM_PARAM_INVALID, f"{what} belongs to the KvCacheManager mode")
        await refused(lambda: datadist.check_link_status(8), S.LLM_NOT_YET_LINK)
    finally:
        await datadist.finalize()


def test_options_of_v1_begin_with_both_modes_off() -> None:
    made = LLMConfig().generate_options()
    assert (made["llm.EnableCacheManager"], made["llm.EnableRemoteCacheAccessible"]) == ("0", "0")
    assert not LLMConfig.from_options({}).enable_cache_manager
    both = LLMConfig.from_options({"llm.LocalCommRes": ""})
    assert both.enable_cache_manager
    assert both.enable_remote_cache_accessible
    with pytest.raises(ParamInvalid, match=r"llm\.EnableCacheManager is 0: with llm\.LocalCommRes"):
        LLMConfig.from_options({"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"})
    with pytest.raises(TypeError):
        LLMConfig.from_options([("llm.LocalCommRes", "")])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "pool"),
    [
        ({"ge_options": {"ge.flowGraphMemMaxSize": "1048576"}, "mem_utilization": 0.5}, 524288),
        ({"buf_pool_cfg": '{"buf_pool_size": 65536}', "ge_options": POOL}, 65536),
        (
            {
                "buf_pool_cfg": '{"buf_cfg": [{"total_size": 2097152, "blk_size": 256, "max_buf_size": 1024},'
                ' {"total_size": 4194304, "blk_size": 4096, "max_buf_size": 65536}]}'
            },
            6291456,
        ),
        ({"mem_pool_cfg": '{"memory_size": 131072}'}, 131072),
    ],
)
async def test_the_pool_is_as_large_as_the_options_say(given: dict[str, Any], pool: int) -> None:
    async with LLMDataDist(LLMRole.DECODER, 2, LLMConfig(**given)) as decoder:
        usage = decoder.kv_cache_manager.pool_usage()
        assert usage is not None
        assert usage.total == pool


@pytest.mark.parametrize(
    ("role", "given", "words"),
    [
        (LLMRole.PROMPT, {}, "listen_ip_info is not set: PROMPT must listen"),
        (LLMRole.DECODER, {"ge_options": {"ge.flowGraphMemMaxSize": "1000"}}, "the KV pool has 950 bytes"),
        (LLMRole.DECODER, {"transfer_backend": "hixl"}, "it needs enable_cache_manager"),
    ],
)
async def test_options_that_do_not_go_together_are_refused(role: LLMRole, given: dict[str, Any], words: str) -> None:
    datadist = LLMDataDist(role, 1, LLMConfig(**given))
    with pytest.raises(ParamInvalid, match=words):
        await datadist.init()


# ---- roles ----


async def test_a_role_is_switched_if_that_is_enabled_and_nothing_is_linked() -> None:
    where = {"llm.listenIpInfo": "127.0.0.1:0"}
    async with pair(enable_switch_role=True) as p:
        await refused(lambda: p.decoder.switch_role(LLMRole.DECODER), S.LLM_PARAM_INVALID, "has that role")
        await refused(lambda: p.decoder.switch_role(LLMRole.PROMPT), S.LLM_PARAM_INVALID, "PROMPT must listen")
        await refused(lambda: p.decoder.switch_role(LLMRole.PROMPT, where), S.LLM_EXIST_LINK)
        assert await p.decoder.unlink_clusters([info_of(p.prompt)]) == (OK, [OK])
        manager = p.decoder.kv_cache_manager
        await p.decoder.switch_role(LLMRole.PROMPT, where)
        await p.prompt.switch_role(LLMRole.DECODER)
        assert p.prompt.listen_address is None
        await filled(manager, [CacheKey(2, 7)])
        assert await p.prompt.link_clusters([info_of(p.decoder)], 5000) == (OK, [OK])
        await p.owner.pull_cache(CacheKey(2, 7), await p.owner.allocate_cache(SLOTS))
    async with open_one(LLMRole.DECODER, 2) as decoder:
        with pytest.raises(FeatureNotEnabled, match="enable_switch_role"):
            await decoder.switch_role(LLMRole.PROMPT, where)


async def test_a_mix_moves_nothing() -> None:
    async with open_one(LLMRole.MIX, 3) as mix:
        await mix.kv_cache_manager.allocate_cache(SLOTS)
        for call in (
            lambda: mix.link_clusters([absent(8)]),
            lambda: mix.kv_cache_manager.allocate_cache(SLOTS, [CacheKey(3, 1)]),
            lambda: mix.add_model(options(), ModelRunner()),
        ):
            await refused(call, S.LLM_PARAM_INVALID, "LLMRole.MIX")


# ---- links ----


async def test_a_link_call_says_what_became_of_each_cluster() -> None:
    async with open_one(LLMRole.PROMPT, 1) as prompt, open_one(LLMRole.DECODER, 2) as decoder:
        link, unlink = decoder.link_clusters, decoder.unlink_clusters
        assert await link([info_of(prompt), absent(8)]) == (S.LLM_LINK_FAILED, [OK, S.LLM_LINK_FAILED])
        await decoder.check_link_status(1)
        assert await link([info_of(prompt)]) == (S.LLM_LINK_FAILED, [S.LLM_ALREADY_LINK])
        for call in (link, unlink):
            assert await call([]) == (S.LLM_PARAM_INVALID, [])
            assert await call([absent(8), absent(8)]) == (S.LLM_REPEAT_REQUEST, [])
            assert await call([absent(i) for i in range(17)]) == (S.LLM_CLUSTER_NUM_EXCEED_LIMIT, [])
            with pytest.raises(ParamInvalid, match="timeout is 0"):
                await call([absent(8)], 0)
            with pytest.raises(TypeError):
                await call([None])  # type: ignore[list-item]
        assert await unlink([absent(8), info_of(prompt)]) == (OK, [S.LLM_NOT_YET_LINK, OK])
        await refused(lambda: decoder.check_link_status(1), S.LLM_NOT_YET_LINK)
        one, other = absent(8), absent(9)
        one.append_local_ip_info("127.0.0.1", 1)
        other.append_local_ip_info("127.0.0.2", 1)
        with pytest.raises(ParamInvalid, match="one list for all clusters"):
            await link([one, other])
        other = LLMClusterInfo(3)
        other.append_local_ip_info("::1", 1)
        with pytest.raises(ParamInvalid, match="one list for all clusters"):
            await link([one, other])


async def silent(decoder: LLMDataDist, hold: Callable[[LLMClusterInfo], Any]) -> None:
    """Call ``hold`` with a peer that accepts connections and says nothing."""
    writers: list[asyncio.StreamWriter] = []

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    info = LLMClusterInfo(8)
    info.append_remote_ip_info("127.0.0.1", server.sockets[0].getsockname()[1])
    await hold(info)
    for writer in writers:
        writer.close()
    server.close()
    await server.wait_closed()


async def test_a_link_call_beside_another_waits_as_long_as_it_may() -> None:
    async with open_one(LLMRole.PROMPT, 1) as prompt, open_one(LLMRole.DECODER, 2) as decoder:

        async def hold(info: LLMClusterInfo) -> None:
            first = asyncio.create_task(decoder.link_clusters([info], 400))
            await asyncio.sleep(0)
            assert await decoder.link_clusters([info_of(prompt)], 50) == (S.LLM_PROCESSING_LINK, [])
            assert await decoder.unlink_clusters([info_of(prompt)], 50) == (S.LLM_PROCESSING_LINK, [])
            assert await decoder.link_clusters([info_of(prompt)], 3000) == (OK, [OK])
            assert await first == (S.LLM_LINK_FAILED, [S.LLM_WAIT_PROCESS_TIMEOUT])

        await silent(decoder, hold)


async def test_a_peer_that_is_not_told_of_the_end_of_its_link_is_reported() -> None:
    async with pair() as p:
        leaving = asyncio.create_task(p.decoder.unlink_clusters([info_of(p.prompt)]))
        while p.decoder.statistics().links[0].state == "ready":
            await anyio.lowlevel.checkpoint()
        await cut_link(inside(p.prompt).links.find(2))
        status, each = await leaving
        assert (status, each) == (S.LLM_NOTIFY_PROMPT_UNLINK_FAILED, [S.LLM_NOTIFY_PROMPT_UNLINK_FAILED])
        assert await p.decoder.link_clusters([info_of(p.prompt)], 5000) == (OK, [OK])


async def test_a_link_is_ended_by_force_whatever_is_under_way() -> None:
    async with pair() as p:
        locks_of(p.puller).take([1], "something")
        assert await p.decoder.unlink_clusters([info_of(p.prompt)], force=True) == (OK, [OK])
        with pytest.raises(TypeError):
            await p.decoder.unlink_clusters([info_of(p.prompt)], force=1)  # type: ignore[arg-type]


@pytest.mark.autojump
async def test_a_peer_that_does_not_answer_is_v1s_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(sync_kv_timeout=100) as p:
        link = inside(p.prompt).links.find(2)
        monkeypatch.setattr(link.session, "post", lambda _: None)
        await refused(lambda: p.decoder.check_link_status(1), S.LLM_WAIT_PROCESS_TIMEOUT, r"within 0\.1 s")
        monkeypatch.undo()
        await p.decoder.check_link_status(1)
