"""The engines that tests start, which skip without them; or fail, where ``AIODATADIST_REQUIRE_ENGINES`` is set."""

from __future__ import annotations

import os

import pytest

from aiodatadist._testing.servers import (
    MIB,
    PATIENCE,
    MooncakeLender,
    MooncakeMaster,
    RedisServer,
    Server,
    binary,
    eventually,
    make_cluster,
    missing_mooncake,
    missing_redis,
    redis_cluster,
    running,
)

__all__ = [
    "MIB",
    "PATIENCE",
    "MooncakeLender",
    "MooncakeMaster",
    "RedisServer",
    "Server",
    "binary",
    "eventually",
    "make_cluster",
    "missing_mooncake",
    "missing_redis",
    "need",
    "need_mooncake",
    "need_redis",
    "redis_cluster",
    "running",
]


def need(why_not: str) -> None:
    """Skip, visibly, what needs an engine that is absent; with ``AIODATADIST_REQUIRE_ENGINES=1`` it fails instead."""
    if why_not and os.environ.get("AIODATADIST_REQUIRE_ENGINES") == "1":
        pytest.fail(f"AIODATADIST_REQUIRE_ENGINES is set, but {why_not}")
    if why_not:
        pytest.skip(why_not)


def need_redis() -> None:
    need(missing_redis())


def need_mooncake() -> None:
    need(missing_mooncake())
