"""The cluster below an engine of HIXL: its links belong to the ends that ask for them, and it moves ranges by address."""

from __future__ import annotations

from aiodatadist._cache.task import CacheTask
from aiodatadist._cache_manager.caches import Caches
from aiodatadist._cluster.engine import Engine
from aiodatadist._config.llm_config import LLMConfig
from aiodatadist._datadist import LLMDataDist
from aiodatadist._device import TransferCompletion
from aiodatadist._link import Link


class RangeCluster(LLMDataDist):
    """A cluster that moves ranges and allocates no caches. It need not listen, although each end owns its links."""

    def _engine_config(self) -> LLMConfig:
        config = super()._engine_config()
        config.transfer_backend = "hixl"
        return config

    @property
    def engine(self) -> Engine:
        """The engine. Raises what every call on a cluster raises that is not initialised, or used elsewhere."""
        return self._running_here()

    def link_of(self, cluster_id: int) -> Link:
        """Return the link to a peer that this end has asked for. Raises NotLinked, or what ended the link."""
        link = self._running_here().links.find(cluster_id)
        link.session.check_ready()
        return link


class Ranges(Caches):
    """Memory of one cluster as caches of one tensor each, and its transfers of ranges of that memory."""

    @property
    def engine(self) -> Engine:
        """The engine of the cluster."""
        return self._engine

    def follow(
        self, what: str, peer: int, transfer: TransferCompletion, about: str, deadline: float | None
    ) -> CacheTask:
        """Return the task of a transfer that was started, and stop it after this many seconds."""
        self._limit(transfer, deadline)
        return self._task(what, peer, transfer, about)
