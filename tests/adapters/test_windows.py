"""Models with windows, whose first group of layers may be the one with the window, at engines with other block sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest

from aiodatadist import new_lease_name
from aiodatadist._adapters.pull_orders import GroupOrder, PullOrder
from aiodatadist._adapters.vllm.model import Window
from tests.adapters.matrix import PROMPT, Side, Worker, many
from tests.adapters.windows import BOTH_ORDERS, FULL, WINDOW, moved
from tests.hostile.vllm_names import both_halves

ORDERS = pytest.mark.parametrize("kinds", BOTH_ORDERS, ids=", then ".join)
PLACES = {
    "larger blocks": (
        (Side(1, tokens=16), Side(1, tokens=32)), {WINDOW: [0, 0, 0, 3], FULL: [4, 5, 6, 7]},
        {WINDOW: [0, 5], FULL: [6, 7]}, 64,
    ),
    "fewer workers, and a window that moved on": (
        (Side(2), Side(1)), {WINDOW: [0, 0, 0, 3], FULL: [4, 5, 6, 7]}, {WINDOW: [0, 0, 10, 11], FULL: [12, 13, 14, 15]},
        70,
    ),
}  # fmt: skip
"""Sides, blocks there and here, and the tokens that the prefill engine has computed, of a prompt of 64."""


@pytest.fixture(scope="module")
def vllm() -> Iterator[SimpleNamespace]:
    with both_halves() as found:
        yield found


@ORDERS
@pytest.mark.parametrize("window", [16, 17])
@pytest.mark.parametrize("place", PLACES)
def test_what_lacks_tokens_that_a_window_needs_is_computed_here(
    vllm: SimpleNamespace, kinds: tuple[str, str], place: str, window: int
) -> None:
    """The load would fail, and with vLLM's default policy the request, too."""
    sides, there, here, computed = PLACES[place]
    if place != "larger blocks":
        window += 16
    found = moved(vllm, sides, kinds, there, here, 64, computed=computed, window=window)
    assert (found.matched, found.outcomes) == (0, [])
    assert found.kept == [{"p": "lease_released"}] * sides[0].tensor, "the prefill engine keeps nothing"


@ORDERS
@pytest.mark.parametrize("place", PLACES)
def test_a_load_that_lacks_tokens_fails_in_any_order_of_groups(
    vllm: SimpleNamespace, kinds: tuple[str, str], place: str
) -> None:
    """Refuse it: blocks from the prompt's beginning came into a window of the first group, and counted as loaded."""
    sides, there, here, computed = PLACES[place]
    found = moved(vllm, sides, kinds, there, here, 64, computed=computed)  # vLLM does not say how large the window is
    assert (found.matched, found.outcomes) == (64, [{"d": "pull_failed"}])
    assert found.kept == [{"p": "lease_released"}] * sides[0].tensor, "no group's blocks are kept"


@ORDERS
def test_a_window_that_begins_at_blocks_of_both_sizes_is_loaded(vllm: SimpleNamespace, kinds: tuple[str, str]) -> None:
    sides = Side(1, tokens=16), Side(1, tokens=32)
    there, here = {WINDOW: [0, 0, 2, 3], FULL: [4, 5, 6, 7]}, {WINDOW: [0, 5], FULL: [6, 7]}
    found = moved(vllm, sides, kinds, there, here, 64, window=32)
    assert (found.matched, found.outcomes, found.wrong) == (64, [{"d": "pull_done"}], [])
    assert found.kept == [{"p": "lease_taken"}]


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_workers_are_told_of_a_group_that_needs_nothing(ranks: int) -> None:
    """Choose who tells among those that pull: with four workers and two, two of them kept their blocks."""
    layers = [*many("layers.{}.full", 1), *many("layers.{}.window", 1, group=1)]
    with ExitStack() as stack:
        prefill = [Worker(layers, 4, Side(ranks), rank, 0, True) for rank in range(ranks)]
        decode = [Worker(layers, 4, Side(2), rank, 0, False) for rank in range(2)]
        for worker in (*prefill, *decode):
            stack.enter_context(closing(worker.service))
        lease = new_lease_name()
        for worker in prefill:
            worker.service.keep("p", lease, (1, 2), PROMPT, 600, others=[(3,)])
        sources = tuple(worker.address for worker in prefill)
        for worker in decode:
            nothing = (GroupOrder((3,), ()),)
            worker.service.pull(PullOrder("d", sources, lease, (1, 2), (1, 2), PROMPT, tokens=32, others=nothing))
        assert {worker.outcome("d") for worker in decode} == {"pull_done"}
        assert {worker.outcome("p") for worker in prefill} <= {"lease_taken", "lease_released"}


@pytest.mark.parametrize(
    ("window", "computed", "skipped"),
    [
        (Window(32), 64, 33),
        (Window(64), 64, 1),
        (Window(65), 64, 0),
        (Window(100), 64, 0),
        (Window(32, is_chunked=True), 64, 64),
        (Window(48, is_chunked=True), 64, 48),
        (Window(0), 64, 64),
    ],
)
def test_tokens_before_a_window_are_skipped(window: Window, computed: int, skipped: int) -> None:
    """Skip the tokens whose blocks vLLM frees, and all of them if the size of the window is unknown."""
    assert window.skipped(computed) == skipped
