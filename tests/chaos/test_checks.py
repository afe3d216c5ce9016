"""A chaos run sees what it is there to see: each defect that is planted here is found, and without one nothing is."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest

from aiodatadist import Cache, CacheManager, LLMClusterInfo
from aiodatadist._cache.consumption import Consumption
from aiodatadist._cache.registry import CacheRegistry
from aiodatadist._cli.chaos import large_copies, side
from aiodatadist._cli.chaos.large_copies import LargeInbox
from aiodatadist._cli.chaos.sizes import LINK_MILLIS, PULLER
from aiodatadist._cli.chaos.user_target import UserSource, UserTarget
from aiodatadist._cluster.rank_groups import RankGroups
from aiodatadist._concurrency.deadlines import Deadlines
from aiodatadist.testing import BlockLedger, soft_fault, soft_faults_cleared
from tests.chaos.both import Both, both
from tests.profiles import at_night

pytestmark = pytest.mark.timeout(120)

Plant = Callable[[pytest.MonkeyPatch], None]
LATE = 0.002
"""Seconds after which a byte is written that must not be."""


def poke(addresses: list[int]) -> None:
    for address in addresses:
        place = ctypes.c_ubyte.from_address(address)
        place.value ^= 255


POKES: list[asyncio.TimerHandle] = []
"""That are cancelled before the memory is gone."""


def poke_later(addresses: list[int]) -> None:
    POKES.append(asyncio.get_running_loop().call_later(LATE, poke, addresses))


def poke_no_more() -> None:
    while POKES:
        POKES.pop().cancel()


def a_late_byte_in_unregistered_memory(patch: pytest.MonkeyPatch) -> None:
    unregister = CacheManager.unregister_cache

    async def and_write(self: CacheManager, cache_id: int) -> None:
        entry = self._registry.table.find(cache_id)
        await unregister(self, cache_id)
        if entry is not None:
            poke_later([entry.addresses[0]])

    patch.setattr(CacheManager, "unregister_cache", and_write)


def a_late_byte_behind_a_transfer_that_ended(patch: pytest.MonkeyPatch) -> None:
    wait_usable = CacheRegistry.wait_usable

    async def and_write(self: CacheRegistry, cache: Cache) -> None:
        await wait_usable(self, cache)
        desc = cache.cache_desc
        poke_later([cache.tensor_addrs[0] + block * desc.stride for block in range(1, desc.shape[0], 2)])

    patch.setattr(CacheRegistry, "wait_usable", and_write)


async def _at_once(*_: object) -> None:
    """Without a look at what is under way."""


def memory_is_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheManager, "unregister_cache", _at_once)


def memory_is_given_back_and_can_be_pulled(patch: pytest.MonkeyPatch) -> None:
    async def always(*_: object) -> bool:
        return True

    memory_is_given_back_too_early(patch)
    patch.setattr(UserSource, "is_parted", always)


def deadlines_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    a_device_that_hangs(patch)
    patch.setattr(Deadlines, "add", lambda *_: None)


def a_device_that_hangs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(side, "LATE_TURNS", 8)
    soft_fault(";".join(f"HcclBatchGet:hang@{number}" for number in range(10, 100, 10)))


def flipped_bits_of_gets(_: pytest.MonkeyPatch) -> None:
    soft_fault("HcclBatchGet:flip=100@*")


def flipped_bits_of_puts(_: pytest.MonkeyPatch) -> None:
    soft_fault("HcclBatchPut:flip=100@*")


def flipped_bits_of_user_slots(patch: pytest.MonkeyPatch) -> None:
    """And of nothing else: other pulls into that task's memory are left out."""
    flipped_bits_of_gets(patch)

    async def nothing(*_: object) -> None:
        await asyncio.sleep(0)

    patch.setattr(UserTarget, "pull", nothing)
    patch.setattr(UserTarget, "push", nothing)


def keys_are_not_consumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Consumption, "pulled", lambda *_: None)


def communicators_are_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankGroups, "unlink", _at_once)


FOUND: dict[str, tuple[str, Plant, str, str]] = {
    "late byte, unregistered": ("one-sided", a_late_byte_in_unregistered_memory, "I2", "user"),
    "late byte, ended": ("request", a_late_byte_behind_a_transfer_that_ended, "I2", "reclaimed, and then written into"),
    "late byte, ended, v1": ("v1", a_late_byte_behind_a_transfer_that_ended, "I2", "reclaimed, and then written into"),
    "given back too early": ("one-sided", memory_is_given_back_too_early, "I2", "the memory is given back, and there is"),
    "given back, and pulled": ("one-sided", memory_is_given_back_and_can_be_pulled, "I6", "bytes of memory that was given"),
    "no deadlines": ("one-sided", deadlines_are_forgotten, "I3", "its deadline of"),
    "flips, user memory": ("one-sided", flipped_bits_of_gets, "I6", "task user 1"),
    "flips, by ranks": ("ranks", flipped_bits_of_gets, "I6", "task pull 1"),
    "flips, v1": ("v1", flipped_bits_of_puts, "I6", "task pull 1"),
    "keys that stay, v1": ("v1", keys_are_not_consumed, "I8", "was consumed, and could be pulled once more"),
    "flips, user slots": ("one-sided", flipped_bits_of_user_slots, "I6", "task user 1"),
    "communicators that stay": ("ranks", communicators_are_not_forgotten, "I5", "is unlinked, and OK"),
}  # fmt: skip
"""Profile, what is planted, and the rule and the words of what has to be found."""


AT_NIGHT = {
    "late byte, ended, v1",
    "given back, and pulled",
    "flips, by ranks",
    "flips, v1",
    "flips, user slots",
    "communicators that stay",
}
"""Defects that resemble another entry, and run at night. Every run breaks each rule in at least one profile."""


@pytest.mark.parametrize("defect", [at_night(each) if each in AT_NIGHT else each for each in FOUND])
async def test_a_defect_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, plant, rule, words = FOUND[defect]
    with soft_faults_cleared(), monkeypatch.context() as patch:
        async with both(profile, f"checks {os.getpid()}") as ends:
            plant(patch)
            await ends.go_on()

            def is_found() -> bool:
                return any(found == rule and words in what for found, what in ends.found)

            try:
                await ends.until(is_found)
            finally:
                patch.undo()
                poke_no_more()
            assert is_found(), (ends.found, ends.done)


ENOUGH: dict[str, tuple[str, ...]] = {
    "one-sided": (
        "pull_blocks critical",
        "pull_blocks background",
        "pull_blocks user",
        "push_blocks user",
        "pull_cache user",
    ),
    "calm": ("pull_blocks", "push_blocks", "pull_cache", "check_link_status"),
    "calm-blocking": ("pull_blocks", "push_blocks", "pull_cache", "swap_blocks"),
    "calm-v1": ("pull_blocks", "pull_cache", "layers"),
    "blocking": ("pull_blocks critical", "push_blocks", "pull_cache", "pull_leased", "copy_blocks"),
    "request": ("pull_blocks critical", "pull_blocks user", "pull_leased", "layers"),
    "v1": ("pull_blocks", "pull_cache", "get_cache_tensors", "receive_layers", "check_link_status"),
    "ranks": ("link by ranks", "unlink by ranks", "pull_blocks", "pull_blocks user"),
}
"""Operations that each profile has to have done."""
EACH_CHANGE = {"one-sided", "v1", "calm"}


@pytest.mark.parametrize("profile", [each if each in EACH_CHANGE else at_night(each) for each in ENOUGH])
async def test_without_a_defect_nothing_is_found(profile: str) -> None:
    async with both(profile, f"checks {os.getpid()}") as ends:
        await ends.go_on()
        await ends.until(lambda: ends.found or all(ends.good(each) for each in ENOUGH[profile]))
        await ends.look()
        transfer = next(each for each in ENOUGH[profile] if each.startswith("pull_blocks"))
        before = ends.good(transfer)
        await ends.go_on()
        await ends.until(lambda: ends.found or ends.good(transfer) > before)
        await ends.look()
    assert ends.found == []
    assert all(ends.good(each) for each in ENOUGH[profile]), ends.done


@pytest.mark.parametrize("profile", ["calm", at_night("calm-blocking"), at_night("calm-v1")])
async def test_a_link_that_is_lost_where_nothing_may_fail_is_found(profile: str) -> None:
    async with both(profile) as ends:
        await ends.go_on()
        await ends.until(lambda: ends.found or ends.good("pull_blocks"))
        assert ends.found == []
        puller = LLMClusterInfo(PULLER)
        puller.append_remote_ip_info("127.0.0.1", 1)  # without await an address is wanted, as upstream does
        await ends.owner.doors[0].datadist.unlink_clusters([puller], LINK_MILLIS, force=True)

        def is_found() -> bool:
            return any(rule == "I3" and "the link to cluster 1 was lost" in what for rule, what in ends.found)

        await ends.until(is_found)
    assert is_found(), ends.found


async def large(ends: Both, is_enough: Callable[[], Any]) -> None:
    """Have the puller push large caches until it is enough."""

    def wants_more() -> bool:
        ends.puller.is_large_wanted = True
        return bool(is_enough())

    await ends.go_on()
    await ends.until(wants_more)
    assert is_enough(), ends.done


async def test_a_large_push_lands_whole() -> None:
    async with both("one-sided", large_block=1 << 20) as ends:
        await large(ends, lambda: ends.found or (ends.good("push_blocks large") and ends.good("deallocate large")))
        await ends.look()
    assert ends.found == []


async def test_a_late_byte_in_memory_that_was_given_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    use_memory, write = LargeInbox.use_memory, large_copies.write_all

    async def lost(_: LargeInbox) -> bool:
        return True

    async def and_poke(ledger: BlockLedger) -> None:
        await write(ledger)
        ledger.piece(1, 9)[5] ^= 255

    async def used_by_another(inbox: LargeInbox) -> None:
        monkeypatch.setattr(large_copies, "write_all", and_poke)
        await use_memory(inbox)

    monkeypatch.setattr(LargeInbox, "is_lost", lost)
    monkeypatch.setattr(LargeInbox, "use_memory", used_by_another)
    async with both("one-sided", large_block=1 << 20) as ends:
        await large(ends, lambda: any("memory that was given on: block 9" in what for _, what in ends.found))


async def test_what_a_request_leaves_in_the_pool_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget_nothing(*_: Any) -> None:
        return

    async with both("v1") as ends:
        await ends.look()
        with monkeypatch.context() as patch:
            patch.setattr(CacheRegistry, "remove_key", forget_nothing)
            patch.setattr(Consumption, "pulled", lambda *_: None)
            await ends.go_on()
            await ends.until(lambda: ends.good("allocate request") > 2)
            await ends.look()
    assert any(rule == "I5" and what.startswith("pool_bytes: ") for rule, what in ends.found), ends.found


async def test_a_device_that_hangs_holds_no_deadline_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with soft_faults_cleared(), monkeypatch.context() as patch:
        async with both("one-sided") as ends:
            a_device_that_hangs(patch)
            await ends.go_on()
            await ends.until(lambda: sum(n for (_, status), n in ends.done.items() if status == "LLM_TIMEOUT") > 4)
            assert [what for _, what in ends.found if "its deadline" in what] == []
