"""Blocking calls do what the awaitable ones do, and fail as they do."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest

import aiodatadist
from aiodatadist._testing.views import inner_of, shared_thread
from aiodatadist.blocking import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LeaseEnd,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    RegisterMemStatus,
)
from tests import children
from tests.blocking.pairs import DESC, KEY, Pair, cluster, linked_pair, options

POOL = '{"memory_size": 4194304, "page_shift": 12}'
SLOTS = CacheDesc(2, [3, 2500], DataType.DT_UINT8)


@pytest.mark.parametrize("one_sided", [True, False])
def test_blocks_are_pulled(one_sided: bool) -> None:
    with linked_pair(enable_remote_cache_accessible=one_sided) as pair:
        returned = pair.target.manager.pull_blocks(KEY, pair.target.cache, [3, 4, 9], [0, 1, 7])
        assert returned is None
        pair.target.check({0: (0, 3), 1: (0, 4), 7: (0, 9)})
        pair.source.check({})


def test_blocks_are_pushed_copied_and_swapped(pair: Pair) -> None:
    source, target = pair.source, pair.target
    source.manager.push_blocks(BlocksCacheKey(2), source.cache, [5], [2])
    target.manager.copy_blocks(target.cache, {2: [3, 4]})
    target.check({2: (0, 5), 3: (0, 5), 4: (0, 5)})


def test_slots_are_allocated_pulled_and_given_back() -> None:
    with linked_pair(mem_pool_cfg=POOL, enable_remote_cache_accessible=False) as pair:
        theirs = pair.source.manager.allocate_cache(SLOTS, [CacheKey(1, 5)])
        mine = pair.target.manager.allocate_cache(SLOTS)
        for t, array in enumerate(pair.source.manager.arrays(theirs)):
            array[0] = 7 + t
        del array
        pair.target.manager.pull_cache(CacheKey(1, 5), mine, 2)
        arrays = pair.target.manager.arrays(mine)
        assert [set(array[2].tolist()) for array in arrays] == [{7}, {8}]
        del arrays
        with pytest.raises(LLMException) as caught:
            pair.target.manager.pull_cache(CacheKey(1, 5), mine, 2)  # it was consumed
        assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        pair.target.manager.deallocate_cache(mine)
        pair.source.manager.deallocate_cache(theirs)
        assert {usage.free == usage.total for usage in pair.source.manager.pool_usage().values()} == {True}


def test_notifications_are_taken_one_by_one_and_within_a_time(pair: Pair) -> None:
    assert pair.source.datadist.next_notification(0) is None
    pair.target.manager.pull_blocks(KEY, pair.target.cache, [1], [1], notify=b"request 7")
    note = pair.source.datadist.next_notification(5)
    assert note is not None
    assert (note.cluster_id, note.payload) == (2, b"request 7")
    pair.source.datadist.notify(2, b"thanks")
    assert pair.target.datadist.next_notification(5) == aiodatadist.Notification(1, b"thanks")


def test_blocks_are_kept_until_a_peer_has_them(pair: Pair) -> None:
    lease = pair.source.manager.lease_blocks(pair.source.cache, [3, 9], 60)
    assert lease.wait_ended(0) is None
    pair.target.manager.pull_leased(lease.ticket().model_dump(mode="json"), pair.target.cache, [0, 1])
    pair.target.check({0: (0, 3), 1: (0, 9)})
    assert lease.wait_ended(5) is lease.ended is LeaseEnd.TAKEN
    other = pair.source.manager.lease_blocks(pair.source.cache, [4], 60)
    pair.target.manager.release_lease(other.ticket())
    assert other.wait_ended(5) is LeaseEnd.RELEASED
    assert pair.source.manager.lease_blocks(pair.source.cache, [4], 60).withdraw() is LeaseEnd.WITHDRAWN


def table() -> str:
    devices = [{"device_id": str(i), "device_ip": f"10.0.0.{i}", "rank_id": str(i)} for i in range(2)]
    servers = [{"server_id": "10.0.0.1", "device": devices}]
    return json.dumps({"version": "1.0", "server_count": "1", "status": "completed", "server_list": servers})


def test_two_that_do_not_listen_link_from_two_threads() -> None:
    with cluster(1, 0) as one, cluster(2, 100) as two, ThreadPoolExecutor(2) as pool:
        links = [pool.submit(each.datadist.link, "pair", {1: 0, 2: 1}, table()) for each in (one, two)]
        assert [link.result() for link in links] == [1, 1]
        assert two.datadist.wait_register_mem_status(1) is RegisterMemStatus.OK
        assert two.datadist.query_register_mem_status(1) is RegisterMemStatus.OK
        two.manager.pull_blocks(KEY, two.cache, [3], [0])
        two.check({0: (0, 3)})
        two.datadist.unlink(1)


# ---- failures ----

Wrong = Callable[[Any, Cache, CacheDesc], Any]


def info(cluster_id: Any) -> LLMClusterInfo:
    peer = LLMClusterInfo()
    if cluster_id is not None:
        peer.remote_cluster_id = cluster_id
    return peer


def key(cluster_id: int, cache_id: int) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(cluster_id, cache_id)


WRONG: dict[str, Wrong] = {
    "not linked": lambda d, c, _: d.cache_manager.pull_blocks(BlocksCacheKey(3), c, [1], [1]),
    "no such cache there": lambda d, c, _: d.cache_manager.pull_blocks(BlocksCacheKey(1, 5), c, [1], [1]),
    "no such cache by id": lambda d, c, _: d.cache_manager.push_blocks(key(1, 99), c, [1], [1]),
    "itself": lambda d, c, _: d.cache_manager.pull_blocks(BlocksCacheKey(2), c, [1], [1]),
    "block too high here": lambda d, c, _: d.cache_manager.pull_blocks(KEY, c, [1], [16]),
    "block too high there": lambda d, c, _: d.cache_manager.pull_blocks(KEY, c, [16], [1]),
    "unequal": lambda d, c, _: d.cache_manager.pull_blocks(KEY, c, [1, 2], [1]),
    "negative": lambda d, c, _: d.cache_manager.pull_blocks(KEY, c, [-1], [1]),
    "not a cache": lambda d, _, __: d.cache_manager.pull_blocks(KEY, None, [1], [1]),
    "unknown word": lambda d, c, _: d.cache_manager.pull_blocks(KEY, c, [1], [1], speed=3),
    "layers": lambda d, c, _: d.cache_manager.pull_blocks(KEY, c, [1], [1], src_layer_range=range(3)),
    "contiguous": lambda d, c, _: d.cache_manager.pull_cache(CacheKey(1, 1), c),
    "push_cache of blocks": lambda d, c, _: d.cache_manager.push_cache(key(1, 1), c),
    "no pool": lambda d, _, desc: d.cache_manager.allocate_cache(desc),
    "no addresses": lambda d, _, desc: d.cache_manager.register_cache(desc, []),
    "registered key": lambda d, c, desc: d.cache_manager.register_blocks_cache(desc, c.tensor_addrs, BlocksCacheKey(2)),
    "linked still": lambda d, c, _: d.cache_manager.unregister_cache(c.cache_id),
    "no pairs": lambda d, c, _: d.cache_manager.copy_blocks(c, {}),
    "one place": lambda d, c, _: d.cache_manager.swap_blocks(c, c, {1: 1}),
    "no synchronizer": lambda d, c, _: d.cache_manager.transfer_cache_async(c, None, []),
    "cache_key": lambda d, _, __: d.cache_manager.check_cache_key(CacheKey(1, 2**64 - 1)),
    "remap": lambda d, _, __: d.cache_manager.remap_registered_memory([1]),
    "timeout": lambda d, _, __: d.link_clusters([info(3)], 0),
    "timeout of text": lambda d, _, __: d.link_clusters([info(3)], "1"),
    "no id": lambda d, _, __: d.unlink_clusters([info(None)]),
    "unknown comm": lambda d, _, __: d.query_register_mem_status(7),
    "comm out of range": lambda d, _, __: d.unlink(-1),
    "role": lambda d, _, __: d.switch_role("PROMPT"),
    "role while linked": lambda d, _, __: d.switch_role(LLMRole.PROMPT),
    "no peer to check": lambda d, _, __: d.check_link_status(9),
}


def failure_of(call: Callable[[], Any]) -> tuple[type[BaseException], object, str]:
    try:
        call()
    except Exception as error:
        return type(error), getattr(error, "status_code", None), str(error)
    raise AssertionError("it did not fail")


async def awaited(wrong: Wrong, datadist: Any, cache: Cache) -> None:
    result = wrong(datadist, cache, DESC)
    if isawaitable(result):
        await result


async def awaitable_failures() -> dict[str, Any]:
    from aiodatadist.testing import linked_pair as awaitable_pair  # noqa: PLC0415

    found = {}
    async with awaitable_pair(DESC) as (_, decoder, _, cache):
        for name, wrong in WRONG.items():
            try:
                await awaited(wrong, decoder.datadist, cache)
            except Exception as error:
                found[name] = (type(error), getattr(error, "status_code", None), str(error))
    return found


@pytest.fixture
def theirs() -> dict[str, Any]:
    """Return the failures of awaitable clusters with the ids of the pair's, which therefore come after them."""
    return asyncio.run(awaitable_failures())


def test_every_failure_is_the_awaitable_one(theirs: dict[str, Any], pair: Pair) -> None:
    mine = {}
    for name, wrong in WRONG.items():
        mine[name] = failure_of(lambda wrong=wrong: wrong(pair.target.datadist, pair.target.cache, DESC))  # type: ignore[misc]
    assert mine.keys() == theirs.keys()
    for name, what in mine.items():
        assert what[:2] == theirs[name][:2], name
        assert name in {"unknown word", "linked still"} or what[2] == theirs[name][2]
    pair.target.manager.pull_blocks(KEY, pair.target.cache, [3], [0])
    pair.target.check({0: (0, 3)})


def test_statuses_are_returned_not_raised() -> None:
    with cluster(2, 0) as alone:
        absent = info(1)
        absent.append_remote_ip_info("127.0.0.1", 1)
        failed = LLMStatusCode.LLM_LINK_FAILED
        assert alone.datadist.link_clusters([absent], 1000) == (failed, [failed])
        assert alone.datadist.link_clusters([]) == (LLMStatusCode.LLM_PARAM_INVALID, [])


# ---- modes and options ----


@pytest.mark.parametrize(
    ("given", "modes"),
    [
        ({"llm.EnableCacheManager": "1"}, (True, False)),
        ({"llm.enablecachemanager": "1", "llm.EnableRemoteCacheAccessible": "1"}, (True, True)),
        ({"llm.LocalCommRes": ""}, (True, True)),
        ({"llm.EnableCacheManager": "1", "llm.LocalCommRes": "", "llm.EnableRemoteCacheAccessible": "0"}, (True, False)),
    ],
)  # fmt: skip
def test_a_mode_that_is_absent_is_off_unless_something_needs_it(
    given: dict[str, str], modes: tuple[bool, bool]
) -> None:
    datadist = LLMDataDist(LLMRole.PROMPT, 1)
    datadist.init(dict(given))
    try:
        config = inner_of(datadist).config
        assert (config.enable_cache_manager, config.enable_remote_cache_accessible) == modes
    finally:
        datadist.finalize()


def test_a_key_for_listening_on_a_network_comes_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"a secret of both\n")
    listening = options(listen_ip_info="0.0.0.0:0")
    datadist = LLMDataDist(LLMRole.PROMPT, 1)
    with pytest.raises(LLMException, match="auth_key"):
        datadist.init(listening)
    monkeypatch.setenv("AIODATADIST_AUTH_KEY_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(LLMException, match="cannot be read"):
        datadist.init(listening)
    monkeypatch.setenv("AIODATADIST_AUTH_KEY_FILE", str(file))
    file.chmod(0o604)
    with pytest.raises(LLMException, match="mode 0604: users outside its group must not be able to read it"):
        datadist.init(listening)
    file.chmod(0o600)
    datadist.init(listening)
    assert datadist.listen_address is not None
    datadist.finalize()


def test_init_refuses_what_is_wrong_and_starts_nothing() -> None:
    datadist = LLMDataDist(LLMRole.PROMPT, 1)
    mistakes: list[tuple[Any, type[Exception]]] = [
        (None, TypeError),
        ({"llm.EnableCacheManager": 1}, TypeError),
        ({**options(), "llm.SyncKvCacheWaitTime": "abc"}, LLMException),
        ({**options(), "ge.exec.deviceId": "99", "ge.session_device_id": "99"}, LLMException),
        ({}, LLMException),
    ]
    for wrong, kind in mistakes:
        with pytest.raises(kind):
            datadist.init(wrong)
        assert shared_thread() is None
    with pytest.raises(RuntimeError, match="not initialised"):
        _ = datadist.cache_manager
    with pytest.raises(RuntimeError, match="not initialised"):
        datadist.link_clusters([])
    datadist.finalize()
    datadist.init(LLMConfig(enable_cache_manager=True))
    datadist.init(LLMConfig(enable_cache_manager=True))
    with pytest.raises(LLMException, match="nonsense"):
        datadist.init({"nonsense": "is looked at by a second call, too"})
    datadist.finalize()
    datadist.finalize()


def test_a_process_that_never_finalizes_ends_quietly() -> None:
    text = """
from aiodatadist.blocking import *
datadist = LLMDataDist(LLMRole.PROMPT, 1)
config = LLMConfig(enable_cache_manager=True, listen_ip_info="127.0.0.1:0")
datadist.init(config.generate_options())
print(datadist.check_link_status.__name__)
"""
    done = children.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=30)
    assert (done.stdout, done.stderr) == ("check_link_status\n", "")


def test_hixl_needs_the_cache_manager_and_implies_remote_access() -> None:
    hixl = {"ge.exec.deviceId": "0", "llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:0"}
    datadist = LLMDataDist(LLMRole.DECODER, 1)
    with pytest.raises(LLMException, match=r"llm\.EnableCacheManager is 0: with llm\.TransferBackend it must be 1"):
        datadist.init(hixl)
    datadist.init({**hixl, "llm.EnableCacheManager": "1"})
    try:
        assert inner_of(datadist).config.enable_remote_cache_accessible
    finally:
        datadist.finalize()


def test_with_hixl_unlinking_takes_no_address() -> None:
    datadist = LLMDataDist(LLMRole.DECODER, 1)
    datadist.init({**options(), "llm.listenIpInfo": "127.0.0.1:0", "llm.TransferBackend": "hixl"})
    try:
        unnamed, twice = info(2), info(3)
        for _ in range(2):
            twice.append_remote_ip_info("127.0.0.1", 1)
        ended = LLMStatusCode.LLM_SUCCESS
        assert datadist.unlink_clusters([unnamed, twice]) == (ended, [ended, ended])
    finally:
        datadist.finalize()


def test_unlinking_takes_one_address_unless_it_is_forced() -> None:
    datadist = LLMDataDist(LLMRole.DECODER, 1)
    datadist.init(options())
    try:
        unnamed, named, twice = info(2), info(3), info(4)
        for each in (named, twice, twice):
            each.append_remote_ip_info("127.0.0.1", 1)
        refused, ended = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_SUCCESS
        found = datadist.unlink_clusters([unnamed, named, twice])
        assert found == (refused, [refused, ended, refused])
        assert datadist.unlink_clusters([unnamed, twice], 3000, True) == (ended, [ended, ended])
    finally:
        datadist.finalize()
