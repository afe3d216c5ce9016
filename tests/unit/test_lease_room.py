"""The share of a KV cache that may be kept for peers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiodatadist._adapters.lease_room import LeaseRoom


def test_blocks_that_are_kept_leave_no_room_for_others_until_they_are_given_back() -> None:
    room = LeaseRoom(20, 0.5)
    assert room.take("a", range(6))
    assert not room.take("b", range(6, 11))
    assert room.take("c", range(6, 10))
    assert len(room) == 10
    room.give_back("a")
    assert room.take("b", range(10, 16))
    assert not room.take("a", [16])
    room.give_back("unknown")


def test_a_block_that_requests_share_counts_once() -> None:
    room = LeaseRoom(10, 0.5)
    assert all(room.take(request, [1, 2, 3, 3]) for request in "abc")
    assert room.take("d", [1, 2, 3, 4, 5])
    for request in "abd":
        room.give_back(request)
    assert len(room) == 3
    room.give_back("c")
    assert len(room) == 0


def test_blocks_that_may_be_others_fit_as_if_they_were_new() -> None:
    room = LeaseRoom(10, 0.5)
    assert (room.fits(5), room.fits(6)) == (True, False)
    assert room.take("a", [1, 2, 3])
    assert (room.fits(2), room.fits(3)) == (True, False)
    assert "a" in room
    room.give_back("a")
    assert "a" not in room
    assert room.fits(5)


def test_a_share_of_all_is_no_limit() -> None:
    """Decline nothing that the engine would let wait for free blocks."""
    room = LeaseRoom(10, 1.0)
    assert room.take("a", range(8))
    assert room.fits(5)


def test_a_client_has_a_share_of_its_own() -> None:
    room = LeaseRoom(20, 0.5, 0.2)
    assert room.take("a", [1, 2, 3, 4], "one")
    assert not room.take("b", [5], "one")
    assert room.take("c", [5, 6, 7, 8], "other")
    assert room.take("d", [9, 10])  # of a client that is not known
    assert not room.take("e", [11], "third")
    room.give_back("a")
    assert room.take("b", [5], "one")
    assert room.take("f", [11], "third")


def test_nothing_may_be_kept() -> None:
    assert not LeaseRoom(10, 0.0).take("a", [1])
    assert not LeaseRoom(10, 1.0, 0.0).take("a", [1], "one")
    assert LeaseRoom(10, 1.0).take("a", range(10))


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 9), max_size=6), st.sampled_from(["", "x", "y"]))))
def test_whatever_comes_the_limits_hold_and_nothing_is_left(calls: list[tuple[int, list[int], str]]) -> None:
    room = LeaseRoom(10, 0.6, 0.3)
    kept: dict[str, tuple[str, set[int]]] = {}
    for number, blocks, client in calls:
        request = f"r{number}"
        kept.pop(request, None)
        if room.take(request, blocks, client):
            kept[request] = client, set(blocks)
        for each in ("x", "y"):
            assert len(set().union(*(mine for whose, mine in kept.values() if whose == each))) <= 3
        assert len(room) == len(set().union(*(mine for _, mine in kept.values()))) <= 6
    for request in kept:
        room.give_back(request)
    assert len(room) == 0
    assert room._kept_of == {}
