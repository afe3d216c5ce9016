"""The traits of a link: properties that all of its channels share, and the memory that these put out of reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aiodatadist._transport import Channel, Endpoint
from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._cache.catalogue import RemoteCache
    from aiodatadist._cache.table import Entry


class Traits(NamedTuple):
    """The traits that all channels of a link share, because they connect the same two devices. ``Channel`` explains them.

    ``npus`` says, for this end and the peer, whether it is an NPU whose DEVICE memory they do not reach; empty if neither is.
    """

    has_one_queue: bool = False
    takes_gates: bool = True
    reaches_host: bool = True
    has_connections: bool = False
    needs_loans: bool = False
    npus: tuple[bool, ...] = ()

    def check_reaches(self, cache: Entry | RemoteCache, whose: str, own: Entry) -> None:
        """Raise ParamInvalid if the link does not reach a cache that the other end is to move bytes from or to.

        Over HCCS it does not reach HOST memory, over data connections not the DEVICE memory of NPUs.

        Args:
            own: the cache of this end that the bytes go to or come from, which may be the same.
        """
        if cache.placement is Placement.HOST and not self.reaches_host:
            raise ParamInvalid(
                f"cache {cache.cache_id} of {whose} is in HOST memory: a link over HCCS reaches a peer's DEVICE memory only",
                hint="make that cache with Placement.DEVICE, or set HCCL_INTRA_ROCE_ENABLE=1 at both ends",
            )
        if self.npus:
            at_both = [("this cluster", own)] if cache is own else [("this cluster", own), (whose, cache)]
            for (name, each), is_npu in zip(at_both, self.npus, strict=False):
                if is_npu and each.placement is Placement.DEVICE:
                    raise ParamInvalid(
                        f"cache {each.cache_id} of {name} is in DEVICE memory of an NPU, which travels by HCCL only: "
                        "this link is over TCP",
                        hint="make that cache with Placement.HOST",
                    )


def traits_of(channel: Channel, peer: Endpoint) -> Traits:
    """Return the traits of a link by its first channel and the peer's endpoint."""
    npus = not channel.reaches_device, channel.has_connections and peer.runtime != "soft"
    return Traits(
        channel.has_one_queue,
        channel.takes_gates,
        channel.reaches_host,
        channel.has_connections,
        channel.needs_loans,
        npus if any(npus) else (),
    )
