"""Context caches on several machines over a Redis server on another one: what one saved, the others load."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from tests.context_caching.servers import RedisServer, need_redis, running
from tests.machines.ends import Refused, reading
from tests.machines.networks import Machine, address, cable, forward, machines
from tests.machines.programs import weather
from tests.profiles import at_night

HASHES = [11, 12, 13, 14, 15]
REDIS = 6379


class FarRedis(RedisServer):
    """A Redis server on a machine. It has a password, as one on a network must."""

    PASSWORD = "of-tests"

    def __init__(self, machine: Machine, host: str) -> None:
        super().__init__(options=["--requirepass", self.PASSWORD])
        self._machine, self._host, self.port = machine, host, REDIS

    @property
    def url(self) -> str:
        return self.url_at(self._host, REDIS)

    def url_at(self, host: str, port: int) -> str:
        """Return the URL of the pool as a machine sees it that reaches it at this address."""
        place = f"[{host}]" if ":" in host else host
        return f"redis://:{self.PASSWORD}@{place}:{port}"

    def command(self) -> Sequence[str]:
        command = [self._host if word == "127.0.0.1" else word for word in super().command()]
        return ["ip", "netns", "exec", self._machine.namespace, *command]

    def ask(self, *words: str) -> bytes:
        return self._machine.inside(lambda: self.ask_at(self._host, *words))


@pytest.fixture(autouse=True)
def redis() -> None:
    need_redis()


@pytest.mark.parametrize("family", [4, at_night(6)])
def test_blocks_that_one_machine_saved_are_loaded_on_others(family: int) -> None:
    with machines("pool", "a", "b") as (pool, a, b), weather(pool, a, b) as net, ExitStack() as stack:
        server = FarRedis(pool, address(1, 1, family))
        stack.enter_context(running(server))
        writer, loader = (stack.enter_context(reading(each, server.url)) for each in (a, b))
        assert loader.call("load", hashes=HASHES) == 0
        assert writer.call("save", hashes=HASHES) == 5
        assert loader.call("load", hashes=[*HASHES, 16]) == 5
        net.change(delay=0.005, loss=0.01, late=0.05)
        assert loader.call("save", hashes=[*HASHES, 16]) == 6
        assert writer.call("load", hashes=[*HASHES, 16]) == 6
        assert net.wait_passed((1, 0), 10) > 0, "it went over the network"


def test_a_pool_that_cannot_be_reached_costs_a_call_its_timeout_and_is_used_again_later() -> None:
    with machines("pool", "a") as (pool, a), weather(pool, a) as net, ExitStack() as stack:
        server = FarRedis(pool, address(1, 1))
        stack.enter_context(running(server))
        cache = stack.enter_context(reading(a, server.url))
        assert cache.call("save", hashes=HASHES) == 5
        net.cut()
        with pytest.raises(Refused, match=r"EmsTimeout|EmsIoError"):
            cache.call("load", hashes=HASHES, timeout=1.0)
        net.mend()
        assert cache.call("load", hashes=HASHES) == 5


@pytest.mark.usefixtures("nft")
def test_a_pool_behind_a_forwarded_port_is_used() -> None:
    with machines("a", "router", "pool") as (a, router, pool), ExitStack() as stack:
        cable(a, router)
        cable(router, pool, net=2)
        router.set("ipv4/ip_forward", 1)
        forward(router, 7000, address(2, 2), REDIS)
        server = FarRedis(pool, address(2, 2))
        stack.enter_context(running(server))
        cache = stack.enter_context(reading(a, server.url_at(address(1, 2), 7000)))
        assert cache.call("save", hashes=HASHES) == 5
        assert cache.call("load", hashes=HASHES) == 5
