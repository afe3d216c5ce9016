"""vLLM's KV cache as tensors whose first dimension is the block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiodatadist.errors import ParamInvalid


def tensors_of(name: str, kv: Any, blocks: int) -> list[Any]:
    """One where keys and values are packed, or both. Raises ParamInvalid: it has a shape that is not known here."""
    if isinstance(kv, (list, tuple)):
        return [part for each in kv for part in tensors_of(name, each, blocks)]
    if not kv.is_contiguous():
        raise ParamInvalid(f"the KV cache of {name} is not contiguous: its strides are {kv.stride()}")
    if kv.shape[0] == blocks:
        return [kv]
    if len(kv.shape) > 1 and kv.shape[1] == blocks:  # keys and values, one behind the other
        return list(kv)
    raise ParamInvalid(
        f"the KV cache of {name} has the shape {tuple(kv.shape)}: the first or second dimension has to be the "
        f"{blocks} blocks"
    )


def layers_of(kv_caches: Mapping[str, Any], blocks: int) -> list[list[Any]]:
    """Of each layer its tensors. Raises ParamInvalid: see :func:`tensors_of`."""
    return [tensors_of(name, kv, blocks) for name, kv in kv_caches.items()]


def layout_of(layers: list[list[Any]], block_size: int, ranks: int) -> dict[str, str | int]:
    """What has to be the same wherever blocks of them are to be used."""
    first = layers[0][0]
    return {
        "block_size": block_size,
        "layers": len(layers),
        "tensors": sum(map(len, layers)),
        "dtype": str(first.dtype),
        "block_shape": ", ".join("x".join(map(str, tensor.shape[1:])) for tensor in layers[0]),
        "tensor_parallel_size": ranks,
    }
