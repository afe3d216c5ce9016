"""Blocks of one worker's KV cache, kept for peers and pulled from them, for a busy loop that must not wait.

Each call is posted to the thread of an event loop::

    the engine's thread                         the loop's thread
    pull(order)            -> posted ->         link if there is none, then pull_leased
    keep(request, ...)     -> posted ->         lease_blocks
    push(portion, ...)     -> posted ->         transfer_cache_async, once the peer has named its blocks
    expect(order)          -> posted ->         link if there is none, name the blocks, and wait
    take()                 <- ended orders <-

:meth:`BlockService.take` reports every order exactly once, whatever its outcome: then its blocks are the engine's
again.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from aiodatadist._adapters import push_messages
from aiodatadist._adapters.ended import Ended, Tell
from aiodatadist._adapters.hold_messages import Hold, LetGo
from aiodatadist._adapters.holds import Holds
from aiodatadist._adapters.kept_leases import KeptLeases
from aiodatadist._adapters.kv_cache import KvCache, TensorGroup
from aiodatadist._adapters.leased_blocks import LeasedBlocks
from aiodatadist._adapters.loop_service import LoopService
from aiodatadist._adapters.order_tasks import OrderTasks
from aiodatadist._adapters.peer_links import LinkedPeer, PeerAddress, PeerLinks
from aiodatadist._adapters.pull_orders import KeptOrder, PullOrder, WorkerAddress, prompt_as_kept
from aiodatadist._adapters.push_in import ExpectOrder, IncomingPushes
from aiodatadist._adapters.push_messages import Drop, More, Refused, Sent, TransferKey, Want, WorkerMessage
from aiodatadist._adapters.push_out import OutgoingPushes
from aiodatadist._adapters.sendings import GroupedSending, LayeredSending, Portion, Sending
from aiodatadist._adapters.settings import Settings
from aiodatadist._blocking.loop_door import LoopDoor
from aiodatadist._cache_manager import CacheManager
from aiodatadist._counting import Incident, Incidents
from aiodatadist._datadist import LLMDataDist
from aiodatadist._layered.synchronizers import AwaitableLayerSynchronizer
from aiodatadist._values import checks
from aiodatadist._values.descriptors import BlocksCacheKey, Cache, CacheDesc, LLMRole
from aiodatadist._values.digests import check_prompt_digest
from aiodatadist.errors import InternalError, LLMException, ParamInvalid

logger = logging.getLogger(__name__)


class BlockService:
    """The block service of one worker.

    All methods may be called from any thread but the loop's; only :meth:`open` and :meth:`close` wait.

    Args:
        rank, ranks: of the worker among those that share the settings.
        place: the worker's number among those that an offer names, and how many these are; ``rank`` and ``ranks`` if
            None. A pipeline's stages have settings of their own.

    Raises:
        ParamInvalid: if there is no such rank.
    """

    def __init__(self, settings: Settings, rank: int = 0, ranks: int = 1, place: tuple[int, int] | None = None) -> None:
        if not 0 <= rank < ranks:
            raise ParamInvalid(f"rank is {rank}: must be from 0 to {ranks - 1}")
        self._settings = settings
        self._rank, self._place = rank, place or (rank, ranks)
        self._lock = threading.Lock()
        self._ended = Ended()
        self._door: LoopDoor[_Life] = LoopDoor("BlockService")

    def open(self, kv: KvCache, layout: dict[str, str | int]) -> WorkerAddress:
        """Register the KV cache, and listen.

        Args:
            layout: properties that must be the same at both ends, beside what the cache says of itself.

        Raises:
            ParamInvalid: if a setting is wrong, also if others may read or write the key file.
            LLMException: if the device or the port cannot be opened.
        """
        life = _Life(self._settings, self._rank, self._place, self._tell)
        return self._door.open(life, lambda: life.open(kv, layout))

    def open_groups(
        self, blocks: Sequence[TensorGroup], aux: Sequence[TensorGroup], layout: dict[str, str | int]
    ) -> PeerAddress:
        """Register tensors of different block sizes, and listen. Requests can be pushed, but not pulled.

        Args:
            blocks: tensors of the KV cache, a group for each size of a block.
            aux: tensors that go with each request, a group for each size of an item.

        Raises:
            LLMException: if the device or the port cannot be opened, or memory cannot be registered.
        """
        life = _Life(self._settings, self._rank, self._place, self._tell)
        return self._door.open(life, lambda: life.open_groups(blocks, aux, layout))

    def keep(
        self,
        request: str,
        lease: str,
        blocks: Sequence[int],
        prompt_digest: bytes,
        seconds: float | None = None,
        takers: int = 1,
        others: Sequence[Sequence[int]] = (),
    ) -> None:
        """Keep a finished request's blocks for a peer. Reported in ``sent``.

        Args:
            blocks: those of the first group of layers; ``others`` has those of the others, in order.
            prompt_digest: digest of the tokens that the blocks hold, from :func:`aiodatadist.prompt_digest`. Only a
                peer with the same prompt gets the blocks, or ends the lease.
            takers: number of requests of peers that may take the blocks.

        Raises:
            TypeError, ValueError: if ``prompt_digest`` is not a digest.
        """
        check_prompt_digest(checks.instance(prompt_digest, "prompt_digest", bytes))
        life, limit = self._running(), seconds or self._settings.lease_seconds
        numbers = [list(each) for each in (blocks, *others)]
        self._door.thread.post(lambda: life.keep(request, lease, numbers, prompt_digest, limit, takers))

    def hold(self, order: KeptOrder, seconds: float) -> None:
        """Keep a peer's lease alive while its request waits here, until it is pulled or released. Nothing is reported.

        Args:
            seconds: the time that the lease has without that.
        """
        check_prompt_digest(checks.instance(order.prompt_digest, "prompt_digest", bytes))
        life = self._running()
        self._door.thread.post(lambda: life.leased.hold(order, seconds))

    def pull(self, order: PullOrder) -> None:
        """Start to pull. Reported in ``received``.

        Raises:
            TypeError, ValueError: if the order's prompt digest is not a digest.
        """
        check_prompt_digest(checks.instance(order.prompt_digest, "prompt_digest", bytes))
        life = self._running()
        self._door.thread.post(lambda: life.leased.pull(order))

    def release(self, order: KeptOrder) -> None:
        """Tell a peer that its blocks are not needed, if possible. Nothing is reported.

        The peer ignores the call if its lease has other blocks, or another prompt.

        Raises:
            TypeError, ValueError: if the order's prompt digest is not a digest.
        """
        check_prompt_digest(checks.instance(order.prompt_digest, "prompt_digest", bytes))
        life = self._running()
        self._door.thread.post(lambda: life.leased.release(order))

    def cancel(self, request: str) -> None:
        """Stop the order of a request. It is reported once no more bytes of it can land.

        Ended orders are unaffected.
        """
        life = self._running()
        self._door.thread.post(lambda: life.cancel(request))

    def push(self, transfer: str, portion: Portion, *, request: str = "", prompt: bytes | None = None) -> None:
        """Send a portion of a request that a step is about to compute, each layer as soon as it is declared ready.

        Args:
            transfer: the router's name of the request, the same at both engines.
            request: this engine's name of it. A transfer belongs to the first request that names it.
            prompt: digest of the request's prompt (:func:`~aiodatadist._values.digests.prompt_digest`). The blocks go to
                an engine that expects the same name *and* prompt. None is for engines that do not know prompts.
        """
        life, key = self._running(), TransferKey.of(transfer, prompt)
        self._door.thread.post(lambda: life.outgoing.add(key, portion, request))

    def layer_ready(self, synchronizer: AwaitableLayerSynchronizer, layer: int) -> None:
        """Declare a layer of this step's portions ready: it is computed, or its event is recorded."""
        self._door.thread.post(lambda: synchronizer.ready(layer))

    def pushed(self, transfer: str, request: str, aux: int | None = None, *, prompt: bytes | None = None) -> None:
        """Declare that the request is computed, without further portions, and that ``aux`` goes with it.

        Reported in ``sent``.
        """
        life, key = self._running(), TransferKey.of(transfer, prompt)
        self._door.thread.post(lambda: life.outgoing.complete(key, request, aux))

    def abandon(self, transfer: str, *, request: str = "", prompt: bytes | None = None) -> None:
        """Declare that the request is not computed to its end. Nothing is reported."""
        life, key = self._running(), TransferKey.of(transfer, prompt)
        self._door.thread.post(lambda: life.outgoing.abandon(key, request))

    def expect(self, order: ExpectOrder) -> None:
        """Tell a peer where its portions belong. Reported in ``received``."""
        life = self._running()
        self._door.thread.post(lambda: life.incoming.expect(order))

    def decline(self, source: PeerAddress, transfer: str, prompt: bytes | None = None) -> None:
        """Tell a peer that its portions are not needed, if possible. Nothing is reported."""
        life, key = self._running(), TransferKey.of(transfer, prompt)
        self._door.thread.post(lambda: life.incoming.decline(source, key))

    @property
    def incidents(self) -> Incidents:
        """The counter of what peers and clients cause. :meth:`take` has the counts."""
        return self._running().incidents

    def take(self) -> Ended:
        """Return the orders that have ended since the last call. Never waits.

        Raises:
            InternalError: if the device does not release the KV cache, so that a transfer may write into it for ever:
                the engine must end. All other methods raise this from then on, too.
        """
        life = self._door.opened
        if life is not None:
            life.check()
        with self._lock:
            ended, self._ended = self._ended, self._ended.after()
        if life is not None:
            ended.incidents = life.incidents.take()
        return ended

    def close(self) -> None:
        """Stop running orders, end all links, and release the memory. May be called twice."""
        self._door.close()

    def _running(self) -> _Life:
        life = self._door.life
        life.check()
        return life

    def _tell(self, change: Callable[[Ended], object]) -> None:
        with self._lock:
            change(self._ended)


class _Life:
    """The part on the loop: an LLMDataDist, a cache, and the tasks of orders."""

    def __init__(self, settings: Settings, rank: int, place: tuple[int, int], tell: Tell) -> None:
        self._settings = settings
        self._rank, self._place = rank, place
        self._tell = tell
        self._datadist = LLMDataDist(LLMRole.MIX, settings.own_cluster_id(rank), settings.config(rank))
        self._service = LoopService("block service")
        self.close = self._service.close
        self._manager: CacheManager
        self._caches: list[Cache] = []
        # random: a peer that means an earlier life of this cluster finds no cache
        self._first_name = secrets.randbits(62)
        self._layout: dict[str, str | int] = {}
        self._pulled_layout: dict[str, str | int] = {}
        self._kv: KvCache | None = None
        self._tasks: OrderTasks
        self.incidents = self._datadist._totals.incidents
        self._links: PeerLinks
        self.broken: LLMException | None = None
        self.leased: LeasedBlocks
        self._kept: KeptLeases
        self._holds: Holds
        self.outgoing: OutgoingPushes
        self.incoming: IncomingPushes

    # ---- life ----

    async def open(self, kv: KvCache, layout: dict[str, str | int]) -> WorkerAddress:
        """Register the KV cache, and listen."""
        self._kv, self._pulled_layout = kv, layout

        async def register() -> Sending:
            made = [await self._register(number, each.desc, each.addresses) for number, each in enumerate(kv.tensors)]
            return LayeredSending(self._manager, made, kv.layers, kv.steps)

        peer = await self._open({**kv.words(), **layout}, register)
        cache_ids = tuple(cache.cache_id for cache in self._caches)
        return WorkerAddress(**peer.model_dump(), cache_ids=cache_ids, layout=layout, memory=kv.memory)

    async def open_groups(
        self, blocks: Sequence[TensorGroup], aux: Sequence[TensorGroup], layout: dict[str, str | int]
    ) -> PeerAddress:
        """Register tensors of different block sizes, and listen."""

        async def register() -> Sending:
            made = [
                await self._register(number, each.desc, each.addresses) for number, each in enumerate([*blocks, *aux])
            ]
            return GroupedSending(self._manager, made[: len(blocks)], made[len(blocks) :])

        return await self._open(layout, register)

    async def _register(self, number: int, desc: CacheDesc, addresses: Sequence[int]) -> Cache:
        key = BlocksCacheKey(self._datadist.cluster_id, self._first_name + number)
        cache = await self._manager.register_blocks_cache(desc, addresses, key, True)
        self._caches.append(cache)
        return cache

    async def _open(self, layout: dict[str, str | int], register: Callable[[], Awaitable[Sending]]) -> PeerAddress:
        self._layout = layout
        sending: list[Sending] = []

        async def enter(stack: AsyncExitStack) -> None:
            await stack.enter_async_context(self._datadist)
            self._manager = self._datadist.cache_manager
            sending.append(await register())

        def leave() -> None:
            self.incoming.close()
            self._links.close()

        if self._settings.lacks_peers:
            logger.warning(
                "peers is not set: this engine dials no other, and refuses to pull what a router names. Set peers to "
                'the addresses of the other engines, for instance ["10.0.0.0/24"], or to [] for an engine that dials none'
            )
        await self._service.open(enter, leave)
        self._start(OrderTasks(self._service.group, self.incidents), *sending)
        listening = self._datadist.listen_address
        assert listening is not None
        host, port = self._settings.address(self._rank, listening[1])
        return PeerAddress(cluster_id=self._datadist.cluster_id, host=host, port=port)

    def _start(self, tasks: OrderTasks, sending: Sending) -> None:
        settings, tell = self._settings, self._tell
        self._tasks = tasks
        self._links = PeerLinks(self._datadist, tasks, settings.link_seconds, self._lost, settings.allowed_peers())
        self._kept = KeptLeases(
            self._manager,
            self._caches,
            settings.pull_seconds,
            settings.hold_seconds,
            settings.patience_seconds,
            tasks,
            tell,
            self.incidents,
            None if self._kv is None else [plane.group for plane in self._kv.memory.planes],
        )
        self._holds = Holds(self._links, tasks, self._post)
        self.leased = LeasedBlocks(
            self._manager,
            self._caches,
            self._pulled_layout,
            self._kv,
            *self._place,
            settings.pull_seconds,
            settings.patience_seconds,
            settings.link_seconds,
            self._links,
            self._holds,
            tasks,
            tell,
            self._break,
            settings.accept_differences,
            self.incidents,
        )
        self._start_pushes(tasks, sending)
        tasks.start_soon(self._listen)

    def _start_pushes(self, tasks: OrderTasks, sending: Sending) -> None:
        settings, layout, tell = self._settings, self._layout, self._tell
        self.outgoing = OutgoingPushes(
            sending,
            layout,
            settings.lease_seconds,
            settings.pull_seconds,
            settings.patience_seconds,
            tasks,
            self._links.current,
            self._post,
            tell,
            settings.accept_differences,
            self.incidents,
            settings.quotas,
        )
        self.incoming = IncomingPushes(
            self._first_name,
            layout,
            settings.pull_seconds,
            settings.link_seconds,
            self._links,
            tasks,
            self._post,
            tell,
            self._wait_usable,
            self._break,
            self.incidents,
        )

    def _break(self, error: LLMException) -> None:
        self.broken = self.broken or error
        self.incidents.add(Incident.MEMORY_LOST, logger, "the KV cache is lost: %s", error, level=logging.ERROR)

    def check(self) -> None:
        """Raise InternalError if a transfer may write into the cache for ever, or a task failed. From any thread."""
        why = self.broken or self._service.error
        if why is not None:
            raise InternalError(f"the KV cache is lost: {why}", hint="start the engine again") from why

    async def _wait_usable(self) -> None:
        for cache in self._caches:
            await self._manager.wait_usable(cache)

    # ---- what workers say to each other ----

    async def _post(self, peer: LinkedPeer, message: WorkerMessage) -> None:
        """Send a message over the peer's own link. Raises PeerLost or LinkError if it has ended."""
        for each in push_messages.split(message):
            await self._links.current(peer).session.notify(push_messages.encode(each))

    async def _listen(self) -> None:
        async for note in self._datadist.notifications():
            try:
                message = push_messages.decode(note.payload)
            except ValueError as error:
                told = "cluster %d sent an unreadable message: %s", note.cluster_id, error
                self.incidents.add(Incident.MESSAGE_UNREADABLE, logger, *told)
            else:
                self._tasks.start_soon(self._heard, LinkedPeer(note.cluster_id, note.generation), message)

    async def _heard(self, peer: LinkedPeer, message: WorkerMessage) -> None:
        """Handle a message, unless its link has ended: then its peer no longer wants what it asked for.

        Nothing is awaited here, so that messages of a peer that accepts no answers do not pile up.
        """
        match message:
            case More() if self._links.hears(peer):
                self.outgoing.more(peer, message)
            case Want() if self._links.hears(peer):
                self.outgoing.want(peer, message)
            case Drop() if self._links.hears(peer):
                self.outgoing.drop(peer, message)
            case Hold() if self._links.hears(peer) and self._may_claim(peer):
                self._kept.held(peer, message.held)
            case LetGo() if self._links.hears(peer) and self._may_claim(peer):
                self._kept.let_go(peer, message.held)
            case Sent() | Refused():
                self.incoming.settle(peer, message)

    def _may_claim(self, peer: LinkedPeer) -> bool:
        return self._links.current(peer).session.rights.claim

    def keep(
        self, request: str, lease: str, blocks: Sequence[list[int]], prompt: bytes, seconds: float, takers: int
    ) -> None:
        """Keep a finished request's blocks, by group of layers. Reported in ``sent``."""
        assert self._kv is not None
        digest = prompt_as_kept(prompt, self._pulled_layout, self._kv.memory, *self._place, takers)
        first, *others = blocks
        self._kept.keep(request, lease, first, digest, seconds, takers, others)

    def _lost(self, peer: LinkedPeer) -> None:
        self._kept.lost(peer)
        self._holds.lost(peer)
        self.outgoing.lost(peer)
        self.incoming.lost(peer)

    def cancel(self, request: str) -> None:
        """Stop the orders of a request."""
        self.leased.cancel(request)
        self.incoming.cancel(request)
