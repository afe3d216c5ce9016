"""Without await: the option is that of a dictionary, and calls wait for the link that is being made again."""

from __future__ import annotations

import pytest

from aiodatadist import LinkPhase, RelinkPolicy
from aiodatadist._testing.views import call_on_loop, cut_link, inner_of
from aiodatadist.blocking import (
    BlocksCacheKey,
    LLMDataDist,
    LLMException,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from aiodatadist.testing import inside
from tests.blocking.pairs import KEY, Pair, cluster, linked_pair, options
from tests.stopwatch import lasting
from tests.test_relink import until


def cut(pair: Pair, *, listens: bool) -> None:
    """Break the connection of two clusters on this process's loop; the peer listens still, or no more."""
    cut_between(pair.source.datadist, pair.target.datadist, listens=listens)


def cut_between(theirs: LLMDataDist, ours: LLMDataDist, *, listens: bool) -> None:
    async def break_off() -> None:
        engine, changes = inside(theirs), inner_of(ours).link_changes()
        if not listens:
            await engine.listen_elsewhere(None)
        await cut_link(engine.links.find(ours.cluster_id))
        await until(changes, LinkPhase.LOST)

    call_on_loop(theirs, break_off)


def test_pulls_go_on_when_the_link_is_there_again() -> None:
    policy = RelinkPolicy(first_delay=0.005, max_delay=0.05, wait=30)
    assert options(relink=policy)["aiodatadist.Relink"] == '{"first_delay":0.005,"max_delay":0.05,"wait":30.0}'
    with linked_pair(relink=policy) as pair:
        cut(pair, listens=True)
        handle = pair.target.manager.submit_pull_blocks(KEY, pair.target.cache, [3], [0])
        pair.target.manager.pull_blocks(KEY, pair.target.cache, [4, 9], [1, 7])
        handle.wait(30)
        assert handle.exception() is None
        pair.target.check({0: (0, 3), 1: (0, 4), 7: (0, 9)})
        assert pair.target.datadist.figures().relinking.succeeded == 1


def test_a_pull_fails_when_the_link_is_not_there_in_time() -> None:
    with linked_pair(relink=RelinkPolicy(wait=0.2)) as pair:
        cut(pair, listens=False)
        with lasting(1, at_least=0.2), pytest.raises(LLMException, match=r"not linked again within 0\.2 s"):
            pair.target.manager.pull_blocks(KEY, pair.target.cache, [0], [0])
        handle = pair.target.manager.submit_pull_blocks(KEY, pair.target.cache, [3], [0])
        handle.wait(30)
        assert handle.failed_blocks() == [0]
        assert "not linked again" in str(handle.exception())


@pytest.mark.parametrize("listens", [True, False], ids=["is there again", "stays away"])
def test_layers_wait_for_the_link_too(listens: bool) -> None:
    policy = RelinkPolicy(first_delay=0.005, max_delay=0.05, wait=30 if listens else 0.2)
    config = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(2), range(2))
    with cluster(1, 0, relink=policy) as source, cluster(2, 100) as target:
        assert source.datadist.link_clusters([target.info], 5000)[0] is LLMStatusCode.LLM_SUCCESS
        target.datadist.wait_linked(1)
        cut_between(target.datadist, source.datadist, listens=listens)
        handle = source.manager.submit_layers(source.cache, [config], [3, 4], [0, 1])
        for layer in range(2):
            handle.layer_ready(layer)
        assert handle.wait(30)
        if listens:
            assert handle.exception() is None
            target.check({0: (0, 3), 1: (0, 4)})
        else:
            assert handle.failed_blocks() == [0, 1]
            assert "not linked again within 0.2 s" in str(handle.exception())
            target.check({})
