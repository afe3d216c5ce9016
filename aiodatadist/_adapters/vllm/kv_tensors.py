"""vLLM's KV cache as regions: what vLLM says of each layer, and where its tensor is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiodatadist._adapters.kv_cache import KvCache, Placed, kv_cache_of
from aiodatadist._adapters.meaning import word
from aiodatadist._adapters.regions import Axis, Composition, Kind
from aiodatadist._adapters.vllm.model import LayerKind, Model
from aiodatadist.errors import ParamInvalid

PACKED: tuple[Kind, ...] = ("heads", "tokens", "part")
"""The dimensions of a layer behind its blocks, if keys and values are one tensor: vLLM's, whatever their order in memory."""
APART: tuple[Kind, ...] = ("tokens", "heads", "part")
"""The same of vLLM-Ascend's, where keys and values are two tensors, or a latent vector is in two or three."""


def kv_cache_of_vllm(kv_caches: Mapping[str, Any], model: Model, packing: Mapping[str, str] | None = None) -> KvCache:
    """Return the KV cache that vLLM has allocated.

    Args:
        packing: by layer: how its kernels store tokens, where the tensor's dimensions do not say it.

    Raises:
        ParamInvalid: if a tensor is not made of the model's blocks, or is on a CPU and in an unknown order.
    """
    placed: list[Placed] = []
    for number, (name, kv) in enumerate(kv_caches.items()):
        parts = tensors_of(name, kv, model.blocks)
        kind = model.kind_of(name)
        if kind is None:
            if {each.data_ptr() for each in parts} <= {each.address for each in placed}:
                continue  # it uses another layer's
            raise ParamInvalid(f"the KV cache of {name} is in no group of vLLM's kv_cache_config")
        for part, tensor in enumerate(parts):
            own = name if len(parts) == 1 else f"{name}:{part}"
            order = PACKED if len(parts) == 1 else APART
            placed.append(_placed(own, tensor, kind, model, number, order, (packing or {}).get(name, "")))
    return kv_cache_of(placed, model.rank)


def tensors_of(name: str, kv: Any, blocks: int) -> list[Any]:
    """Return one tensor if keys and values are packed, or all of the layer's. Raises ParamInvalid if the shape is unknown."""
    if isinstance(kv, (list, tuple)):
        return [part for each in kv for part in tensors_of(name, each, blocks)]
    if kv.shape[0] and kv.shape[0] % blocks == 0:
        return [kv]
    if len(kv.shape) > 1 and kv.shape[1] == blocks:  # keys, then values
        return list(kv)
    raise ParamInvalid(
        f"the KV cache of {name} has the shape {tuple(kv.shape)}: the first or second dimension must be the "
        f"{blocks} blocks"
    )


def _placed(
    name: str, tensor: Any, kind: LayerKind, model: Model, layer: int, order: Sequence[Kind], packing: str
) -> Placed:
    """Return a tensor's region."""
    size = int(tensor.element_size())
    pieces = tensor.shape[0] // model.blocks  # kernels may cut a block into several
    axes = tuple(_axes(tensor, kind, order, pieces, size))
    if pieces > 1:
        packing = f"{packing} in {pieces} pieces".strip()
    elif not packing and not any(axis.kind == "tokens" for axis in axes):
        packing = "as the kernels have them"
    if packing:  # the dimension of the tokens does not say where a token is
        axes = tuple(axis._replace(kind="part") if axis.kind == "tokens" else axis for axis in axes)
    storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else None
    start = 0 if storage is None else int(storage.data_ptr())
    return Placed(
        name,
        int(tensor.data_ptr()),
        int(tensor.stride(0)) * size * pieces,
        model.blocks,
        Composition(
            0,
            kind.tokens,
            kind.heads[model.rank],
            axes,
            size,
            word(str(tensor.dtype).removeprefix("torch.")),
            word(packing),
            kind.is_optional,
        ),
        kind.heads,
        kind.group,
        layer,
        start,
        0 if storage is None else start + int(storage.nbytes()),
    )


def _axes(tensor: Any, kind: LayerKind, order: Sequence[Kind], pieces: int, size: int) -> Iterator[Axis]:
    """Yield the axes of a block. A dimension is only named if all dimensions are what vLLM says they are."""
    shape, strides = tuple(map(int, tensor.shape[1:])), tuple(map(int, tensor.stride()[1:]))
    if pieces > 1:
        yield Axis("part", pieces, int(tensor.stride(0)) * size)
    own = {"heads": kind.slots, "tokens": kind.tokens // pieces // kind.tokens_per_state}
    if order is APART and len(shape) == 2 and kind.slots == 1:
        order = ("tokens", "part")
    is_known = len(shape) == len(order) and all(
        own.get(each, got) == got for each, got in zip(order, shape, strict=True)
    )
    for at, (got, stride) in enumerate(zip(shape, strides, strict=True)):
        named: Kind = order[at] if is_known else "part"
        if (named == "heads" and not kind.has_heads) or (named == "tokens" and kind.tokens_per_state != 1):
            named = "part"
        yield Axis(named, got, stride * size)


def packing_of(layer: Any, tensor: Any) -> str:
    """Return how a CPU's kernels store tokens: in an order of their own, for each instruction set another one."""
    return f"cpu {getattr(layer, 'isa', 'unknown')}" if str(getattr(tensor, "device", "")) == "cpu" else ""


def in_memory_order(name: str, tensor: Any, blocks: int) -> Any:
    """Return a view ``[blocks, elements of a block]`` of a tensor whose blocks have no gaps.

    Raises:
        ParamInvalid: if they have.
    """
    dims = sorted(range(1, len(tensor.shape)), key=lambda dim: -tensor.stride(dim))
    moved = tensor.permute(0, *dims)
    if not moved[0].is_contiguous() or moved.shape[0] != blocks:
        raise ParamInvalid(
            f"the KV cache of {name} has gaps within its {blocks} blocks: its strides are {tensor.stride()}"
        )
    return moved.flatten(1)


def layers_of(kv_caches: Mapping[str, Any], blocks: int) -> list[list[Any]]:
    """Return the tensors of each layer, ``[blocks, elements of a block]``. Raises ParamInvalid, see the functions above."""
    return [
        [in_memory_order(name, each, blocks) for each in tensors_of(name, kv, blocks)] for name, kv in kv_caches.items()
    ]
