"""A prompt of a model with windows, from one engine's scheduler and workers to another's, and every element compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from aiodatadist._adapters.settings import Settings
from aiodatadist._adapters.vllm.model import Model, Window
from tests.adapters.kv_memory import ended_of
from tests.adapters.matrix import BLOCKS, Side, Worker, many

WINDOW, FULL = "window", "full"
BOTH_ORDERS: Final = ((WINDOW, FULL), (FULL, WINDOW))
"""The groups of layers, in either order: vLLM's first group is often the one with the window."""
NONE: Final = SimpleNamespace(
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[]),
)
"""A step that schedules nothing."""


@dataclass
class Moved:
    """The outcome of a request: tokens to load, the outcomes by worker, and the elements that are wrong."""

    matched: int
    outcomes: list[dict[str, str]] = field(default_factory=list)
    wrong: list[Any] = field(default_factory=list)
    kept: list[dict[str, str]] = field(default_factory=list)


class Engine:
    """A scheduler's half, and workers with a layer of each kind, whose groups are in this order.

    Args:
        window: the size of the window, as vLLM says it; 0 if it does not.
    """

    def __init__(
        self, stack: ExitStack, vllm: SimpleNamespace, side: Side, kinds: Sequence[str], window: int, is_prefill: bool
    ) -> None:
        self.side, self.kinds, self.vllm = side, kinds, vllm
        layers = [layer for n, kind in enumerate(kinds) for layer in many(f"layers.{{}}.{kind}", 1, group=n)]
        self.workers = [Worker(layers, 4, side, rank, 0, is_prefill) for rank in range(side.tensor)]
        for worker in self.workers:
            stack.enter_context(closing(worker.service))
        windows = tuple(Window(window) if kind == WINDOW else None for kind in kinds)
        sizes, groups = (side.tokens,) * len(kinds), tuple(range(len(kinds)))
        model = Model(0, side.tensor, BLOCKS, side.tokens, 1, sizes=sizes, groups=groups, windows=windows)
        settings = Settings(max_leased=1, max_awaited=1)
        self.scheduler = vllm.scheduler_side.SchedulerSide(settings, side.tokens, BLOCKS, side.tensor, model)
        self.scheduler.meet({worker.rank: worker.address for worker in self.workers})

    def request(self, name: str, params: dict[str, Any], tokens: int, computed: int) -> Any:
        return SimpleNamespace(
            request_id=name, kv_transfer_params=params, num_prompt_tokens=tokens, num_computed_tokens=computed,
            prompt_token_ids=list(range(tokens)), lora_request=None, cache_salt=None, mm_features=[],
            status=self.vllm.scheduler_side.RequestStatus.FINISHED_LENGTH_CAPPED,
        )  # fmt: skip

    def fill(self, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """Write a prompt's elements into the blocks of each group. 0 is no block."""
        for worker in self.workers:
            for name, own in self._of_regions(worker, blocks):
                worker.fill(name, own, range(min(own) * self.side.tokens, tokens), 1)

    def wrong(self, blocks: Sequence[Sequence[int]], tokens: int) -> list[Any]:
        """Return elements that are not the prompt's, in all blocks that there are."""
        return [
            each
            for worker in self.workers
            for name, own in self._of_regions(worker, blocks)
            for each in worker.wrong(name, own, range(min(own) * self.side.tokens, tokens), 1)
        ]

    @staticmethod
    def _of_regions(worker: Worker, blocks: Sequence[Sequence[int]]) -> list[tuple[str, dict[int, int]]]:
        groups = [worker.kv.memory.planes[region.composed.plane].group for region in worker.regions.values()]
        return [
            (name, {number: block for number, block in enumerate(blocks[group]) if block})
            for name, group in zip(worker.regions, groups, strict=True)
        ]


def moved(
    vllm: SimpleNamespace,
    sides: tuple[Side, Side],
    kinds: Sequence[str],
    there: dict[str, list[int]],
    here: dict[str, list[int]],
    tokens: int,
    *,
    computed: int | None = None,
    prompt: int | None = None,
    window: int = 0,
    changed: Callable[[dict[str, Any]], None] = lambda params: None,
) -> Moved:
    """Prefill a prompt, offer it, and load what the other engine orders.

    Args:
        there, here: the blocks by kind of group, with 0 where there is none.
        computed: tokens that the prefill engine has computed, if it went on.
        prompt: tokens of the decode engine's prompt, if it is longer.
        changed: what a router or a client makes of the offer.
    """
    with ExitStack() as stack:
        prefill, decode = (
            Engine(stack, vllm, side, kinds, window, is_prefill)
            for side, is_prefill in zip(sides, (True, False), strict=True)
        )
        theirs, mine = ([blocks[kind] for kind in kinds] for blocks in (there, here))
        prefill.fill(theirs, tokens)
        done = prefill.request("p", {"do_remote_decode": True}, tokens, computed or tokens)
        _, params = prefill.scheduler.finished(done, theirs[0], theirs[1:])
        (keep,) = prefill.scheduler.take_orders(NONE).keeps
        for worker in prefill.workers:
            worker.service.keep(
                keep.request_id, keep.lease, keep.blocks, keep.prompt_digest, takers=keep.takers, others=keep.others
            )
        changed(params)
        wanted = decode.request("d", params, prompt or tokens, prompt or tokens)
        decode.scheduler.arrived(wanted)
        matched, _ = decode.scheduler.matched_tokens(wanted, 0)
        decode.scheduler.allocated(wanted, mine[0], matched, mine[1:])
        orders = decode.scheduler.take_orders(NONE)
        found = Moved(matched)
        for load in orders.loads:
            for worker in decode.workers:
                worker.service.pull(load.order)
            found.outcomes = [ended_of(worker.service, "d").outcomes for worker in decode.workers]
            found.wrong = decode.wrong(mine, tokens)
        for release in orders.releases:
            for worker in decode.workers:
                worker.service.release(release.order)
        if not any("pull_refused" in each.values() for each in found.outcomes) and (orders.releases or orders.loads):
            found.kept = [ended_of(worker.service, "p").outcomes for worker in prefill.workers]
        return found
