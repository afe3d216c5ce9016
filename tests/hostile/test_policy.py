"""The rights of peers, as ``policy.json`` gives them: refusals at the end that owns the memory, whatever the peer asks."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aiodatadist import (
    AuthError,
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheNotFound,
    DataType,
    LeaseMismatch,
    LLMException,
    ParamInvalid,
    TransferPriority,
)
from aiodatadist._cluster.engine import Engine
from aiodatadist._link.transfers.running import RunningTransfers
from aiodatadist._wire.messages import Unclaim
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster, verify
from tests.keys import HEX, folder_of, policy_in
from tests.strict.marks import any_memory
from tests.test_pull import moved

KEY = f"decode {HEX}"
DESC = CacheDesc(2, [8, 64], DataType.DT_UINT8)
RIGHTS = ("link", "read", "write", "claim", "notify", "critical")


class Ends(NamedTuple):
    """An owner (1) with a policy, a peer (2) that it is about, and their caches."""

    owner: Cluster
    peer: Cluster
    theirs: Cache
    mine: Cache

    @property
    def missing(self) -> int:
        """The number of times that the owner counted a missing right."""
        return self.owner.datadist.figures().incidents.get("right_missing", 0)

    async def link(self) -> Exception | None:
        linked = await self.peer.datadist.link_clusters([cluster_info(self.owner)], 5000)
        if linked.errors[0] is None:
            await self.owner.datadist.wait_linked(2)
        return linked.errors[0]

    def untouched(self) -> None:
        """Check that not a byte of either cache has changed."""
        verify(self.peer.memory(self.mine), self.mine, {})
        verify(self.owner.memory(self.theirs), self.theirs, {})


def policy(*may: str, **others: Any) -> dict[str, Any]:
    return {"version": 1, "clusters": [{"match": {"key": "decode"}, "ids": "2-9", "may": may}], **others}


@asynccontextmanager
async def ends_of(tmp_path: Path, may: Sequence[str] | None, **options: Any) -> AsyncIterator[Ends]:
    """Open the two ends, and link them unless ``may`` is None."""
    ours, theirs = folder_of(tmp_path / "ours", KEY), folder_of(tmp_path / "theirs", KEY)
    policy_in(ours, policy(*may or ()))
    async with (
        open_cluster(1, trust=ours, **options) as owner,
        open_cluster(2, device_id=1, trust=theirs, **options) as peer,
    ):
        ends = Ends(owner, peer, await owner.blocks(DESC), await peer.blocks(DESC))
        if may is not None:
            assert await ends.link() is None
        yield ends


@pytest.fixture(params=[True, False], ids=["one_sided", "requests"])
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"enable_remote_cache_accessible": request.param}


def without(*names: str) -> list[str]:
    return [name for name in RIGHTS if name not in names]


async def test_a_peer_with_every_right_but_write_and_claim_reads(tmp_path: Path, mode: dict[str, Any]) -> None:
    async with ends_of(tmp_path, without("write", "claim"), **mode) as ends:
        await ends.peer.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), ends.mine, [3], [0])
        verify(ends.peer.memory(ends.mine), ends.mine, moved(DESC, {0: 3}))
        assert ends.missing == 0


async def test_no_layers_are_awaited_of_a_peer_that_may_not_write(tmp_path: Path) -> None:
    """Refuse to wait: the peer could say that layers have landed, and old bytes would be used as the new ones."""
    async with ends_of(tmp_path, without("write")) as ends:
        with pytest.raises(ParamInvalid, match="cluster 2 may not write into cache 1: it has no layers to report"):
            async with ends.owner.datadist.cache_manager.receive_layers(2, ends.theirs):
                pass


async def test_a_peer_that_no_rule_fits_is_not_linked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with ends_of(tmp_path, None) as ends:
        error = await ends.link()
        assert "the policy of cluster 1 does not let cluster 2 with key decode link" in str(error)
        assert "both ends need the same key" not in str(error), "they have proved that they have it"
        assert "the peer's policy.json decides" in str(error)
        linked = await ends.owner.datadist.link_clusters([cluster_info(ends.peer)], 5000)  # nor does it ask for a link
        assert isinstance(linked.errors[0], AuthError)
        assert inside(ends.owner.datadist).links.current == []


async def test_ids_beyond_the_rule_are_not_linked(tmp_path: Path) -> None:
    ours, theirs = folder_of(tmp_path / "ours", KEY), folder_of(tmp_path / "theirs", KEY)
    policy_in(ours, policy(*RIGHTS))
    async with open_cluster(1, trust=ours) as owner, open_cluster(10, device_id=1, trust=theirs) as peer:
        linked = await peer.datadist.link_clusters([cluster_info(owner)], 5000)
        assert "does not let cluster 10" in str(linked.errors[0])


async def test_a_changed_policy_counts_for_new_links_and_a_wrong_one_links_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ends_of(tmp_path, ["link"]) as ends:
        manager = ends.peer.datadist.cache_manager
        policy_in(tmp_path / "ours", policy(*RIGHTS))
        with pytest.raises(LLMException):
            await manager.pull_blocks(BlocksCacheKey(1), ends.mine, [3], [0])
        await ends.peer.datadist.unlink_clusters([cluster_info(ends.owner)], 5000)
        assert await ends.link() is None
        await manager.pull_blocks(BlocksCacheKey(1), ends.mine, [3], [0])
        await ends.peer.datadist.unlink_clusters([cluster_info(ends.owner)], 5000)
        policy_in(tmp_path / "ours", "{}")
        caplog.set_level(logging.ERROR)
        error = await ends.link()
        assert "cannot be used now" in str(error)
        assert str(tmp_path / "ours") not in str(error)
        assert "policy.json': version: Field required" in caplog.text
        policy_in(tmp_path / "ours", policy(*RIGHTS))
        assert await ends.link() is None


async def test_a_wrong_policy_is_reported_by_init(tmp_path: Path) -> None:
    folder = policy_in(folder_of(tmp_path / "ours", KEY), policy("read"))
    with pytest.raises(ParamInvalid, match=r"policy.json': .* 'read' has no effect without 'link'"):
        async with open_cluster(1, trust=folder):
            raise AssertionError("it opened")


async def test_nothing_is_read_without_the_right(tmp_path: Path, mode: dict[str, Any]) -> None:
    async with ends_of(tmp_path, without("read"), **mode) as ends:
        manager = ends.peer.datadist.cache_manager
        with pytest.raises(LLMException, match="may not read cache 1"):
            await manager.pull_blocks(BlocksCacheKey(1), ends.mine, [3], [0])
        ends.untouched()


async def test_nothing_is_pushed_without_the_right(tmp_path: Path) -> None:
    async with ends_of(tmp_path, without("write")) as ends:
        with pytest.raises(ParamInvalid, match="may not write into cache 1"):
            await ends.peer.datadist.cache_manager.push_blocks(BlocksCacheKey(1), ends.mine, [3], [0])
        ends.untouched()
        await ends.peer.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), ends.mine, [3], [0])


async def test_in_request_response_mode_a_peer_delivers_only_with_the_right_to_write(tmp_path: Path) -> None:
    async with ends_of(tmp_path, without("write"), enable_remote_cache_accessible=False) as ends:
        with pytest.raises(ParamInvalid, match="cluster 2 may not write into cache 1"):
            await ends.owner.datadist.cache_manager.pull_blocks(BlocksCacheKey(2), ends.theirs, [3], [0])
        ends.untouched()


async def test_nothing_is_claimed_or_released_without_the_right(tmp_path: Path, mode: dict[str, Any]) -> None:
    async with ends_of(tmp_path, without("claim"), **mode) as ends:
        lease = ends.owner.datadist.cache_manager.lease_blocks(ends.theirs, [3, 4], 60)
        manager = ends.peer.datadist.cache_manager
        with pytest.raises(LeaseMismatch, match=r"no right to claim .*policy\.json must have a rule with 'claim'"):
            await manager.pull_leased(lease.ticket(), ends.mine, [0, 1])
        link = inside(ends.peer.datadist).links.peek(1)
        assert link is not None
        link.session.post(Unclaim(call=0, lease=lease.name, end="released"))
        await manager.release_lease(lease.ticket())
        await link.session.ping()
        assert lease.ended is None
        assert dict(ends.owner.datadist.figures().claims_refused) == {"no_right": 1}
        await lease.withdraw()


async def test_notifications_without_the_right_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: the sender does not wait for a taker that never comes."""
    async with ends_of(tmp_path, without("notify")) as ends:
        heard: list[int] = []
        monkeypatch.setattr(Engine, "heard", lambda _, cluster_id, *rest: heard.append(cluster_id))
        await ends.peer.datadist.notify(1, b"first")
        link = inside(ends.peer.datadist).links.peek(1)
        assert link is not None
        await link.session.ping()
        assert (heard, ends.missing) == ([], 1)
        for number in range(200):
            await ends.peer.datadist.notify(1, b"%d" % number)
        await link.session.ping()
        assert (heard, ends.missing) == ([], 201)
        monkeypatch.undo()
        await ends.owner.datadist.notify(2, b"the other way")
        async for note in ends.peer.datadist.notifications():
            assert note.payload == b"the other way"
            break


async def test_critical_requests_without_the_right_are_served_as_normal_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ends_of(tmp_path, without("critical"), enable_remote_cache_accessible=False) as ends:
        asked: list[Any] = []
        submit = RunningTransfers.submit

        def watched(self: RunningTransfers, *given: Any) -> Any:
            asked.append(given[-1])
            return submit(self, *given)

        monkeypatch.setattr(RunningTransfers, "submit", watched)
        manager = ends.peer.datadist.cache_manager
        for priority in (TransferPriority.CRITICAL, TransferPriority.BACKGROUND):
            await manager.pull_blocks(BlocksCacheKey(1), ends.mine, [3], [0], priority=priority)
        assert asked == [TransferPriority.NORMAL, TransferPriority.BACKGROUND]
        verify(ends.peer.memory(ends.mine), ends.mine, moved(DESC, {0: 3}))
        assert ends.missing == 1


async def test_without_read_and_write_a_cache_is_not_even_found(tmp_path: Path, mode: dict[str, Any]) -> None:
    async with ends_of(tmp_path, without("read", "write"), **mode) as ends:
        with pytest.raises(LLMException) as failed:
            await ends.peer.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), ends.mine, [3], [0])
        assert isinstance(failed.value, (CacheNotFound, ParamInvalid))
        assert not isinstance(failed.value, CacheNotFound) or "may this cluster read it" in str(failed.value)
        ends.untouched()


@any_memory
async def test_private_memory_is_opened_to_no_peer_if_the_policy_says_so(tmp_path: Path, mode: dict[str, Any]) -> None:
    """In request/response mode the owner delivers it all the same, into memory that it can reach."""
    async with ends_of(tmp_path, None, **mode) as ends:
        policy_in(tmp_path / "ours", policy(*RIGHTS, private_memory=False))
        assert await ends.link() is None
        memory = bytearray(DESC.size * 2)
        memory[3 * 64 : 4 * 64] = bytes(range(64))
        parts = [memoryview(memory)[: DESC.size], memoryview(memory)[DESC.size :]]
        manager = ends.owner.datadist.cache_manager
        key = BlocksCacheKey(1, 5)
        await manager.register_blocks_cache(DESC, parts, key, True)
        pull = ends.peer.datadist.cache_manager.pull_blocks(key, ends.mine, [3], [0])
        if mode["enable_remote_cache_accessible"]:
            with pytest.raises(LLMException, match="offers no cache"):
                await pull
            ends.untouched()
        else:
            await pull
            assert bytes(ends.peer.memory(ends.mine).view()[:64]) == bytes(range(64))
            theirs = await manager.register_blocks_cache(DESC, [bytearray(DESC.size), bytearray(DESC.size)], None, True)
            with pytest.raises(ParamInvalid, match="may not write into cache"):
                await manager.pull_blocks(BlocksCacheKey(2), theirs, [3], [0])
