"""Orders of the context connector's scheduler half to its worker halves, with each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True)
class Blocks:
    """Blocks of a request, and their hashes."""

    request_id: str
    hashes: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass
class ContextOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """The loads and saves that the scheduler orders for one step.

    Attributes:
        loads: blocks to load from the cache before the step is computed.
        saves: blocks that this step completes.
        finished: requests of which nothing more will be saved; their blocks wait for earlier saves.
        cancels: loads that are no longer needed.
        preempted: requests whose blocks this step may overwrite.
    """

    loads: list[Blocks] = field(default_factory=list)
    saves: list[Blocks] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
