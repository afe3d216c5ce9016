"""The catalogue of a peer's caches: they are found by the names that callers use, until the peer takes them back."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aiodatadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from aiodatadist._cache.catalogue import Catalogue, RemoteCache
from aiodatadist._cache.names import Key, Name, name_of
from aiodatadist._values import peer_budget
from aiodatadist._values.descriptors import UNSET
from aiodatadist.errors import ProtocolError
from tests.held import turns
from tests.profiles import examples
from tests.unit.wire.examples import entry

REQUEST, PREFIX, BLOCKS = CacheKey(7, 10), CacheKey(7, UNSET, 0, 10), BlocksCacheKey(7, 8)


def told(*said: tuple[int, Key, int]) -> Catalogue:
    """Make a catalogue in which each cache id is the answer to a key, with a slot."""
    catalogue = Catalogue()
    for cache_id, key, slot in said:
        catalogue.learn(entry(cache_id=cache_id), name_of(key), slot)
    return catalogue


def found(catalogue: Catalogue, key: Key) -> tuple[int, int] | None:
    """Return the cache id and the slot behind a key."""
    answer = catalogue.find(key)
    return None if answer is None else (answer[0].cache_id, answer[1])


def remote(uses: int = 0) -> RemoteCache:
    cache = RemoteCache(entry())
    for _ in range(uses):
        cache.use()
    return cache


# ---- how much a peer may tell ----


def test_a_cache_that_no_transfer_touched_is_two_objects_to_the_garbage_collector() -> None:
    catalogue, said = Catalogue(), [entry(cache_id=number) for number in range(1, 1001)]
    before = len(gc.get_objects())
    for each in said:
        catalogue.learn(each)
    assert len(gc.get_objects()) - before < 2 * len(said) + 100


def test_a_peer_tells_of_a_limited_number_of_caches() -> None:
    catalogue = Catalogue()
    for number in range(1, peer_budget.HELD_CACHES + 1):
        catalogue.learn(entry(cache_id=number))
    with pytest.raises(ProtocolError, match="more than 4096 caches"):
        catalogue.learn(entry(cache_id=2**40))
    catalogue.learn(entry(cache_id=1), name_of(BLOCKS))  # one that is known
    catalogue.withdraw(1)
    catalogue.learn(entry(cache_id=2**40))
    assert len(catalogue) == peer_budget.HELD_CACHES


def test_a_peer_tells_of_a_limited_number_of_tensors() -> None:
    catalogue, tensors = Catalogue(), list(range(2**40, 2**40 + 4096))
    most = peer_budget.HELD_TENSORS // len(tensors)
    for number in range(1, most + 1):
        catalogue.learn(entry(cache_id=number, addresses=tensors))
    with pytest.raises(ProtocolError, match="more than 262144 tensors"):
        catalogue.learn(entry(cache_id=most + 1, addresses=tensors[:1]))
    catalogue.withdraw(1)
    catalogue.learn(entry(cache_id=most + 1, addresses=tensors))


def test_caches_that_were_taken_back_count_until_the_last_transfer_has_left_them() -> None:
    catalogue, tensors = Catalogue(), list(range(2**40, 2**40 + 4096))
    most = peer_budget.HELD_TENSORS // len(tensors)
    for number in range(1, most + 1):
        catalogue.learn(entry(cache_id=number, addresses=tensors))
        cache = catalogue.get(number)
        assert cache is not None
        cache.use()
        cache.use()
        catalogue.withdraw(number)
    assert len(catalogue) == 0
    assert cache is not None
    cache.release()
    with pytest.raises(ProtocolError, match="more than 262144 tensors"):
        catalogue.learn(entry(cache_id=most + 1, addresses=tensors[:1]))
    cache.release()
    for number in (most + 1, most + 1):  # no longer used when it is taken back, so gone at once
        catalogue.learn(entry(cache_id=number, addresses=tensors))
        catalogue.withdraw(number)


def test_caches_that_were_taken_back_count_to_the_limit_of_caches() -> None:
    catalogue = Catalogue()
    for number in range(1, peer_budget.HELD_CACHES + 1):
        catalogue.learn(entry(cache_id=number))
        cache = catalogue.get(number)
        assert cache is not None
        cache.use()
        catalogue.withdraw(number)
    with pytest.raises(ProtocolError, match="more than 4096 caches"):
        catalogue.learn(entry(cache_id=1))
    assert cache is not None
    cache.release()
    catalogue.learn(entry(cache_id=1))


# ---- names ----


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (BlocksCacheKey(7), Name("blocks", 0, 0)),
        (BlocksCacheKey(7, 8), Name("blocks", 0, 8)),
        (CacheKey(7, 10), Name("request", 10, 0)),
        (CacheKey(7, 10, 3), Name("request", 10, 3)),
        (CacheKey(7, UNSET, 3, 10), Name("prefix", 10, 3)),
        (CacheKey(7, 11, 3, 10), Name("prefix", 10, 3)),
        (CacheKeyByIdAndIndex(7, 5), Name("id", 5)),
        (CacheKeyByIdAndIndex(7, 5, 3), Name("id", 5)),
    ],
    ids=repr,
)
def test_name_is_the_key_in_its_name_space(key: Key, name: Name) -> None:
    assert name_of(key) == name


def test_name_is_the_same_at_either_end() -> None:
    assert name_of(CacheKey(7, 10)) == name_of(CacheKey(8, 10))
    assert name_of(BlocksCacheKey(7, 1)) == name_of(BlocksCacheKey(8, 1))


# ---- finding ----


def test_key_finds_its_cache_and_slot() -> None:
    catalogue = told((3, REQUEST, 2), (3, PREFIX, 1), (4, BLOCKS, 0), (5, CacheKeyByIdAndIndex(7, 5), 0))
    assert found(catalogue, REQUEST) == (3, 2)
    assert found(catalogue, PREFIX) == (3, 1)
    assert found(catalogue, BLOCKS) == (4, 0)
    assert found(catalogue, CacheKeyByIdAndIndex(7, 5)) == (5, 0)
    assert len(catalogue) == 3


def test_batch_index_of_an_id_is_the_callers() -> None:
    catalogue = told((5, CacheKeyByIdAndIndex(7, 5), 0))
    assert found(catalogue, CacheKeyByIdAndIndex(7, 5, 3)) == (5, 3)


@pytest.mark.parametrize(
    "key",
    [CacheKey(7, 11), CacheKey(7, 10, 1), CacheKey(7, 11, 0, 10), BlocksCacheKey(7, 10), CacheKeyByIdAndIndex(7, 3)],
    ids=repr,
)
def test_what_was_not_told_is_not_known(key: Key) -> None:
    assert told((3, REQUEST, 2)).find(key) is None


def test_cache_without_a_name_is_known_by_its_id_only() -> None:
    catalogue = Catalogue()
    catalogue.learn(entry(cache_id=5))
    cache = catalogue.get(5)
    assert cache is not None
    assert cache.cache_id == 5
    assert catalogue.find(CacheKeyByIdAndIndex(7, 5)) is None
    assert catalogue.get(6) is None


def test_cache_that_is_told_of_twice_is_the_same() -> None:
    catalogue = told((3, REQUEST, 2))
    before = catalogue.get(3)
    catalogue.learn(entry(cache_id=3), name_of(PREFIX), 1)
    catalogue.learn(entry(cache_id=3))
    assert catalogue.get(3) is before
    assert (found(catalogue, REQUEST), found(catalogue, PREFIX)) == ((3, 2), (3, 1))


def test_cache_is_what_the_peer_said() -> None:
    said = entry(cache_id=3, blocks=False, pieces=5, stride=32, addresses=[4096, 8192], epoch=9)
    cache = RemoteCache(said)
    assert (cache.cache_id, cache.blocks, cache.pieces, cache.stride, cache.epoch) == (3, False, 5, 32, 9)
    assert list(cache.addresses) == [4096, 8192]


# ---- taking back ----


def test_cache_that_was_taken_back_is_not_found_by_any_name() -> None:
    catalogue = told((3, REQUEST, 2), (3, PREFIX, 1), (4, BLOCKS, 0))
    cache = catalogue.get(3)
    assert catalogue.withdraw(3) is cache
    assert cache is not None
    assert cache.is_withdrawn
    assert (catalogue.find(REQUEST), catalogue.find(PREFIX), catalogue.get(3)) == (None, None, None)
    assert found(catalogue, BLOCKS) == (4, 0)
    assert len(catalogue) == 1


def test_what_is_not_held_can_be_taken_back() -> None:
    assert Catalogue().withdraw(3) is None
    catalogue = told((3, REQUEST, 0))
    catalogue.withdraw(3)
    assert catalogue.withdraw(3) is None


def test_name_that_went_to_another_cache_stays_there() -> None:
    catalogue = told((3, REQUEST, 2), (4, REQUEST, 1))
    catalogue.withdraw(3)
    assert found(catalogue, REQUEST) == (4, 1)


def test_cache_that_is_told_of_again_is_a_new_one() -> None:
    catalogue = told((3, REQUEST, 2))
    before = catalogue.withdraw(3)
    catalogue.learn(entry(cache_id=3), name_of(REQUEST), 2)
    after = catalogue.get(3)
    assert after is not None
    assert after is not before
    assert not after.is_withdrawn


class Telling(RuleBasedStateMachine):
    """Against two plain dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalogue()
        self.held: set[int] = set()
        self.names: dict[Key, tuple[int, int]] = {}

    keys = st.builds(CacheKey, st.just(7), st.integers(0, 3)) | st.builds(BlocksCacheKey, st.just(7), st.integers(0, 3))

    @rule(cache_id=st.integers(1, 4), key=st.none() | keys, slot=st.integers(0, 3))
    def learn(self, cache_id: int, key: Key | None, slot: int) -> None:
        self.catalogue.learn(entry(cache_id=cache_id), None if key is None else name_of(key), slot)
        self.held.add(cache_id)
        if key is not None:
            self.names[key] = (cache_id, slot)

    @rule(cache_id=st.integers(1, 4))
    def withdraw(self, cache_id: int) -> None:
        assert (self.catalogue.withdraw(cache_id) is not None) == (cache_id in self.held)
        self.held.discard(cache_id)
        self.names = {key: where for key, where in self.names.items() if where[0] != cache_id}

    @invariant()
    def agrees(self) -> None:
        assert len(self.catalogue) == len(self.held)
        for key in [make(7, i) for make in (CacheKey, BlocksCacheKey) for i in range(4)]:
            assert found(self.catalogue, key) == self.names.get(key)


Telling.TestCase.settings = settings(max_examples=examples(50), deadline=None)
TestTelling = Telling.TestCase


# ---- uses ----


async def test_who_waits_for_a_cache_is_called_in_the_turn_after_its_last_use_ended() -> None:
    cache, order = remote(uses=2), list[str]()
    cache.when_idle(lambda: order.append("idle"))
    for _ in range(2):
        await turns()
        order.append("release")
        cache.release()
    assert order == ["release", "release"]
    await turns()
    assert order == ["release", "release", "idle"]
    cache.use()
    cache.release()
    await turns()
    assert order.count("idle") == 1
