"""vLLM's KV cache as tensors whose first dimension is the block."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from aiodatadist._adapters.block_shapes import Axes, BlockShape, axes_of
from aiodatadist._adapters.meaning import word
from aiodatadist.errors import ParamInvalid


def tensors_of(name: str, kv: Any, blocks: int) -> list[Any]:
    """Return one tensor if keys and values are packed, or both. Raises ParamInvalid if the shape is unknown."""
    if isinstance(kv, (list, tuple)):
        return [part for each in kv for part in tensors_of(name, each, blocks)]
    if not kv.is_contiguous():
        raise ParamInvalid(f"the KV cache of {name} is not contiguous: its strides are {kv.stride()}")
    if kv.shape[0] == blocks:
        return [kv]
    if len(kv.shape) > 1 and kv.shape[1] == blocks:  # keys, then values
        return list(kv)
    raise ParamInvalid(
        f"the KV cache of {name} has the shape {tuple(kv.shape)}: the first or second dimension must be the "
        f"{blocks} blocks"
    )


def layers_of(kv_caches: Mapping[str, Any], blocks: int) -> list[list[Any]]:
    """Return the tensors of each layer. Raises ParamInvalid, see :func:`tensors_of`."""
    return [tensors_of(name, kv, blocks) for name, kv in kv_caches.items()]


def shape_of(layers: list[list[Any]], block_size: int, heads: int) -> BlockShape:
    """Return the composition of blocks, for each tensor of a layer.

    On a CPU it is only known that heads are outermost: vLLM's kernels order the tokens of keys and values in their own
    ways, which the tensor's shape does not show.
    """
    axes: list[Axes] = []
    for tensor in layers[0]:
        sizes = list(tensor.shape[1:])
        is_cpu = str(getattr(tensor, "device", "")) == "cpu"
        if is_cpu and sizes[:2] == [heads, block_size]:
            axes.append(("heads", prod(sizes[1:])))
        else:
            axes.append(() if is_cpu else axes_of(sizes, block_size, heads))
    return BlockShape(tokens=block_size, heads=heads, axes=tuple(axes))


def layout_of(layers: list[list[Any]], shape: BlockShape, ranks: int) -> dict[str, str | int]:
    """Return the properties that must be the same wherever these blocks are used as they are."""
    first = layers[0][0]
    sizes = [axes or tuple(tensor.shape[1:]) for tensor, axes in zip(layers[0], shape.axes, strict=True)]
    return {
        "block_size": shape.tokens,
        "heads": shape.heads,
        "layers": len(layers),
        "tensors": sum(map(len, layers)),
        "dtype": str(first.dtype),
        "block_shape": word(", ".join("x".join(map(str, each)) for each in sizes)),
        "tensor_parallel_size": ranks,
    }
