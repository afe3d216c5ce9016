"""The parts of vLLM's configuration that both connectors need, and the limits that both have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

AnySettings = TypeVar("AnySettings", bound=BaseModel)


def settings_of(transfer_config: Any, kind: type[AnySettings]) -> AnySettings:
    """Return ``kv_connector_extra_config``. Raises ValueError if a setting is wrong."""
    try:
        return kind.model_validate(transfer_config.kv_connector_extra_config)
    except ValidationError as error:
        raise ValueError(f"kv_connector_extra_config: {error}") from None


@dataclass(frozen=True)
class Model:
    """The model, as one worker or the scheduler sees it.

    Attributes:
        rank, ranks: among the tensor-parallel workers.
        blocks: blocks of the KV cache, per layer.
        block_size: tokens of a block.
        heads: heads of keys and values, of this worker.
        first: number of rank 0 among the workers of all data-parallel engines and pipeline stages that have these
            settings; and ``first_device``, among those of this machine.
    """

    rank: int
    ranks: int
    blocks: int
    block_size: int
    heads: int
    first: int = 0
    first_device: int = 0

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, connector: str) -> Self:
        """Return the model. Raises ValueError if the connector cannot handle it."""
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(
                f"the model has {len(groups)} groups of KV caches: {connector} can move one; "
                "--disable-hybrid-kv-cache-manager makes one of them, if the model allows that"
            )
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise ValueError(f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: must be 1 here")
        ranks = parallel.tensor_parallel_size
        spec = groups[0].kv_cache_spec
        heads = getattr(spec, "num_kv_heads", 1)
        first, first_device = _first_worker(parallel)
        return cls(
            parallel.rank % ranks, ranks, kv_cache_config.num_blocks, spec.block_size, heads, first, first_device
        )


def _first_worker(parallel: Any) -> tuple[int, int]:
    """Return the number of a pipeline stage's first worker among those of all data-parallel engines, and of its device.

    ``data_parallel_index`` is the engine's own number. ``data_parallel_rank`` is 0 in each engine of a model without
    experts, because these engines need not know of each other.
    """
    stage = parallel.rank // parallel.tensor_parallel_size * parallel.tensor_parallel_size
    index = getattr(parallel, "data_parallel_index", 0)
    here = getattr(parallel, "data_parallel_rank_local", None)
    each = getattr(parallel, "world_size", parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    return index * each + stage, (index if here is None else here) * each + stage
