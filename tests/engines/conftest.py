"""Engines that several files share: three at most, since each takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engines import Answer, Engine, free_port, opened, write_model

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 41}
"""A KV cache that is too small for all that a test asks for at a time."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def address() -> Answer:
    """Return the address of the prefill engine."""
    return {"host": "127.0.0.1", "port": free_port(), "cluster_id": 4711}


@pytest.fixture(scope="session")
def engines(model: Path, address: Answer) -> Iterator[tuple[Engine, Engine]]:
    settings = {"port": address["port"], "cluster_id": address["cluster_id"], "push": True, "lease_seconds": 10}
    settings["max_leased"] = 1.0  # a request of the longest prompt takes half of its small cache
    prefill = Engine(model, model / "prefill.log", settings, max_num_batched_tokens=512, **SMALL)
    others = {"device_id": 1, "pull_seconds": 20, "max_awaited": 1.0}  # for the same reason
    decode = Engine(model, model / "decode.log", others, **SMALL)
    with opened(prefill, decode):
        yield prefill, decode


@pytest.fixture(scope="session")
def alone(model: Path) -> Iterator[Engine]:
    """Start an engine that prefills and decodes, and knows of no other."""
    engine = Engine(model, model / "alone.log", None)
    with opened(engine):
        yield engine


@pytest.fixture
def pair(alone: Engine, engines: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """Return an engine that prefills, in steps of 512 tokens, and an engine that decodes."""
    return engines
