"""A channel that lends: the peer reaches the caches that it was told of, until it has released them, and no others."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiodatadist._cache.table import Entry
from aiodatadist._link.control.loans import Loans
from aiodatadist._link.control.peer_leases import PeerLeases
from aiodatadist._transport import Access, Channel, Region
from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import OutOfMemory


class Lending:
    """A channel that notes what it lends."""

    def __init__(self, reaches_device: bool = True) -> None:
        self.reaches_device = reaches_device
        self.lent: list[tuple[Region, Access]] = []

    def lend(self, regions: list[Region], access: Access) -> None:
        self.lent += [(region, access) for region in regions]

    def take_back(self, regions: list[Region], access: Access) -> None:
        for region in regions:
            self.lent.remove((region, access))


def entry(number: int, placement: Placement = Placement.HOST) -> Any:
    regions = [Region(4096 * number, 64, placement)]
    return SimpleNamespace(
        cache_id=number,
        placement=placement,
        nbytes=64,
        addresses=array("Q", [4096 * number]),
        regions=lambda: regions,
        hold=lambda _: None,
        drop_holder=lambda _: None,
    )


def leases(channel: Lending, access: dict[int, Access]) -> PeerLeases:
    made = PeerLeases(cast(Any, None), 1.0, lambda _: None, lambda _: None, lambda _: None)
    made.lend_by(Loans(cast(Channel, channel), lambda each: access[each.cache_id]))
    return made


def revoked(made: PeerLeases, cache: Any) -> None:
    made.revoke(cast(Entry, cache))
    made.on_revoked(cache.cache_id)


def test_a_cache_is_lent_once_and_taken_back_when_the_peer_has_released_it() -> None:
    channel, one, two = Lending(), entry(1), entry(2)
    made = leases(channel, {1: Access.ALL, 2: Access.WRITE})
    for cache in (one, two, one, one):
        made.told(cache)
    assert channel.lent == [(one.regions()[0], Access.ALL), (two.regions()[0], Access.WRITE)]
    made.revoke(one)
    assert len(channel.lent) == 2, "the peer may be in the middle of it"
    made.on_revoked(1)
    assert channel.lent == [(two.regions()[0], Access.WRITE)]
    made.told(one)
    assert len(channel.lent) == 2


def test_what_is_taken_back_is_what_was_lent_whatever_the_peer_may_do_by_then() -> None:
    channel, one, access = Lending(), entry(1), {1: Access.ALL}
    made = leases(channel, access)
    made.told(one)
    access[1] = Access.READ
    revoked(made, one)
    assert channel.lent == []


def test_what_the_peer_may_not_use_is_not_lent() -> None:
    channel, one = Lending(), entry(1)
    made = leases(channel, {1: Access.NONE})
    made.told(one)
    assert channel.lent == []
    revoked(made, one)
    assert channel.lent == []


class Full(Lending):
    """A channel that has no memory for a loan."""

    def lend(self, regions: list[Region], access: Access) -> None:
        raise OutOfMemory("there is no memory for a list")


def test_a_cache_that_could_not_be_lent_does_not_count_as_held() -> None:
    made = leases(Full(), {1: Access.ALL})
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            made.told(entry(1))
    assert (made.held(1), made.held_bytes) == (None, 0)


def test_memory_of_an_npu_is_not_lent_to_a_peer_over_tcp() -> None:
    channel = Lending(reaches_device=False)
    made = leases(channel, {1: Access.ALL, 2: Access.ALL})
    device, host = entry(1, Placement.DEVICE), entry(2)
    for each in (device, host):
        assert made.told(each)
    assert channel.lent == [(Region(8192, 64, Placement.HOST), Access.ALL)]
