"""Options are bounded, too: what is wrong with a large one is said at once."""

from __future__ import annotations

import gc
from time import process_time
from typing import Any

import pytest

from aiodatadist import LLMConfig, LLMException, ParamInvalid
from aiodatadist._transport.blob_exchange import MAX_TABLE, validate

UNKNOWN = "{" + ",".join(f'"{i:x}":0' for i in range(100_000)) + "}"
SHAPES = {
    "unknown fields": UNKNOWN,
    "empty texts": '{"buf_cfg":[' + ",".join(['""'] * 300_000) + "]}",
    "empty objects": '{"buf_cfg":[' + ",".join(["{}"] * 300_000) + "]}",
    "a huge number": '{"memory_size":' + "9" * (1 << 20) + "}",
    "deep lists": "[" * (1 << 20),
    "a long text": '"' + "x" * (1 << 20) + '"',
}
SECONDS = 0.05
"""Of the processor: the message, with a margin for a loaded machine; half a second without limits."""


def refuses(change: Any) -> str:
    gc.collect()  # what other tests have left is not the message's
    start = process_time()
    with pytest.raises(ParamInvalid) as caught:
        change()
    assert process_time() - start < SECONDS
    return str(caught.value)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", ["mem_pool_cfg", "host_mem_pool_cfg", "buf_pool_cfg", "cluster_info",
                                    "global_resource_config", "local_comm_res"])  # fmt: skip
def test_json_of_any_size_is_refused_at_once(option: str, shape: str) -> None:
    config, text = LLMConfig(), SHAPES[shape]
    words = refuses(lambda: setattr(config, option, text))
    assert f"{option} has {len(text)} characters: the limit is" in words


@pytest.mark.parametrize("shape", ["{}", '""'])
def test_what_is_within_the_limit_is_refused_in_one_short_line(shape: str) -> None:
    text = '{"buf_cfg":[' + ",".join([shape] * 4000) + "]}"
    assert len(refuses(lambda: LLMConfig(buf_pool_cfg=text))) < 1000


def test_option_dictionaries_are_bounded() -> None:
    many = {f"ge.{i}": "" for i in range(100_000)}
    assert "100000 entries: the limit is 1024" in refuses(lambda: LLMConfig.from_options(many))
    assert "100000 entries: the limit is 1024" in refuses(lambda: LLMConfig(ge_options=many))


def test_rank_tables_are_bounded() -> None:
    words = refuses(lambda: validate("name", {1: 0, 2: 1}, UNKNOWN, 1))
    assert f"rank_table has {len(UNKNOWN)} characters: the limit is {MAX_TABLE}" in words
    with pytest.raises(LLMException):
        validate("name", {1: 0, 2: 1}, "{}", 1)
