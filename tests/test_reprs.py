"""Representations of a cluster in a debugger and a log."""

from __future__ import annotations

import inspect

from aiodatadist import CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole
from aiodatadist.testing import linked_pair


async def test_a_cluster_shows_its_id_its_role_and_what_it_has() -> None:
    async with linked_pair(CacheDesc(2, [4, 4096], DataType.DT_UINT8)) as (prompt, decoder, _, _):
        assert repr(prompt.datadist) == "<LLMDataDist 1, PROMPT: 1 links, 1 caches>"
        assert repr(decoder.datadist.cache_manager) == "<CacheManager of cluster 2>"
    assert repr(prompt.datadist) == "<LLMDataDist 1, PROMPT: not initialised>"


def test_a_new_cluster_says_that_it_is_not_initialised() -> None:
    assert repr(LLMDataDist(LLMRole.DECODER, 7)) == "<LLMDataDist 7, DECODER: not initialised>"


def test_signatures_show_no_address() -> None:
    assert "object at 0x" not in str(inspect.signature(LLMConfig))
    assert "device_id: 'int | Sequence[int]' = 0" in str(inspect.signature(LLMConfig))
