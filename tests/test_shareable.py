"""Arrays and tensors that peers reach as they reach a pool."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import aiodatadist
from aiodatadist import BlocksCacheKey, CacheDesc, DataType, ParamInvalid, Placement
from aiodatadist.testing import cluster_info, open_cluster, soft_counters

SHAPE = (8, 512, 1024)  # 2 MiB pages: HCCS wants tensors to begin with one
DESC = CacheDesc(2, list(SHAPE), DataType.DT_FLOAT)
placements = pytest.mark.parametrize("placement", list(Placement), ids=lambda p: p.name)


def used() -> dict[str, int]:
    gc.collect()
    return {name: soft_counters()[name] for name in ("device_bytes", "pinned_bytes", "adopted")}


@placements
async def test_a_cache_of_them_is_pulled_without_being_adopted(placement: Placement) -> None:
    desc = CacheDesc(2, list(SHAPE), DataType.DT_FLOAT, placement)
    source_desc = DESC
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        before = used()
        sources = [aiodatadist.empty(SHAPE, np.float32) for _ in range(2)]
        targets = [aiodatadist.empty(SHAPE, "float32", placement=placement, device_id=1) for _ in range(2)]
        for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
            source[...] = np.arange(8, dtype=np.float32)[:, None, None] + 100 * number
            target[...] = -1
        await prompt.datadist.cache_manager.register_blocks_cache(source_desc, sources, BlocksCacheKey(1))
        cache = await decoder.datadist.cache_manager.register_blocks_cache(desc, targets)
        assert used()["adopted"] == before["adopted"]
        await decoder.datadist.link_clusters([cluster_info(prompt)])
        await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3, 7], [0, 1])
        for number, target in enumerate(targets):
            assert (target[0] == 3 + 100 * number).all()
            assert (target[1] == 7 + 100 * number).all()
            assert (target[2:] == -1).all()


@placements
def test_its_memory_is_given_back_with_the_last_view(placement: Placement) -> None:
    before = used()
    array = aiodatadist.empty((4, 1000), np.int16, placement=placement)
    assert array.shape == (4, 1000)
    assert sum(used().values()) >= sum(before.values()) + 8000
    view = array[1:]
    del array
    gc.collect()
    assert used() != before
    view[...] = 7
    del view
    gc.collect()
    assert used() == before


def test_one_number_is_a_shape_as_it_is_for_numpy() -> None:
    assert aiodatadist.empty(1000, np.int16).shape == (1000,)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"shape": (0, 4)}, ParamInvalid, r"shape is \(0, 4\): every size must be above 0"),
        ({"shape": (4.0,)}, TypeError, "shape"),
        ({"dtype": "no type"}, TypeError, "no type"),
        ({"placement": 1}, TypeError, "placement"),
        ({"device_id": 99}, ParamInvalid, "device 99 does not exist"),
    ],
)
def test_wrong_arguments_take_nothing(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    before = used()
    with pytest.raises(kind, match=words):
        aiodatadist.empty(**{"shape": (4,), "dtype": np.uint8, **arguments})
    assert used() == before


def test_tensors_of_torch_are_the_same() -> None:
    torch = pytest.importorskip("torch")
    before = used()
    tensor = aiodatadist.torch_empty((2, 64), torch.bfloat16)
    assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == ((2, 64), torch.bfloat16, "cpu")
    tensor.fill_(3)
    assert used() != before
    with pytest.raises(TypeError, match=r"torch\.dtype"):
        aiodatadist.torch_empty((2, 64), "bfloat16")
    del tensor
    gc.collect()
    assert used() == before
