"""Values of an engine's own names: every call ends once, with what became of each key."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from aiodatadist import LLMException
from aiodatadist._adapters.value_service import ValueService, ValueSettings, short
from aiodatadist.context_caching import EmsInvalidArgument
from tests.context_caching.servers import RedisServer, need_redis, running
from tests.keys import HEX

Make = Callable[..., "Caller"]


class Caller:
    """Calls, and waits for what became of them."""

    def __init__(self, **settings: Any) -> None:
        self.service = ValueService(ValueSettings(**{"pool": "memory:?bytes=4MiB", **settings}))

    def _hear(self, call: Callable[..., None], *words: Any) -> list[bool]:
        heard: queue.SimpleQueue[list[bool]] = queue.SimpleQueue()
        call(*words, heard.put)
        outcome = heard.get(timeout=30)
        assert heard.empty()
        return outcome

    def save(self, values: dict[str, bytes]) -> list[bool]:
        return self._hear(self.service.save, list(values), [bytearray(value) for value in values.values()])

    def load(self, keys: Sequence[str], nbytes: int) -> list[bytes | None]:
        buffers = [bytearray(nbytes) for _ in keys]
        found = self._hear(self.service.load, keys, buffers)
        return [bytes(buffer) if there else None for buffer, there in zip(buffers, found, strict=True)]

    def look_up(self, *keys: str) -> list[bool]:
        return self._hear(self.service.look_up, keys)

    def remove(self, *keys: str) -> list[bool]:
        return self._hear(self.service.remove, keys)


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def made(**settings: Any) -> Caller:
            caller = Caller(**settings)
            stack.enter_context(closing(caller.service))
            return caller

        yield made


def test_every_name_has_a_key_of_its_own() -> None:
    """Names have texts of clients, such as a tag or a ``cache_salt``, and JSON can have half a surrogate pair."""
    names = ["", "a", "\ud800", "\udfff", "a\0b", "\u20ac", "x" * 100_000]
    keys = {short(name) for name in names}
    assert len(keys) == len(names)
    assert {len(key) for key in keys} == {64}
    assert short("\u20ac") == sha256("\u20ac".encode()).hexdigest(), "as older versions named it"


def test_what_one_stores_another_loads(make: Make) -> None:
    one, other, third = make(), make(), make(namespace="other")
    assert one.save({"a": b"1234", "b": b"5678"}) == [True, True]
    assert other.look_up("a", "x", "b") == [True, False, True]
    assert other.load(["a", "b"], 4) == [b"1234", b"5678"]
    assert third.look_up("a") == [False]
    assert other.remove("a") == [True]
    assert one.look_up("a", "b") == [False, True]
    assert one.service.check_health()
    assert one.look_up() == []


def test_holes_do_not_hide_what_is_behind_them(make: Make) -> None:
    one = make()
    one.save({"b": b"22", "d": b"44", "long": b"55555", "f": b"66"})
    assert one.load(["a", "b", "c", "d", "long", "f"], 2) == [None, b"22", None, b"44", None, b"66"]


def test_what_finds_no_room_is_not_stored(make: Make) -> None:
    one = make(pool="memory:?bytes=1MiB")
    assert one.save({"large": bytes(2 << 20), "small": b"1"}) == [False, True]


def test_closing_ends_all_calls(make: Make) -> None:
    one = make()
    heard: queue.SimpleQueue[list[bool]] = queue.SimpleQueue()
    for i in range(50):
        one.service.save([f"{i}"], [bytearray(1 << 16)], heard.put)
    one.service.close()
    assert len([heard.get(timeout=10) for _ in range(50)]) == 50
    with pytest.raises(LLMException, match="closed"):
        one.service.look_up(["a"], heard.put)


def test_a_pool_that_dies(make: Make) -> None:
    need_redis()
    server = RedisServer()
    with running(server):
        one = make(pool=server.url, seconds=2)
        assert one.save({"a": b"1"}) == [True]
        server.kill()
        assert one.look_up("a", "b") == [False, False]
        assert one.load(["a"], 1) == [None]
        assert one.save({"c": b"1"}) == [False]


def test_what_engines_share_is_sealed_if_the_url_says_so(make: Make, tmp_path: Path) -> None:
    """An engine with the key reads it, one without it reads nothing, and what that one writes is not used."""
    need_redis()
    keys = tmp_path / "seal"
    keys.write_text(f"first {HEX}\n")
    keys.chmod(0o600)
    with running(server := RedisServer()):
        sealed = f"{server.url}?seal_key_file={keys}"
        one, other, stranger = make(pool=sealed), make(pool=sealed), make(pool=server.url)
        assert one.save({"a": b"secret" * 100}) == [True]
        assert other.load(["a"], 600) == [b"secret" * 100]
        assert stranger.load(["a"], 600) == [None]
        assert stranger.save({"b": b"forged" * 100}) == [True]
        assert one.load(["b", "a"], 600) == [None, b"secret" * 100]
    keys.chmod(0o604)
    with pytest.raises(EmsInvalidArgument, match="mode 0604"):
        make(pool=sealed)


def test_what_cannot_be() -> None:
    with pytest.raises(EmsInvalidArgument, match="nothing"):
        ValueService(ValueSettings(pool="nothing://x"))
    assert len(short("x" * 5000)) == 64
