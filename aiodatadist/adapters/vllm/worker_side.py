"""The half that lives beside a worker: hands orders to a BlockService, and tells what ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from aiodatadist.adapters.block_service import BlockService, Settings
from aiodatadist.adapters.leased_blocks import PullOrder, WorkerAddress
from aiodatadist.adapters.push_in import ExpectOrder
from aiodatadist.adapters.sendings import Portion
from aiodatadist.adapters.vllm.kv_tensors import layers_of, layout_of
from aiodatadist.adapters.vllm.offer import Offer
from aiodatadist.adapters.vllm.orders import Orders
from aiodatadist.adapters.vllm.results import FailedBlocks, Results
from aiodatadist.adapters.vllm.stats import TransferStats
from aiodatadist.adapters.vllm.steps import LayerSteps

logger = logging.getLogger(__name__)


class WorkerSide:
    """One worker's.

    Args:
        rank, ranks: of it among the tensor-parallel workers.
        blocks: of the engine's KV cache, per layer.
        block_size: tokens of one.
    """

    def __init__(self, settings: Settings, rank: int, ranks: int, blocks: int, block_size: int) -> None:
        self._service = BlockService(settings, rank)
        self._rank, self._ranks = rank, ranks
        self._blocks, self._block_size = blocks, block_size
        self._address: WorkerAddress | None = None
        self._steps = LayerSteps(())
        self._failed = FailedBlocks()
        self._stats = TransferStats()

    @property
    def address(self) -> WorkerAddress | None:
        """Where its blocks are; None before :meth:`register`."""
        return self._address

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """The KV cache, layer by layer: one tensor, or two for keys and values.

        Raises:
            ParamInvalid: it has a shape that is not known here. LLMException, OSError: see :meth:`BlockService.open`.
        """
        layers = layers_of(kv_caches, self._blocks)
        self._steps = LayerSteps(tuple(kv_caches), str(getattr(layers[0][0], "device", "cpu")))
        layout = layout_of(layers, self._block_size, self._ranks)
        self._address = self._service.open(layers, self._blocks, layout)

    # ---- each step ----

    def begin_step(self, orders: Orders) -> None:
        """Before the model computes: what of it is pushed."""
        if orders.pushes:
            synchronizer = self._steps.begin()
            for push in orders.pushes:
                self._service.push(push.transfer, Portion(push.first, push.blocks, synchronizer))

    def layer_computed(self, name: str) -> None:
        """It may travel."""
        for synchronizer, layer in self._steps.computed(name):
            self._service.layer_ready(synchronizer, layer)

    def end_step(self) -> None:
        """All layers may travel, also those that have no attention of their own."""
        for synchronizer, layer in self._steps.end():
            self._service.layer_ready(synchronizer, layer)

    def carry_out(self, orders: Orders) -> None:
        """Begin what the scheduler decided. Never waits."""
        for transfer, request_id in orders.pushed:
            self._service.pushed(transfer, request_id)
        for transfer in orders.abandons:
            self._service.abandon(transfer)
        for expect in orders.expects:
            peer = expect.offer.worker(self._rank)
            self._service.expect(
                ExpectOrder(expect.request_id, peer, expect.offer.transfer_id, expect.first, expect.into)
            )
        for declined in orders.declines:
            self._service.decline(declined.worker(self._rank), declined.transfer_id)
        for keep in orders.keeps:
            self._service.keep(keep.request_id, keep.lease, keep.blocks)
        for load in orders.loads:
            source = self._source(load.offer)
            self._service.pull(PullOrder(load.request_id, source, load.offer.lease, load.blocks, load.into))
        for request_id in orders.cancels:
            self._service.cancel(request_id)
        for offer in orders.releases:
            self._service.release(self._source(offer), offer.lease)

    def _source(self, offer: Offer) -> WorkerAddress:
        """This worker's counterpart. Where the two engines differ in their number of workers its layout says so."""
        return offer.workers[self._rank % len(offer.workers)]

    def take_results(self) -> Results:
        """What ended since the last step."""
        ended = self._service.take()
        self._stats.add(ended)
        return self._failed.results(ended)

    def take_failed_blocks(self) -> set[int]:
        """Blocks of loads that failed, of those that were told as received."""
        return self._failed.take()

    def take_stats(self) -> TransferStats | None:
        """Figures of the last interval; None: nothing happened."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, TransferStats()
        return stats

    def close(self) -> None:
        self._service.close()
