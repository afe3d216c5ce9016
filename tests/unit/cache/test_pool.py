"""Pages of a pool: what is handed out never overlaps, and what comes back is joined again."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aiodatadist import InternalError, LLMStatusCode, OutOfMemory, ParamInvalid
from aiodatadist._cache.pool import PagePool, PoolConfig, PoolUsage
from tests.profiles import at_night, examples

BASE = 2**40 + 4096
PAGE = 1 << 16
MIB = 1 << 20


def pool(pages: int = 16, *, pinned: int = 0) -> PagePool:
    return PagePool("the pool", BASE, PoolConfig(memory_size=pages * PAGE), lambda: (pinned, 0))


def usage(total: int, free: int, largest: int, pinned: int = 0) -> PoolUsage:
    """Return a usage from numbers of pages. ``pinned`` is in bytes."""
    return PoolUsage(total * PAGE, free * PAGE, largest * PAGE, pinned)


def test_pool_of_one_mebibyte_has_sixteen_pages() -> None:
    whole = PagePool("x", BASE, PoolConfig.parse('{"memory_size": 1048576, "page_shift": 16}', "mem_pool_cfg"))
    assert whole.usage() == usage(16, 16, 16)
    whole.allocate(65_537)
    assert whole.usage() == usage(16, 14, 14)


@pytest.mark.parametrize("shift", [9, 31])
def test_pages_have_a_size_within_limits(shift: int) -> None:
    with pytest.raises(ParamInvalid, match=f"mem_pool_cfg: page_shift is {shift}: must be"):
        PoolConfig.parse(f'{{"memory_size": 1048576, "page_shift": {shift}}}', "mem_pool_cfg")


@pytest.mark.parametrize(("nbytes", "pages"), [(1, 1), (PAGE, 1), (PAGE + 1, 2), (MIB, 16)])
def test_allocation_is_rounded_up_to_pages(nbytes: int, pages: int) -> None:
    some = pool()
    assert some.allocate(nbytes) == BASE
    assert some.usage().free == (16 - pages) * PAGE


@pytest.mark.parametrize("nbytes", [0, -1])
def test_allocation_has_at_least_one_byte(nbytes: int) -> None:
    some = pool()
    with pytest.raises(ParamInvalid, match=f"the pool: nbytes is {nbytes}: an allocation has at least 1 byte"):
        some.allocate(nbytes)
    assert some.usage() == usage(16, 16, 16)


def test_what_is_left_of_the_last_page_is_not_used() -> None:
    some = PagePool("x", BASE, PoolConfig(memory_size=3 * 1024 + 1023, page_shift=10))
    assert [some.allocate(1024) - BASE for _ in range(3)] == [0, 1024, 2048]
    assert some.usage() == PoolUsage(3072, 0, 0, 0)


def test_smallest_hole_that_is_large_enough_is_taken() -> None:
    some = pool()
    addresses = [some.allocate(pages * PAGE) for pages in (4, 1, 2, 1, 3, 5)]
    for hole in (0, 2, 4):  # holes of 4, 2 and 3 pages
        some.free(addresses[hole])
    assert some.allocate(2 * PAGE) == addresses[2]
    assert some.allocate(2 * PAGE) == addresses[4]
    assert some.usage() == usage(16, 5, 4)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_neighbours_are_joined_in_any_order(order: tuple[int, ...]) -> None:
    some = pool(3)
    addresses = [some.allocate(PAGE) for _ in range(3)]
    for i in order:
        some.free(addresses[i])
    assert some.usage() == usage(3, 3, 3)
    assert some.allocate(3 * PAGE) == BASE


def test_no_room_is_said_with_what_there_is() -> None:
    some = pool(pinned=123)
    addresses = [some.allocate(4 * PAGE) for _ in range(4)]
    some.free(addresses[0])
    some.free(addresses[2])
    assert some.usage() == usage(16, 8, 4, pinned=123)
    with pytest.raises(OutOfMemory) as caught:
        some.allocate(4 * PAGE + 1)
    assert caught.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
    assert str(caught.value).startswith(
        "the pool: 262145 bytes do not fit: 524288 of 1048576 bytes are free, the largest piece has 262144, "
        "123 are pinned by transfers"
    )
    assert some.usage() == usage(16, 8, 4, pinned=123)


@pytest.mark.parametrize("wrong", [BASE - PAGE, BASE + 1, BASE + PAGE, BASE + 2 * PAGE, BASE + MIB, 0])
def test_address_that_was_not_handed_out_cannot_be_freed(wrong: int) -> None:
    some = pool()
    mine = some.allocate(2 * PAGE)
    with pytest.raises(InternalError, match=f"the pool: {wrong:#x} cannot be freed"):
        some.free(wrong)
    assert some.usage() == usage(16, 14, 14)
    some.free(mine)


def test_nothing_is_freed_twice() -> None:
    some = pool()
    mine, other = some.allocate(PAGE), some.allocate(PAGE)
    some.free(mine)
    with pytest.raises(InternalError, match="no allocation begins there"):
        some.free(mine)
    assert some.usage() == usage(16, 15, 14)
    some.free(other)
    assert some.usage() == usage(16, 16, 16)


def test_transfers_are_not_asked_while_there_is_room() -> None:
    def pinned() -> tuple[int, int]:
        raise AssertionError("asked")

    some = PagePool("x", BASE, PoolConfig(memory_size=PAGE), pinned)
    some.free(some.allocate(1))


def test_largest_pool_there_may_be() -> None:
    some = PagePool("x", 0, PoolConfig(memory_size=(2**32 - 2) << 30, page_shift=30))
    assert some.allocate(1) == 0
    assert some.usage().largest == (2**32 - 3) << 30


def test_the_oldest_pin_is_told_where_there_is_one() -> None:
    some = PagePool("the pool", BASE, PoolConfig(memory_size=PAGE), lambda: (1, 0), lambda: " (by a transfer)")
    some.allocate(1)
    with pytest.raises(OutOfMemory, match=r"1 are pinned by transfers and peers \(by a transfer\); pages have"):
        some.allocate(1)


def test_several_pieces_are_taken_all_or_none_and_the_message_says_what_is_free_then() -> None:
    some = pool(pinned=0)
    held = some.take_all(3 * PAGE, 4)
    assert held is not None
    assert some.take_all(2 * PAGE, 3) is None
    assert some.usage() == usage(16, 4, 4)
    assert str(some.no_room(2 * PAGE, 3)).startswith(
        "the pool: 3 x 131072 bytes do not fit: 262144 of 1048576 bytes are"
    )
    for address in held:
        some.free(address)
    assert some.usage() == usage(16, 16, 16)


@pytest.mark.parametrize(("count", "seed"), [(20_000, 1), at_night(1_000_000, 2)])
def test_nothing_overlaps_however_often_it_is_cut_and_joined(count: int, seed: int) -> None:
    chance, pages = random.Random(seed), 512
    some = PagePool("x", BASE, PoolConfig(memory_size=pages << 10, page_shift=10))
    owners, held = bytearray(pages), list[tuple[int, int]]()
    for _ in range(count):
        wanted = min(int(chance.expovariate(0.1)) + 1, 200)
        address = some.take_all(wanted << 10, 1) if chance.random() < 0.52 else None
        if address is not None:
            first = (address[0] - BASE) >> 10
            assert not any(owners[first : first + wanted]), "it is another's"
            owners[first : first + wanted] = b"\1" * wanted
            held.append((first, wanted))
        elif held:
            at = chance.randrange(len(held))
            held[at], held[-1] = held[-1], held[at]
            first, length = held.pop()
            some.free(BASE + (first << 10))
            owners[first : first + length] = bytes(length)
        assert some.usage().free == owners.count(0) << 10
    for first, _ in held:
        some.free(BASE + (first << 10))
    assert some.usage() == PoolUsage(pages << 10, pages << 10, pages << 10, 0)


class Pages(RuleBasedStateMachine):
    """A pool beside a plain model of it: the set of pages that are free."""

    COUNT = 24
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool("x", BASE, PoolConfig(memory_size=self.COUNT << 10, page_shift=10))
        self.free = set(range(self.COUNT))

    def extents(self) -> list[int]:
        """Return the lengths of the runs of free pages."""
        text = "".join("f" if page in self.free else " " for page in range(self.COUNT))
        return [len(run) for run in text.split()]

    @rule(target=held, nbytes=st.integers(1, 8 << 10))
    def allocate(self, nbytes: int) -> tuple[int, int]:
        pages = -(-nbytes // 1024)
        before = self.extents()
        try:
            address = self.pool.allocate(nbytes)
        except OutOfMemory:
            assert max(before, default=0) < pages
            return BASE, 0
        first, inside = divmod(address - BASE, 1024)
        assert inside == 0
        mine = set(range(first, first + pages))
        assert mine <= self.free  # inside the pool, and no other owner's
        self.free -= mine
        left = list(before)
        fitting = min(length for length in before if length >= pages)
        left.remove(fitting)
        assert sorted(self.extents()) == sorted(left + ([fitting - pages] if fitting > pages else []))
        return address, pages

    @rule(allocation=consumes(held))
    def give_back(self, allocation: tuple[int, int]) -> None:
        address, pages = allocation
        if pages:
            self.pool.free(address)
            first = (address - BASE) // 1024
            self.free |= set(range(first, first + pages))

    @rule(page=st.integers(-2, COUNT + 2))
    def free_what_is_free(self, page: int) -> None:
        if page in self.free or not 0 <= page < self.COUNT:
            with pytest.raises(InternalError):
                self.pool.free(BASE + page * 1024)

    @invariant()
    def counts_are_exact_and_neighbours_joined(self) -> None:
        free, largest = len(self.free), max(self.extents(), default=0)
        assert self.pool.usage() == PoolUsage(self.COUNT << 10, free << 10, largest << 10, 0)


Pages.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
TestPages = Pages.TestCase
