"""Chosen by ``AIODATADIST_HARDWARE=1`` or ``-m hardware``; skipped in any other run."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.hardware import remote
from tests.hardware.member import Member, member
from tests.hardware.place import Place, places

HERE = Path(__file__).parent
SECONDS = 600
"""Of one test: HCCL waits 120 for a link, and an abort may take 60."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--peer", metavar="HOST:PORT", help="tests/hardware: where tests.hardware.peer runs on another server"
    )
    parser.addoption("--host", default="127.0.0.1", help="tests/hardware: address of this server, for the other one")


def is_chosen(config: pytest.Config) -> bool:
    chosen = re.search(r"(?<!not )\bhardware\b", config.getoption("markexpr") or "")
    return bool(chosen) or os.environ.get("AIODATADIST_HARDWARE") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    own = [item for item in items if HERE in item.path.parents]
    chosen = is_chosen(config)
    if own and chosen and os.environ.get("AIODATADIST_RUNTIME") != "ascend":
        raise pytest.UsageError("tests/hardware are for an NPU: set AIODATADIST_RUNTIME=ascend, or say `make hardware`")
    for item in own:
        item.add_marker(pytest.mark.hardware)
        item.add_marker(pytest.mark.timeout(SECONDS))
        if not chosen:
            item.add_marker(pytest.mark.skip(reason="needs two NPUs: make hardware"))


@pytest.fixture
def mine(request: pytest.FixtureRequest) -> Place:
    """Return the end that the tests themselves are."""
    return places(request.config.getoption("--host"))[0]


@asynccontextmanager
async def the_peer(request: pytest.FixtureRequest) -> AsyncIterator[remote.Remote]:
    if where := request.config.getoption("--peer"):
        host, _, port = where.rpartition(":")
        async with remote.connected(host.strip("[]"), int(port)) as peer:
            yield peer
    else:
        async with remote.started(places()[1]) as peer:
            yield peer


@pytest.fixture
async def peer(request: pytest.FixtureRequest) -> AsyncIterator[remote.Remote]:
    """Start the other process, on the other device. It has no cluster so far."""
    async with the_peer(request) as found:
        yield found


class Pair:
    """Cluster 2 here and cluster 1 there, linked, each with a cache."""

    def __init__(self, here: Member, there: remote.Remote) -> None:
        self.here = here
        self.there = there

    async def allocate(self, tensors: int, blocks: int, nbytes: int) -> None:
        await self.here.allocate(tensors, blocks, nbytes)
        await self.there.ask("allocate", cluster_id=1, tensors=tensors, blocks=blocks, nbytes=nbytes)


@asynccontextmanager
async def linked(place: Place, there: remote.Remote, pool: int = 64 << 20, **options: Any) -> AsyncIterator[Pair]:
    await there.open(1, pool, **options)
    async with member(place, 2, pool, **options) as here:
        await there.link(here, 1)
        yield Pair(here, there)


@pytest.fixture
async def pair(mine: Place, peer: remote.Remote) -> AsyncIterator[Pair]:
    """Make a pair with 8 tensors of 16 blocks of 64 KiB, 8 MiB in all."""
    async with linked(mine, peer) as found:
        await found.allocate(8, 16, 64 << 10)
        yield found
