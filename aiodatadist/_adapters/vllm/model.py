"""The parts of vLLM's configuration that both connectors need, and the limits that both have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

from aiodatadist._adapters.regions import MAX_PLANES, Heads, heads_by_rank

AnySettings = TypeVar("AnySettings", bound=BaseModel)


def settings_of(transfer_config: Any, kind: type[AnySettings]) -> AnySettings:
    """Return ``kv_connector_extra_config``. Raises ValueError if a setting is wrong."""
    try:
        return kind.model_validate(transfer_config.kv_connector_extra_config)
    except ValidationError as error:
        raise ValueError(f"kv_connector_extra_config: {error}") from None


@dataclass(frozen=True)
class Window:
    """The tokens to which a layer attends, if these are not all.

    Attributes:
        tokens: number of them; 0 if vLLM does not say it.
        is_chunked: True if they are in chunks of this size, to whose beginning a token attends.
    """

    tokens: int
    is_chunked: bool = False

    def skipped(self, computed: int) -> int:
        """Return how many of the first tokens no token behind these attends to; all of them, if that is not known."""
        if not self.tokens:
            return computed
        return computed // self.tokens * self.tokens if self.is_chunked else max(0, computed - self.tokens + 1)


@dataclass(frozen=True)
class LayerKind:
    """The description of a layer's KV cache, as vLLM gives it.

    Attributes:
        tokens: tokens of a block.
        heads: the heads of each tensor-parallel worker, by rank.
        slots: the dimension of heads. ``has_heads`` is False if its slots are not the model's heads.
        group: number of the group of layers that have the same blocks.
        tokens_per_state: tokens that share one place.
        is_optional: True for a draft model's layer: another engine may be without it.
    """

    tokens: int
    heads: tuple[Heads, ...]
    slots: int
    group: int = 0
    tokens_per_state: int = 1
    has_heads: bool = True
    is_optional: bool = False


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
        stage, stages: number of the pipeline's stage, and of all.
        sizes: tokens of a block, by group of layers.
        groups: number of each group in vLLM's lists of blocks.
        windows: by group: the window, if requests have no blocks for tokens that no later one attends to; or None.
        layers: by name; none if vLLM does not say them.
    """

    rank: int
    ranks: int
    blocks: int
    block_size: int
    heads: int
    first: int = 0
    first_device: int = 0
    stage: int = 0
    stages: int = 1
    sizes: tuple[int, ...] = ()
    groups: tuple[int, ...] = (0,)
    windows: tuple[Window | None, ...] = (None,)
    layers: Mapping[str, LayerKind] = field(default_factory=dict)

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, connector: str, most_groups: int = MAX_PLANES) -> Self:
        """Return the model. Raises ValueError if the connector cannot handle it.

        Args:
            most_groups: most groups of KV caches, and with one of them no pipeline.
        """
        groups = _groups_of(kv_cache_config, connector, most_groups)
        parallel = vllm_config.parallel_config
        _check_parallel(parallel, most_groups)
        ranks = parallel.tensor_parallel_size
        spec = groups[0][1].kv_cache_spec
        first, first_device = _first_worker(parallel)
        return cls(
            parallel.rank % ranks,
            ranks,
            kv_cache_config.num_blocks,
            spec.block_size,
            getattr(spec, "num_kv_heads", 1),
            first,
            first_device,
            parallel.rank // ranks % parallel.pipeline_parallel_size,
            parallel.pipeline_parallel_size,
            tuple(group.kv_cache_spec.block_size for _, group in groups),
            tuple(number for number, _ in groups),
            tuple(_window_of(group) for _, group in groups),
            dict(_kinds_of([group for _, group in groups], vllm_config, ranks)),
        )

    @property
    def place(self) -> tuple[int, int]:
        """The worker's number among all of the engine's workers, and how many they are."""
        return self.stage * self.ranks + self.rank, self.stages * self.ranks

    def of_groups(self, blocks: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the blocks of the groups that are moved."""
        return [blocks[number] for number in self.groups]

    def not_moved(self, blocks: Sequence[Sequence[int]]) -> list[int]:
        """Return the blocks of the other groups, which vLLM keeps with them."""
        return [block for number, some in enumerate(blocks) if number not in self.groups for block in some]

    @property
    def why_not_pushed(self) -> str:
        """Return why requests of this engine cannot be pushed; empty if they can."""
        if len(self.groups) > 1:
            return f"the KV cache has {len(self.groups)} groups of layers"
        return f"pipeline_parallel_size is {self.stages}" if self.stages > 1 else ""

    @property
    def why_not_pulled(self) -> str:
        """Return why this engine does not pull; empty if it does."""
        return f"pipeline_parallel_size is {self.stages}: such an engine only prefills" if self.stages > 1 else ""

    def kind_of(self, name: str) -> LayerKind | None:
        """Return what is known of a layer; None if vLLM has said nothing of it, and of others."""
        if self.layers:
            return self.layers.get(name)
        heads = tuple(heads_by_rank(self.ranks, self.ranks, self.heads * self.ranks))
        return LayerKind(self.block_size, heads, self.heads)


def _check_parallel(parallel: Any, most_groups: int) -> None:
    """Raise ValueError if the engine's parallelism puts the tokens of a block at several workers."""
    pipeline = parallel.pipeline_parallel_size
    if pipeline > 1 and most_groups == 1:
        raise ValueError(f"pipeline_parallel_size is {pipeline}: must be 1 here")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ValueError(f"{name} is {size}: must be 1, because each worker would have some tokens of each block")


_MOVED = {
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
}
"""Kinds of vLLM's caches whose blocks have the keys and values of tokens, and nothing else."""


_WINDOWS = {
    "SlidingWindowSpec": "sliding_window",
    "SlidingWindowMLASpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "attention_chunk_size",
}
"""Kinds of vLLM's caches for layers with a window, and the name of its size."""


def _groups_of(kv_cache_config: Any, connector: str, most: int) -> list[tuple[int, Any]]:
    """Return the groups that can be moved, with their numbers. Raises ValueError if another one cannot be left out."""
    groups = list(enumerate(kv_cache_config.kv_cache_groups))
    groups = [(number, group) for number, group in groups if getattr(group, "enable_kv_transfer", True)]
    if len(groups) > most or not groups:
        raise ValueError(
            f"the model has {len(groups)} groups of KV caches: {connector} can move {most}; "
            "--disable-hybrid-kv-cache-manager makes one of them, if the model allows that"
        )
    for _, group in groups:
        for name, spec in _specs_of(group):
            kind = type(spec).__name__
            if kind not in _MOVED:
                raise ValueError(
                    f"the KV cache of {name} is a {kind}: {connector} can move those of attention to tokens"
                )
            if getattr(group, "host_resident", False) or getattr(spec, "prefix_replay_tokens", 0):
                raise ValueError(f"the KV cache of {name} is in host memory or is replayed: {connector} cannot move it")
    return groups


def _specs_of(group: Any) -> list[tuple[str, Any]]:
    """Return the specification of each layer of a group."""
    spec, names = group.kv_cache_spec, getattr(group, "layer_names", ["a layer"])
    inner = getattr(spec, "kv_cache_specs", None)
    return [(name, spec if inner is None else inner[name]) for name in names]


def _window_of(group: Any) -> Window | None:
    """Return the window of a group's layers; None if they have none."""
    for _, spec in _specs_of(group):
        kind = type(spec).__name__
        if kind in _WINDOWS:
            return Window(int(getattr(spec, _WINDOWS[kind], 0) or 0), kind == "ChunkedLocalAttentionSpec")
    return None


def _kinds_of(groups: Sequence[Any], vllm_config: Any, ranks: int) -> Iterator[tuple[str, LayerKind]]:
    """Yield the layers by name."""
    drafts_from = _first_draft_layer(vllm_config)
    for number, group in enumerate(groups):
        for name, spec in _specs_of(group):
            states = getattr(spec, "tokens_per_state", 1)
            slots = getattr(spec, "num_head_slots", None)
            yield (
                name,
                LayerKind(
                    spec.block_size,
                    _heads_of(spec, vllm_config, ranks),
                    spec.num_kv_heads if slots is None else slots,
                    number,
                    int(states) if states >= 1 else 1,
                    slots is None,
                    drafts_from is not None and _number_in(name) >= drafts_from,
                ),
            )


def _heads_of(spec: Any, vllm_config: Any, ranks: int) -> tuple[Heads, ...]:
    """Return the heads of each worker. vLLM gives neighbours the same ones if there are fewer heads than workers."""
    shards = getattr(spec, "max_tp_shards", None)
    if shards is None and type(spec).__name__.endswith("MLAAttentionSpec"):
        shards = 1
    if shards is None:
        find = getattr(getattr(vllm_config, "model_config", None), "get_total_num_kv_heads", None)
        shards = find() // spec.num_kv_heads if callable(find) else ranks
    shards = max(1, min(int(shards), ranks))
    return tuple(heads_by_rank(shards, ranks, spec.num_kv_heads * shards))


def _first_draft_layer(vllm_config: Any) -> int | None:
    """Return the number of the first layer that is a draft model's: they follow the model's own. None without one."""
    find = getattr(getattr(vllm_config, "model_config", None), "get_total_num_hidden_layers", None)
    if getattr(vllm_config, "speculative_config", None) is None or not callable(find):
        return None
    return int(find())


def _number_in(name: str) -> int:
    """Return the number of a layer; -1 if its name has none."""
    return next((int(each) for each in name.split(".") if each.isdigit()), -1)


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
