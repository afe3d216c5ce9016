"""``link_clusters`` returns what LLM-DataDist's returns, and has the reason of each status besides."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import cast

import pytest

from aiodatadist import (
    LinkError,
    LinkResults,
    LLMClusterInfo,
    LLMRole,
    LLMStatusCode,
    NotLinked,
    ParamInvalid,
    blocking,
    legacy,
)
from aiodatadist._testing.ports import free_port
from aiodatadist.testing import cluster_info, open_cluster

OK = LLMStatusCode.LLM_SUCCESS


def absent(cluster_id: int) -> LLMClusterInfo:
    """Return an address at which no cluster listens."""
    info = LLMClusterInfo(cluster_id)
    info.append_remote_ip_info("127.0.0.1", free_port())
    return info


async def test_each_status_has_its_reason() -> None:
    async with open_cluster(1, device_id=0) as prompt, open_cluster(2, device_id=1) as decoder:
        there, gone, homeless = cluster_info(prompt), absent(7), LLMClusterInfo(8)
        results = await decoder.datadist.link_clusters([there, gone, homeless], 5000)
        status, each = results
        assert each == [OK, LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_PARAM_INVALID]
        assert status is LLMStatusCode.LLM_PARAM_INVALID
        none, refused, invalid = results.errors
        assert none is None
        assert isinstance(refused, LinkError)
        assert gone.remote_addresses[0][0] in str(refused)
        assert "no cluster can be reached" in str(refused)
        assert isinstance(invalid, ParamInvalid)
        assert "has 0 remote addresses" in str(invalid)
        assert [error and error.status_code for error in results.errors] == [None, *each[1:]]

        again = await decoder.datadist.link_clusters([there])
        assert again.status is LLMStatusCode.LLM_ALREADY_LINK
        assert "linked already" in str(again.errors[0])
        ended = await decoder.datadist.unlink_clusters([there])
        assert (ended.status, ended.statuses, ended.errors) == (OK, [OK], (None,))


async def test_the_shape_is_the_vendors() -> None:
    async with open_cluster(2) as decoder:
        results = await decoder.datadist.link_clusters([absent(7)], 5000)
        assert isinstance(results, tuple)
        assert len(results) == 2
        assert results == (LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED])
        assert type(results[1]) is list
        nothing = await decoder.datadist.link_clusters([])
        assert (nothing, nothing.errors) == ((LLMStatusCode.LLM_PARAM_INVALID, []), ())


async def test_v1_has_them_with_its_own_statuses() -> None:
    config = legacy.LLMConfig(enable_cache_manager=False)
    async with legacy.LLMDataDist(LLMRole.DECODER, 2, config) as decoder:
        linked = await decoder.link_clusters([absent(7)], 5000)
        assert linked == (LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED])
        assert "no cluster can be reached" in str(linked.errors[0])
        unlinked = await decoder.unlink_clusters([absent(7)])
        assert unlinked == (OK, [LLMStatusCode.LLM_NOT_YET_LINK])
        assert isinstance(unlinked.errors[0], NotLinked)
        assert "cluster 7 is not linked" in str(unlinked.errors[0])


def test_without_await_they_are_there_as_well() -> None:
    datadist = blocking.LLMDataDist(LLMRole.MIX, 2)
    config = blocking.LLMConfig()
    config.enable_cache_manager = True
    datadist.init(config.generate_options())
    try:
        linked = datadist.link_clusters([absent(7)], 5000)
    finally:
        datadist.finalize()
    assert linked == (LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED])
    assert "no cluster can be reached" in str(linked.errors[0])


def pickled(results: LinkResults) -> LinkResults:
    return cast("LinkResults", pickle.loads(pickle.dumps(results)))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickled])
def test_copies_have_all_of_it(way: Callable[[LinkResults], LinkResults]) -> None:
    results = LinkResults.of([None, NotLinked("cluster 7 is not linked", peer=7)])
    other = way(results)
    assert other == results
    assert [str(error) for error in other.errors] == [str(error) for error in results.errors]
