"""Answers of a synchronizer: True, False or None. Anything else fails its transfer, and no layer leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from aiodatadist import LLMStatusCode, ParamInvalid
from tests.test_layered import LAYERS, Immediate, fan, modes


class Shy:
    """Its own words raise."""

    def __repr__(self) -> str:
        raise KeyError("no words")


class Generator:
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Iterator[bool]:
        yield True


class AsyncGenerator:
    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> AsyncIterator[bool]:
        yield True


@modes
@pytest.mark.parametrize("kind", [Generator, AsyncGenerator])
async def test_a_generator_function_is_refused_before_anything_starts(kind: type[Any], one_sided: bool) -> None:
    async with fan(one_sided=one_sided) as made:
        before = made.held(0)
        with pytest.raises(TypeError, match=r"synchronize_layer\(\) is a generator function: .*True or False"):
            made.blocks(kind())
        assert made.held(0) == before
        await made.still_works()


ANSWERS: dict[str, Any] = {
    "a generator": lambda: (each for each in [True]),
    "a number": lambda: 1,
    "words": lambda: "ready",
    "something": object,
    "without words": Shy,
    "a function": lambda: bool,
    "a list": lambda: [True],
    "an array": lambda: np.ones(1, bool),
    "a number of numpy's": lambda: np.int8(1),
}


@pytest.mark.parametrize("way", ["plain", "async", "awaitable"])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_what_is_no_answer_fails_the_transfer(answer: Any, way: str) -> None:
    class Plain:
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Any:
            return answer()

    class Async:
        async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Any:
            return answer()

    class Awaitable:
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Any:
            return Async().synchronize_layer(layer_index, timeout_in_millis)

    async with fan(count=2) as made:
        before = [made.held(i) for i in range(2)]
        task = made.blocks({"plain": Plain, "async": Async, "awaitable": Awaitable}[way]())
        assert await task.get_results() == [LLMStatusCode.LLM_PARAM_INVALID] * 2
        with pytest.raises(ParamInvalid, match=r"synchronize_layer\(0\) returned .*: must be True, False or None"):
            await task
        assert [made.held(i) for i in range(2)] == before
        await made.still_works()


async def test_a_coroutine_in_a_coroutine_is_no_answer_and_leaves_no_warning() -> None:
    class Nested:
        async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Coroutine[Any, Any, bool]:
            return Immediate().synchronize_layer(layer_index, timeout_in_millis)

    async with fan() as made:
        with pytest.raises(ParamInvalid, match=r"returned .* of type coroutine"):
            await made.blocks(Nested())
        await made.still_works()


@pytest.mark.parametrize("answer", [None, False, np.False_])
@pytest.mark.parametrize("yes", [True, np.True_])
async def test_no_gives_the_layer_up(yes: bool | np.bool_, answer: bool | np.bool_ | None) -> None:
    """Take the result of numpy's comparison for a boolean like Python's own."""

    class No:
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool | np.bool_ | None:
            return yes if layer_index < LAYERS - 1 else answer

    async with fan() as made:
        with pytest.raises(ParamInvalid, match=rf"synchronize_layer\({LAYERS - 1}\) gave the layer up"):
            await made.blocks(No())
        await made.still_works()
