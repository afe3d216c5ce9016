"""Channels over HCCL's one-sided calls: a communicator of two ranks per link.

The vendor's library requires this order: register memory once per process, make a communicator from a rank table, bind
the memory to it, prepare it (both ends, blocking). Blocking calls run in worker threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._native.library import Handle, ffi
from aiodatadist._transport import registrations
from aiodatadist._transport.communicator import Communicator, communicator_config, failing_as_link
from aiodatadist._transport.contract import (
    DEFAULT_RDMA,
    DEFAULT_TCP,
    Access,
    Channel,
    ChannelOffer,
    Endpoint,
    RdmaConfig,
    Region,
    TcpConfig,
    Transport,
)
from aiodatadist._transport.link_kind import A2, A3, LinkKind, is_unfolded, link_kind, may_use_hccs
from aiodatadist._transport.local_device import describe
from aiodatadist._transport.soft_reach import check_reach, meeting_place
from aiodatadist._transport.two_ends import check_ends
from aiodatadist._values.descriptors import Placement
from aiodatadist._values.foreign import printable
from aiodatadist.errors import IncompatiblePeer, LinkError, LLMException, ParamInvalid, StuckError

if TYPE_CHECKING:
    from aiodatadist._device import Device, Layering, Program
    from aiodatadist._native.runtime import Runtime
    from aiodatadist._values.grid import Grid

logger = logging.getLogger(__name__)

BUFFER_MIB = 200  # the vendor's default
PINNED = "allocate it with allocate_cache, or pin it: tensor.pin_memory() of torch_npu, or aclrtMallocHost"
HUGE_PAGE = 2 << 20  # bytes; used if the runtime does not say, and a multiple of any other page


def host_identity() -> str:
    """Return an identifier of this machine since its boot, and of the user: the reach of softnpu's shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{os.getuid()}"


def rank_table(endpoints: tuple[Endpoint, Endpoint]) -> str:
    """Return the vendor's rank table for two devices, rank 0 first; JSON text, all values strings."""
    servers: dict[str, list[dict[str, str]]] = {}
    host_ips: dict[str, dict[str, str]] = {}
    for rank, end in enumerate(endpoints):
        names = ("device_ip", "device_port", "backup_device_ip", "super_device_id")
        given = {name: value for name in names if (value := getattr(end, name))}
        servers.setdefault(end.server_id, []).append({"device_id": end.device_id, **given, "rank_id": str(rank)})
        if end.host_ip and end.device_ip:  # without a device_ip HCCL would use the host's network cards for all devices
            host_ips[end.server_id] = {"host_ip": end.host_ip}
    table: dict[str, Any] = {
        "version": "1.0",
        "status": "completed",
        "server_count": str(len(servers)),
        "server_list": [
            {"server_id": name, **host_ips.get(name, {}), "device": devices} for name, devices in servers.items()
        ],
    }
    pods: dict[str, set[str]] = {}
    for end in endpoints:
        if end.super_pod_id:
            pods.setdefault(end.super_pod_id, set()).add(end.server_id)
    if pods:
        table["version"] = "1.2"
        table["super_pod_list"] = [
            {"super_pod_id": pod, "server_list": [{"server_id": server} for server in sorted(members)]}
            for pod, members in pods.items()
        ]
    return json.dumps(table)


class HcclTransport(Transport):
    """One-sided transfers through HCCL, on the vendor's library or on softnpu."""

    name: ClassVar[str] = "hccl"

    def __init__(
        self,
        device: Device,
        resource: str | None = None,
        rdma: RdmaConfig = DEFAULT_RDMA,
        tcp: TcpConfig = DEFAULT_TCP,
    ) -> None:
        super().__init__(device, resource, rdma, tcp)
        self._runtime = device.runtime
        self._regions: dict[Region, tuple[Handle, int]] = {}
        self._leaving: Counter[Region] = Counter()
        self._endpoint = self._describe(resource)

    def _describe(self, resource: str | None) -> Endpoint:
        """Return this device's endpoint. Blocks if the machine must be asked for the address of an NPU's network card."""
        found = describe(self._runtime, self.device.index, resource)
        meeting = meeting_place() if self._runtime.is_soft else ""
        end = Endpoint(self.name, self._runtime.name, host_identity(), process=os.getpid(), streams=0, **found)
        return replace(end, meeting=meeting)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    # ---- regions ----

    async def register(self, regions: Sequence[Region]) -> None:
        fresh = list(dict.fromkeys(region for region in regions if region not in self._regions))
        known = [*self._regions, *fresh]
        for region in fresh:
            for other in known:
                if region.overlaps(other) and region != other:
                    raise ParamInvalid(f"{region} overlaps the registered {other}: ranges must be equal or apart")
        if may_use_hccs(self._runtime):
            self._check_pages([region for region in fresh if region.placement is Placement.DEVICE])
        if may_use_hccs(self._runtime) or not self._runtime.is_soft:
            self._check_pinned([region for region in fresh if region.placement is Placement.HOST])
        handles = await in_thread(self._register_all, fresh, undo=self._deregister_all)
        self._regions.update({region: (handle, 0) for region, handle in handles.items()})
        self.epoch += bool(handles) or not all(map(self._is_offered, set(regions) - set(fresh)))
        for region in regions:
            handle, count = self._regions[region]
            self._regions[region] = (handle, count + 1)

    def _check_pages(self, regions: list[Region]) -> None:
        """Check that regions start with a page. Raises ParamInvalid if one does not.

        Over HCCS memory is exported from the start of a page, and one region that starts elsewhere ruins every link.
        """
        pages = self.device.page_sizes_of(region.address for region in regions)
        for region, page in zip(regions, pages, strict=True):
            past = region.address % (page or HUGE_PAGE)
            if past and region.address % HUGE_PAGE:
                raise ParamInvalid(
                    f"{region.nbytes} bytes of DEVICE memory at {region.address:#x} start {past} bytes after the start of a "
                    f"page of {page or HUGE_PAGE}: over HCCS every tensor must start with a page",
                    hint="align each tensor to 2 MiB, take memory of a pool, or set HCCL_INTRA_ROCE_ENABLE=1 at both ends",
                )

    def _check_pinned(self, regions: list[Region]) -> None:
        """Check that HOST regions are pinned. Raises ParamInvalid if one is not and a link may be over HCCS.

        HCCL maps HOST memory for the device on every channel that it is bound to, over HCCS, too, although no peer sees
        it there. The vendor's manual requires it pinned; otherwise it may make every link fail. Over RoCE the driver's
        answer is not known, so a warning tells the caller now.
        """
        places = self.device.placements_of(region.address for region in regions)
        for region, place in zip(regions, places, strict=True):
            if place is Placement.HOST:
                continue
            if may_use_hccs(self._runtime):
                raise ParamInvalid(
                    f"{region.nbytes} bytes of HOST memory at {region.address:#x} are not pinned: if links may be over "
                    "HCCS, HOST memory must be from aclrtMallocHost",
                    hint=PINNED,
                )
            logger.warning(
                "%d bytes of HOST memory at %#x are not from aclrtMallocHost, so links over RoCE may fail; %s",
                region.nbytes,
                region.address,
                PINNED,
            )

    def _register_all(self, regions: list[Region]) -> dict[Region, Handle]:
        handles: dict[Region, Handle] = {}
        try:
            for region in regions:
                handles[region] = registrations.register(self.device, region)
        except BaseException:
            self._deregister_all(handles)
            raise
        return handles

    def is_private(self, region: Region) -> bool:
        if not self._runtime.is_soft:
            return False
        return bool(self._runtime.acl.softnpu_is_private(ffi.cast("void *", region.address), region.nbytes))

    def withdraw(self, regions: Sequence[Region]) -> None:
        self._leaving.update(regions)

    def _is_offered(self, region: Region) -> bool:
        """Return True if a channel that is opened now covers the region."""
        return self._leaving[region] < self._regions[region][1]

    async def unregister(self, regions: Sequence[Region]) -> None:
        self._leaving -= Counter(regions)
        last: dict[Region, Handle] = {}
        for region in regions:
            handle, count = self._regions.get(region, (None, 0))
            if count > 1:
                self._regions[region] = (handle, count - 1)
            elif count == 1:
                last[region] = handle
                del self._regions[region]
        try:
            await in_thread(self._deregister_all, last, gives_back=True)
        except LLMException:
            self._regions.update({region: (handle, 1) for region, handle in last.items()})
            self.epoch += bool(last)
            raise

    def _deregister_all(self, handles: dict[Region, Handle]) -> None:
        """Deregister all that the runtime releases, and remove those from ``handles``. Raises the first refusal."""
        refused: LLMException | None = None
        for region in list(handles):
            try:
                registrations.deregister(self.device, region)
                del handles[region]
            except LLMException as error:
                refused = refused or error
        if refused is not None:
            raise refused

    # ---- channels ----

    async def open_channel(self, offer: ChannelOffer, timeout: float) -> Channel:
        self._check_peer(offer.endpoints[offer.peer_rank])
        handles = {region: handle for region, (handle, _) in self._regions.items() if self._is_offered(region)}
        comm = Communicator(self.device)
        with failing_as_link():
            return await in_thread(
                self._open_channel, offer, handles, timeout, comm, undo=HcclChannel.close, on_cancel=comm.call_off
            )

    def _check_peer(self, peer: Endpoint) -> None:
        mine = self._endpoint
        if (peer.transport, peer.runtime) != (mine.transport, mine.runtime):
            raise IncompatiblePeer(
                f"the peer uses {printable(peer.transport)} on the {printable(peer.runtime)} runtime, "
                f"we use {mine.transport} on {mine.runtime}"
            )
        if self._runtime.is_soft:
            check_reach(mine, peer)
        if (peer.host, peer.process, peer.device_id) == (mine.host, mine.process, mine.device_id):
            raise IncompatiblePeer(
                f"both ends are device {mine.device_id} of one process: HCCL needs two devices",
                hint="give one of them another device_id, or both transport='loopback'",
            )
        kind = link_kind(self._runtime, mine, peer)
        if kind is not LinkKind.FREE:
            is_known = A2.match(self._runtime.chip) or A3.match(self._runtime.chip)  # HCCL itself reports other chips
            check_ends(mine, peer, needs_address=kind is LinkKind.ROCE and bool(is_known))

    def _open_channel(
        self, offer: ChannelOffer, handles: dict[Region, Handle], timeout: float, comm: Communicator
    ) -> HcclChannel:
        deadline = time.monotonic() + timeout
        config = communicator_config(offer.name, BUFFER_MIB, self.rdma)
        kind = link_kind(self._runtime, offer.endpoints[offer.rank], offer.endpoints[offer.peer_rank])
        channel = HcclChannel(self.device, comm, offer.peer_rank, kind)
        with self.device.current():
            try:
                comm.make(rank_table(offer.endpoints), offer.rank, config)
                for region, handle in handles.items():
                    # HCCL shows what is bound. Only softnpu can bind a region without showing it.
                    if self._runtime.is_soft or offer.reach.is_used(region):
                        channel.bind(region, handle, offer.reach.access(region))
                comm.prepare(deadline - time.monotonic())
            except BaseException:
                channel.close()
                raise
        return channel

    async def aclose(self) -> None:
        last = {region: handle for region, (handle, _) in self._regions.items()}
        self._regions.clear()
        try:
            await in_thread(self._deregister_all, last, gives_back=True)
        except LLMException as error:  # a channel that could not be closed still uses one: it ends with the process
            logger.warning("memory stays registered: %s", error)


class HcclChannel(Channel):
    """A prepared communicator and the peer's rank in it."""

    def __init__(self, device: Device, comm: Communicator, peer_rank: int, kind: LinkKind) -> None:
        super().__init__(device)
        self.has_one_queue = kind is LinkKind.ROCE or is_unfolded(device.runtime, kind)
        self.takes_gates = not self.has_one_queue
        self.reaches_host = kind is not LinkKind.HCCS
        self.tells_access = device.runtime.is_soft
        self._comm = comm
        self._peer_rank = peer_rank
        self._bound: dict[Region, Handle] = {}
        self._closing = threading.Lock()

    @property
    def _runtime(self) -> Runtime:
        return self.device.runtime

    def bind(self, region: Region, handle: Handle, access: Access = Access.ALL) -> None:
        """Bind a region, and show it to the peer for this access.

        HCCL shows the peer each bound region for reading and writing. What this end copies itself must be bound, too.
        """
        self._runtime.check_hccl("HcclCommBindMem", self._runtime.hccl.HcclCommBindMem(self._comm.handle, handle))
        self._bound[region] = handle
        shows = Access.ALL if Access.WRITE in access else access  # what can be written can be read
        if self.tells_access and self._runtime.acl.softnpu_comm_show(self._comm.handle, handle, int(shows)):
            raise LinkError(f"softnpu refused to show {region} to the peer")

    def add_get(self, program: Program, grid: Grid) -> None:
        program.get(self._comm.handle, self._peer_rank, grid)

    def add_put(self, program: Program, grid: Grid, layering: Layering | None = None) -> None:
        program.put(self._comm.handle, self._peer_rank, grid, layering)

    def take_over(self, program: Program) -> None:
        program.redirect(self._comm.handle)

    async def aclose(self) -> None:
        await in_thread(self.close, gives_back=True)

    def close(self) -> None:
        """Close as :meth:`aclose`, but block; from any thread. Does all it can, then raises the first refusal."""
        with self._closing:
            if self._comm.handle is None:
                return
            bound, self._bound = self._bound, {}
            with self.device.current():
                refused = self._unbind(bound.values())
                try:
                    self._comm.destroy()
                except StuckError:
                    self._leave_behind(bound)
                    raise
            if refused is not None:
                raise refused

    def _leave_behind(self, bound: Iterable[Region]) -> None:
        """Give up memory that was bound to a communicator that HCCL may be using until the process ends."""
        for region in bound:
            self.device.mark_stuck(region.address, region.nbytes)
            registrations.keep(self.device, region)

    def _unbind(self, bound: Iterable[Handle]) -> LLMException | None:
        """Unbind all handles; return the first refusal, or None."""
        unbind = self._runtime.hccl.HcclCommUnbindMem
        refused: LLMException | None = None
        for handle in bound:
            try:
                self._runtime.check_hccl("HcclCommUnbindMem", unbind(self._comm.handle, handle))
            except LLMException as error:
                refused = refused or error
        return refused

    async def wait_let_go(self) -> None:
        awaited = self._comm.awaited
        if awaited < 0:
            return
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(awaited, woken.set)
        try:
            await woken.wait()
        finally:
            loop.remove_reader(awaited)

    def abandon(self) -> None:
        self._comm.abandon()
