"""SGLang's buffers, given as addresses, as groups of tensors whose items have the same size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from aiodatadist._adapters.kv_cache import TensorGroup
from aiodatadist._adapters.meaning import word


def groups_of(
    name: str, addresses: Sequence[int], lengths: Sequence[int], item_bytes: Sequence[int]
) -> list[TensorGroup]:
    """Return a group for each size of an item, in the order in which the sizes first appear.

    Raises:
        ValueError: if a buffer is not a whole number of items, or the lists have different lengths.
    """
    if not len(addresses) == len(lengths) == len(item_bytes):
        counts = f"{len(addresses)} addresses, {len(lengths)} lengths and {len(item_bytes)} item lengths"
        raise ValueError(f"{name}: {counts}: the numbers must be equal")
    found: dict[tuple[int, int], list[int]] = {}
    for i, (address, length, nbytes) in enumerate(zip(addresses, lengths, item_bytes, strict=True)):
        if nbytes < 1 or length % nbytes or not length:
            raise ValueError(
                f"{name}[{i}] has {length} bytes: must be a whole number of items of {nbytes} bytes, at least one"
            )
        found.setdefault((nbytes, length // nbytes), []).append(int(address))
    return [TensorGroup(tuple(each), count, nbytes) for (nbytes, count), each in found.items()]


def layout_of(args: Any, ranks: int) -> dict[str, str | int]:
    """Return the properties that must be the same at both ends."""
    return {
        "page_size": int(args.page_size),
        "kv_item_lens": _short(args.kv_item_lens),
        "aux_item_lens": _short(args.aux_item_lens),
        "kv_layout": word(str(getattr(args, "kv_layout", None) or "")),
        "tensor_parallel_size": ranks,
    }


def _short(lengths: Sequence[int]) -> str:
    """Return a text of at most 64 characters that is the same for the same lengths only: ``2048x4,64``, or a digest."""
    runs = [(int(length), len(list(same))) for length, same in groupby(lengths)]
    return word(",".join(f"{length}x{count}" if count > 1 else str(length) for length, count in runs))


def check_no_state(args: Any) -> None:
    """Raise ValueError if the model keeps more than KV."""
    if any(getattr(args, "state_data_ptrs", None) or ()):
        kinds = ", ".join(str(getattr(kind, "value", kind)) for kind in args.state_types)
        raise ValueError(f"the model has state beside its KV cache ({kinds}): aiodatadist's backend does not move that")
