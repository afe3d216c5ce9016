"""The v1 interface from where no event loop is: every call says the rule, and the cluster goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aiodatadist import BlocksCacheKey, CacheKey, ForkError, LLMException, LLMRole
from aiodatadist.legacy import KvCache, LLMDataDist, LLMReq
from tests.legacy.pairs import BLOCKS, OK, SLOTS, Models, filled, info_of, models, options
from tests.off_loop import in_child, in_thread

KEY = CacheKey(1, 9)
Call = Callable[[], Any]


def calls_of(m: Models, source: KvCache, target: KvCache, blocks: KvCache) -> dict[str, Call]:
    """Return the calls that only the event loop may make, with valid arguments."""
    prompt, decoder, owner, puller = m.pair.prompt, m.pair.decoder, m.pair.owner, m.pair.puller
    request, prefix = LLMReq(77, 8, 1, 2), LLMReq(78, 8, 1, 2, 3)
    peer = info_of(prompt)
    return {
        "switch_role": lambda: decoder.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"}),
        "link_clusters": lambda: decoder.link_clusters([peer]),
        "unlink_clusters": lambda: decoder.unlink_clusters([peer]),
        "link_to": lambda: decoder.link_to(peer),
        "unlink_from": lambda: decoder.unlink_from(1),
        "check_link_status": lambda: decoder.check_link_status(1),
        "wait_linked": lambda: prompt.wait_linked(2),
        "add_model": lambda: decoder.add_model(options(), m.reader),
        "complete_request": lambda: decoder.complete_request(request),
        "notify": lambda: decoder.notify(1, b"x"),
        "notifications": decoder.notifications,
        "allocate_cache": lambda: puller.allocate_cache(SLOTS),
        "allocate_blocks_cache": lambda: puller.allocate_blocks_cache(BLOCKS),
        "deallocate_cache": lambda: puller.deallocate_cache(target),
        "remove_cache_key": lambda: owner.remove_cache_key(KEY),
        "pull_cache": lambda: puller.pull_cache(KEY, target),
        "pull_blocks": lambda: puller.pull_blocks(BlocksCacheKey(1), blocks, [0], [1]),
        "copy_cache": lambda: puller.copy_cache(target, target, 0, 1),
        "copy_blocks": lambda: puller.copy_blocks(blocks, {0: [1]}),
        "get_cache_tensors": lambda: puller.get_cache_tensors(target, 0),
        "predict": lambda: m.prompt.predict([request], [(0, 0, [1.0])]),
        "preload_prompt_prefix": lambda: m.prompt.preload_prompt_prefix(prefix, [(0, 0, [1.0])]),
        "release_prompt_prefix": lambda: m.prompt.release_prompt_prefix(prefix),
        "pull_kv": lambda: m.decoder.pull_kv(request),
        "merge_kv": lambda: m.decoder.merge_kv(request, 0),
    }


async def check_all_goes_on(m: Models, target: KvCache) -> None:
    request = LLMReq(77, 8, 1, 2)
    await m.pair.puller.pull_cache(KEY, target)
    await m.prompt.predict([request], [(0, 0, [1.0, 2.0])])
    await m.decoder.pull_kv(request)
    await m.decoder.merge_kv(request, 0)
    assert m.slot(0)[:2] == [1.0, 2.0]
    assert await m.pair.decoder.unlink_clusters([info_of(m.pair.prompt)]) == (OK, [OK])


async def test_a_thread_without_a_loop_is_told_the_rule() -> None:
    async with models() as m:
        source, target = await filled(m.pair.owner, [KEY]), await m.pair.puller.allocate_cache(SLOTS)
        calls = calls_of(m, source, target, await m.pair.puller.allocate_blocks_cache(BLOCKS))
        calls["finalize"] = m.pair.decoder.finalize
        calls["init"] = lambda: LLMDataDist(LLMRole.DECODER, 9).init()
        for name, error in zip(calls, await in_thread(list(calls.values())), strict=True):
            assert error, f"{name} was carried out"
            assert issubclass(error[0], LLMException), (name, error)
            assert "no event loop runs in this thread: cluster" in error[1], (name, error)
        await check_all_goes_on(m, target)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_is_told_the_rule() -> None:
    async with models() as m:
        source, target = await filled(m.pair.owner, [KEY]), await m.pair.puller.allocate_cache(SLOTS)
        calls = calls_of(m, source, target, await m.pair.puller.allocate_blocks_cache(BLOCKS))
        calls["init"] = m.pair.decoder.init
        calls["init on a loop"] = lambda: asyncio.Runner().run(m.pair.decoder.init())
        calls["kv_cache_manager"] = lambda: m.pair.decoder.kv_cache_manager
        for name, error in zip(calls, in_child(list(calls.values())), strict=True):
            assert error, f"{name} was carried out"
            assert issubclass(error[0], ForkError), (name, error)
            assert "initialised before a fork" in error[1], (name, error)
        assert in_child([m.pair.decoder.finalize]) == [None], "the cluster is the parent's"
        await check_all_goes_on(m, target)
