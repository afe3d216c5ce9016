"""What the scheduler's half of the context connector tells the worker's halves with each step."""

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
    """Of one step.

    Attributes:
        loads: what is to be had of the cache, before it is computed.
        saves: what this step completes.
        finished: requests of which nothing more will be saved; their blocks wait for the saves that there were.
        cancels: loads that are not needed any more.
        preempted: requests whose blocks this step may overwrite.
    """

    loads: list[Blocks] = field(default_factory=list)
    saves: list[Blocks] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
