"""The cluster that a link belongs to, as far as the link needs to know it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aiodatadist._cache.digester import Digester
    from aiodatadist._cache.registry import CacheRegistry
    from aiodatadist._config.plain_networks import PlainNetworks
    from aiodatadist._counting import Totals
    from aiodatadist._link.control.block_leases import BlockLeases
    from aiodatadist._link.control.peer_share import PeerShares
    from aiodatadist._transport import OpenSockets
    from aiodatadist._values.peer_rights import PeerRights
    from aiodatadist._wire.data_proof import ChannelKey
    from aiodatadist._wire.proved import Proved


class LinkHost(Protocol):
    """The cluster that a link belongs to."""

    @property
    def registry(self) -> CacheRegistry:
        """The caches of the cluster."""
        ...

    @property
    def block_leases(self) -> BlockLeases:
        """The leases of blocks that the cluster keeps for peers."""
        ...

    @property
    def totals(self) -> Totals:
        """The totals of the cluster, over all its links."""
        ...

    @property
    def peer_shares(self) -> PeerShares:
        """The shares of all peers of the cluster, and their limits."""
        ...

    @property
    def digester(self) -> Digester:
        """The digester, which computes checksums of the cluster's caches."""
        ...

    @property
    def one_sided(self) -> bool:
        """True if the end that wants bytes moves them; otherwise it asks the peer to."""
        ...

    @property
    def links_have_owners(self) -> bool:
        """True if a link belongs to the end that asked for it, until the other end owns it, too."""
        ...

    @property
    def transfer_checksum(self) -> bool:
        """True if every transfer is compared by checksums."""
        ...

    @property
    def timeout(self) -> float:
        """The seconds that one transfer may take."""
        ...

    @property
    def check_here(self) -> Callable[[], None]:
        """A function that raises LLMException if its caller is not on the cluster's event loop.

        In a forked child it raises ForkError.
        """
        ...

    @property
    def expect_data(self) -> Callable[[ChannelKey, int, bool], AbstractContextManager[OpenSockets]]:
        """A function that returns a context inside which the data connections of a channel are accepted.

        Its arguments are the channel's key, the number of connections, and True if their bytes may travel without seals. The
        context's value waits for the connections.
        """
        ...

    @property
    def plain_networks(self) -> PlainNetworks:
        """The networks on which bytes of data connections may travel without seals, if the peer says so, too."""
        ...

    def rights_of(self, proved: Proved | None, cluster_id: int) -> PeerRights:
        """Return the rights of a peer with this credential; None: it has proved none. Raises AuthError if it may not link."""
        ...

    def serving_a_request(self, cluster_id: int) -> AbstractContextManager[None] | None:
        """Return a context to enter around the answer to a peer's request, or None.

        Entering it raises LLMException if something else is under way.
        """
        ...

    def heard(self, cluster_id: int, generation: int, payload: bytes, taken: Callable[[], None]) -> None:
        """Take a notification of a peer, which came over the link of this generation. ``taken`` is called when it is read."""
