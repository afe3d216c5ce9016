"""The half beside a worker: hands orders to a BlockService, and reports what ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from aiodatadist._adapters.block_service import BlockService
from aiodatadist._adapters.peer_links import PeerAddress
from aiodatadist._adapters.pull_orders import WorkerAddress
from aiodatadist._adapters.push_in import ExpectOrder
from aiodatadist._adapters.sendings import Portion
from aiodatadist._adapters.settings import Settings
from aiodatadist._adapters.vllm.kv_tensors import kv_cache_of_vllm, packing_of, tensors_of
from aiodatadist._adapters.vllm.model import Model
from aiodatadist._adapters.vllm.offer import PushOffer
from aiodatadist._adapters.vllm.orders import Expect, Orders
from aiodatadist._adapters.vllm.results import Reports
from aiodatadist._adapters.vllm.steps import LayerSteps

logger = logging.getLogger(__name__)


class WorkerSide:
    """The worker half of one worker.

    Args:
        model: its part of the model.
        meaning: the meaning of the numbers in its blocks.
        layers: vLLM's layers by name, which know how their kernels store tokens.

    Attributes:
        reports: the orders that ended.
    """

    def __init__(
        self, settings: Settings, model: Model, meaning: Mapping[str, str], layers: Mapping[str, Any] | None = None
    ) -> None:
        self._service = BlockService(settings, model.rank, model.ranks, model.place)
        self._model = model
        self._meaning = meaning
        self._layers = layers or {}
        self._address: WorkerAddress | None = None
        self._is_replicated = False
        self._steps = LayerSteps(())
        self.reports = Reports(self._service.take)

    @property
    def address(self) -> WorkerAddress | None:
        """The place of its blocks; None before :meth:`register`."""
        return self._address

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Register the KV cache.

        Raises:
            ParamInvalid: if a tensor is not made of the model's blocks.
            LLMException, OSError: see :meth:`BlockService.open`.
        """
        first = next(tensors_of(name, kv, self._model.blocks)[0] for name, kv in kv_caches.items())
        packing = {name: packing_of(self._layers.get(name), first) for name in kv_caches}
        kv = kv_cache_of_vllm(kv_caches, self._model, packing)
        self._steps = LayerSteps(tuple(kv_caches), str(getattr(first, "device", "cpu")))
        self._is_replicated = kv.is_replicated
        self._address = self._service.open(kv, dict(self._meaning))

    # ---- each step ----

    def begin_step(self, orders: Orders) -> None:
        """Start the pushes of a step, before the model computes it."""
        if orders.pushes:
            synchronizer = self._steps.begin()
            for push in orders.pushes:
                portion, of = Portion(push.first, push.blocks, synchronizer), push.transfer
                self._service.push(of.name, portion, request=of.request_id, prompt=of.prompt_digest)

    def layer_computed(self, name: str) -> None:
        """Let a layer travel."""
        for synchronizer, layer in self._steps.computed(name):
            self._service.layer_ready(synchronizer, layer)

    def end_step(self) -> None:
        """Let all layers travel, also those without attention."""
        for synchronizer, layer in self._steps.end():
            self._service.layer_ready(synchronizer, layer)

    def carry_out(self, orders: Orders) -> None:
        """Start what the scheduler decided. Never waits."""
        for done in orders.pushed:
            self._service.pushed(done.name, done.request_id, prompt=done.prompt_digest)
        for ended in orders.abandons:
            self._service.abandon(ended.name, request=ended.request_id, prompt=ended.prompt_digest)
        for expect in orders.expects:
            for order in self._expect_orders(expect):
                self._service.expect(order)
        for declined in orders.declines:
            pushed = declined.offer
            for source in self._sources_of(pushed):
                self._service.decline(source, pushed.transfer_id, declined.prompt_digest)
        for keep in orders.keeps:
            self._service.keep(
                keep.request_id,
                keep.lease,
                keep.blocks,
                keep.prompt_digest,
                takers=keep.takers,
                others=keep.others,
            )
        for hold in orders.holds:
            self._service.hold(hold.order, hold.offer.lease_seconds)
        for load in orders.loads:
            self._service.pull(load.order)
        for request_id in orders.cancels:
            self._service.cancel(request_id)
        for release in orders.releases:
            self._service.release(release.order)

    def _expect_orders(self, expect: Expect) -> Iterator[ExpectOrder]:
        """Yield the order for the blocks, and one for nothing to each other worker that has the same."""
        offer, sources = expect.offer, self._sources_of(expect.offer)
        mine, theirs = self._model.ranks, offer.ranks(self._model.ranks)
        at = int.from_bytes(expect.prompt_digest[:4], "big") % len(sources)  # replicas take turns
        order = ExpectOrder(
            expect.request_id,
            sources[at],
            offer.transfer_id,
            expect.first,
            expect.into,
            prompt=expect.prompt_digest,
            workers=theirs if self._is_replicated and theirs % mine == 0 else None,
        )
        yield order
        yield from order.at_replicas(sources[:at] + sources[at + 1 :])

    def _sources_of(self, offer: PushOffer) -> list[PeerAddress]:
        """Return the workers of the prefill engine that have what this one needs, of whom it alone asks."""
        mine, theirs = self._model.ranks, offer.ranks(self._model.ranks)
        if not self._is_replicated or theirs % mine:
            return [offer.worker(self._model.rank)]
        return [offer.worker(rank) for rank in range(self._model.rank, theirs, mine)]

    def close(self) -> None:
        """Close the service."""
        self._service.close()
