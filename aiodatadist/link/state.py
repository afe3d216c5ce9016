"""The cluster that a link belongs to, as far as the link needs to know it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aiodatadist.cache.digester import Digester
    from aiodatadist.cache.registry import CacheRegistry
    from aiodatadist.counting import Totals
    from aiodatadist.link.block_leases import BlockLeases


class LinkHost(Protocol):
    """The cluster that a link belongs to."""

    @property
    def registry(self) -> CacheRegistry: ...
    @property
    def block_leases(self) -> BlockLeases: ...
    @property
    def totals(self) -> Totals: ...
    @property
    def digester(self) -> Digester: ...
    @property
    def links_have_owners(self) -> bool: ...
    @property
    def transfer_checksum(self) -> bool: ...
    @property
    def timeout(self) -> float: ...
    @property
    def check_here(self) -> Callable[[], None]:
        """A function that raises LLMException if its caller is not on the cluster's event loop.

        In a forked child it raises ForkError.
        """
        ...

    def serving_a_request(self, cluster_id: int) -> AbstractContextManager[None] | None:
        """Return a context to enter around the answer to a peer's request, or None.

        Entering it raises LLMException if something else is under way.
        """
        ...

    def heard(self, cluster_id: int, generation: int, payload: bytes, taken: Callable[[], None]) -> None:
        """Take a notification of a peer, which came over the link of this generation. ``taken`` is called when it is read."""
