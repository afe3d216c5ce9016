"""Calls of which only the starting half is written look and fail as if both were."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from aiodatadist._context_caching.transfer.handle import BlockTransfer
from aiodatadist.context_caching import ContextCache, EmsInvalidArgument
from aiodatadist.context_caching.ems import CcFuture, CcResult, ContextCache_v1, ContextCaching
from tests.context_caching.kit import Kv, by_slots, rank

PAIRS = [
    *((ContextCache, name, f"start_{name}", BlockTransfer) for name in ("save", "load", "save_values", "load_values")),
    *(
        (owner, name, f"async_{name}", CcFuture)
        for owner in (ContextCaching, ContextCache_v1)
        for name in ("save", "load")
    ),
]


@pytest.mark.parametrize(("owner", "name", "start", "handle"), PAIRS)
def test_both_halves_are_described(owner: Any, name: str, start: str, handle: type) -> None:
    half: Callable[..., Any] = getattr(owner, name)
    other: Callable[..., Any] = getattr(owner, start)
    assert (half.__name__, half.__qualname__, half.__module__) == (
        name,
        f"{owner.__qualname__}.{name}",
        owner.__module__,
    )
    assert inspect.signature(half).parameters == inspect.signature(other).parameters
    assert (get_type_hints(half)["return"], get_type_hints(other)["return"]) == (CcResult, handle)
    assert inspect.iscoroutinefunction(half) == start.startswith("start_")
    assert inspect.getdoc(half)
    assert inspect.getdoc(half) != inspect.getdoc(other)
    assert f"Start :meth:`{name}`." in str(inspect.getdoc(other))


async def test_a_traceback_shows_the_caller_and_the_half_that_starts() -> None:
    async with await ContextCache.open(rank()) as cache:
        await cache.register_kvcache(Kv().layers)
        with pytest.raises(EmsInvalidArgument) as caught:
            await cache.save([1, 1], **by_slots([0, 1]))
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[:3] == [inspect.currentframe().f_code.co_name, "call", "start_save"]  # type: ignore[union-attr]


async def test_a_subclass_overrides_the_half_that_starts() -> None:
    class Counting(ContextCache):
        started = 0

        def start_save(self, *args: Any, **kwargs: Any) -> BlockTransfer:
            self.started += 1
            return super().start_save(*args, **kwargs)

    async with await Counting.open(rank()) as cache:
        await cache.register_kvcache(Kv().layers)
        assert (await cache.save([1], **by_slots([0]))).success == 1
        assert cache.started == 1
