"""The memory that this process has registered with HCCL, counted per device.

HCCL does not count: it returns one handle for every registration of the same range, and the first deregistration ends
it for all. Two clusters of a process may have the same KV on the same device, so the order in which they end must not
matter. Registrations by other code of the process are not known here.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aiodatadist._native.library import Handle, ffi
from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import ParamInvalid, StuckError

if TYPE_CHECKING:
    from aiodatadist._device import Device
    from aiodatadist._transport.contract import Region

logger = logging.getLogger(__name__)

MEM_TYPES = {Placement.DEVICE: 0, Placement.HOST: 1}  # CommMemType


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on memory of a device that is registered at a time, over all register calls of the process."""

    device_bytes: int
    addresses: int


LIMITS: Final = {"ascend": Limits(device_bytes=50 << 30, addresses=240)}
"""The limits by runtime, from the vendor's manual. softnpu has none."""

WARNING_SHARE: Final = 0.8
"""The share of a limit beyond which a registration logs a warning."""


class _Registration:
    """A range that HCCL knows, and the number of transports that want it.

    Attributes:
        is_kept: True if a communicator that was left behind reaches it: it then stays registered until the process
            ends.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.users = 1
        self.is_kept = False


_known: dict[tuple[str, int], dict[Region, _Registration]] = {}
"""The registrations by runtime and device."""

_lock = threading.Lock()


def _renew_lock() -> None:
    """Make a new lock in a forked child: the parent's thread that held it is not here to release it."""
    global _lock  # noqa: PLW0603 - one per process
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def register(device: Device, region: Region) -> Handle:
    """Return HCCL's handle of a range, which is this caller's until :func:`deregister`. Blocking.

    Raises:
        ParamInvalid: if it overlaps another one without being the same, or exceeds one of ``LIMITS``.
        LLMException: if HCCL refused.
    """
    with _lock:
        known = _known.setdefault((device.runtime.name, device.index), {})
        if region in known:
            known[region].users += 1
        else:
            for other in known:
                _check_apart(device, region, other)
            _check_limits(device, region, known)
            known[region] = _Registration(_tell(device, region))
        return known[region].handle


def _check_apart(device: Device, region: Region, other: Region) -> None:
    if region.overlaps(other):
        raise ParamInvalid(
            f"{region} overlaps {other}, which another cluster of this process has registered on device {device.index}: "
            "ranges must be equal or apart",
            hint="register the same ranges in both, or unregister there first",
        )


def _check_limits(device: Device, region: Region, known: dict[Region, _Registration]) -> None:
    limits = LIMITS.get(device.runtime.name)
    if limits is None:
        return
    nbytes = region.nbytes if region.placement == Placement.DEVICE else 0
    before = sum(each.nbytes for each in known if each.placement == Placement.DEVICE)
    _check_limit(device, region, before, nbytes, limits.device_bytes, "bytes of device memory")
    _check_limit(device, region, len(known), 1, limits.addresses, "addresses")


def _check_limit(device: Device, region: Region, before: int, more: int, limit: int, what: str) -> None:
    after = before + more
    if after > limit:
        raise ParamInvalid(
            f"{region} would make {after} registered {what} on device {device.index}: at most {limit} can be registered "
            "at a time, over all register calls of the process",
            hint="unregister caches that are no longer needed, or register fewer and larger ranges",
        )
    if before <= WARNING_SHARE * limit < after:
        logger.warning("device %d has %d registered %s: at most %d can be registered", device.index, after, what, limit)


def deregister(device: Device, region: Region) -> None:
    """Release one registration; the last one ends it. Blocking.

    Raises:
        StuckError: if a communicator that was left behind reaches it. It is still registered, and must not be freed.
        LLMException: if HCCL refused. It is still registered.
    """
    with _lock:
        known = _known[device.runtime.name, device.index]
        registration = known[region]
        if registration.users == 1:
            if registration.is_kept:
                raise StuckError(
                    f"{region} is reached by a communicator that HCCL never destroyed: it stays registered, and must not be "
                    "freed, until the process ends"
                )
            with device.current():
                code = device.runtime.hccl.HcclDeregisterGlobalMem(registration.handle)
                device.runtime.check_hccl("HcclDeregisterGlobalMem", code)
            del known[region]
        registration.users -= 1


def keep(device: Device, region: Region) -> None:
    """Keep a range registered until the process ends: a communicator that was left behind reaches it.

    No effect if it is no longer registered: its owner may have unregistered it while the communicator was being destroyed.
    """
    with _lock:
        registration = _known.get((device.runtime.name, device.index), {}).get(region)
        if registration is not None:
            registration.is_kept = True


def _tell(device: Device, region: Region) -> Handle:
    memory = ffi.new("CommMem *")
    memory.type = MEM_TYPES[region.placement]
    memory.addr = ffi.cast("void *", region.address)
    memory.size = region.nbytes
    handle = ffi.new("void **")
    with device.current():
        code = device.runtime.hccl.HcclRegisterGlobalMem(memory, handle)
        try:
            device.runtime.check_hccl("HcclRegisterGlobalMem", code)
        except ParamInvalid as error:
            raise ParamInvalid(
                f"{region} on device {device.index}: {error.args[0]}",
                hint="has other code of this process registered memory with HCCL? Ranges must be equal or apart",
            ) from error
    return handle[0]
