"""The carrier: what it decides by a clock that is handed to it, and real TCP over it."""

from __future__ import annotations

import random
import socket
import struct

import pytest

from tests.machines.carrier import Carrier, Way, flow_of
from tests.machines.networks import PORT, address, machines
from tests.machines.programs import weather
from tests.machines.sockets import connected, sent

THERE, BACK = (0, 1), (1, 0)
BYTES = random.Random(2).randbytes(150_000)


def packet(
    number: int, source: int = 0, target: int = 1, ports: tuple[int, int] = (50_000, 26_001), family: int = 4
) -> bytes:
    """Return the beginning of a TCP packet, with a number as its last word."""
    ends = [address(1, each + 1, family) for each in (source, target)]
    tcp = struct.pack(">HHI", *ports, number)
    if family == 6:
        return (
            bytes([0x60, 0, 0, 0, 0, 8, 6, 64])
            + b"".join(socket.inet_pton(socket.AF_INET6, each) for each in ends)
            + tcp
        )
    head = struct.pack(">BBHHHBBH", 0x45, 0, 28, 0, 0, 64, 6, 0)
    return head + b"".join(map(socket.inet_aton, ends)) + tcp


def numbers(carrier: Carrier, now: float) -> list[int]:
    """Return the numbers of the packets that arrive by now."""
    return [int.from_bytes(each.data[-4:], "big") for each in carrier.due(now)]


def calm(**change: object) -> Carrier:
    carrier = Carrier(2, 1)
    carrier.ways[THERE] = Way(**change)  # type: ignore[arg-type]
    return carrier


@pytest.mark.parametrize("family", [4, 6])
def test_packets_arrive_after_their_delay_and_in_their_order(family: int) -> None:
    carrier = calm(delay=0.25)
    for number in range(4):
        carrier.take(packet(number, family=family), 0, 10 + number)
    assert carrier.next_due() == 10.25
    assert numbers(carrier, 10.24) == []
    assert numbers(carrier, 10.25) == [0]
    assert numbers(carrier, 13.25) == [1, 2, 3]
    assert carrier.next_due() is None
    assert carrier.passed == {THERE: 4}


def test_a_slow_way_sends_one_packet_after_the_other_and_drops_those_that_would_wait_too_long() -> None:
    size = len(packet(0))
    carrier = calm(rate=100 * size)
    for number in range(10):
        carrier.take(packet(number), 0, 5.0)
    assert numbers(carrier, 5.0295) == [0, 1]
    assert numbers(carrier, 6.0) == [2, 3, 4, 5]
    assert carrier.dropped == {THERE: 4}
    carrier.take(packet(10), 0, 7.0)
    assert numbers(carrier, 7.011) == [10]


def test_packets_of_the_same_moment_keep_their_order() -> None:
    carrier = calm(delay=0.25)
    for number in range(100):
        carrier.take(packet(number), 0, 5.0)
    assert numbers(carrier, 6.0) == list(range(100))


def test_late_packets_are_overtaken() -> None:
    carrier = calm(late=0.2, lateness=0.5)
    for number in range(1000):
        carrier.take(packet(number), 0, number / 100)
    arrived = numbers(carrier, 20)
    assert sorted(arrived) == list(range(1000))
    overtaken = sum(arrived[place] > number for place, number in enumerate(sorted(arrived)))
    assert overtaken > 100


def test_the_share_of_lost_packets_is_the_one_that_was_asked_for_and_a_seed_repeats_them() -> None:
    def lost(seed: int) -> list[int]:
        carrier = Carrier(2, 1, seed)
        carrier.ways[THERE] = Way(loss=0.01)
        for number in range(10_000):
            carrier.take(packet(number), 0, 0)
        arrived = set(numbers(carrier, 0))
        assert carrier.dropped[THERE] == 10_000 - len(arrived)
        return [number for number in range(10_000) if number not in arrived]

    assert 60 < len(lost(1)) < 150
    assert lost(1) == lost(1)
    assert lost(1) != lost(2)


def test_a_cut_is_of_one_direction_and_ends_what_is_under_way() -> None:
    carrier = calm(delay=1)
    carrier.take(packet(1), 0, 0)
    carrier.take(packet(2, 1, 0), 1, 0)
    carrier.ways[THERE] = Way(is_cut=True)
    carrier.take(packet(3), 0, 0)
    assert numbers(carrier, 2) == [2]
    assert (carrier.passed, carrier.dropped) == ({BACK: 1}, {THERE: 2})
    carrier.ways[THERE] = Way()
    carrier.take(packet(4), 0, 2)
    assert numbers(carrier, 2) == [4]


@pytest.mark.parametrize("family", [4, 6])
def test_a_cut_flow_is_one_pair_of_ports_in_one_direction(family: int) -> None:
    carrier = calm(cut_flows=((26_001, 50_000),))
    for number, ports in enumerate([(50_000, 26_001), (26_001, 50_000), (50_001, 26_001)]):
        carrier.take(packet(number, ports=ports, family=family), 0, 0)
    carrier.take(packet(9, 1, 0, ports=(26_001, 50_000), family=family), 1, 0)
    assert numbers(carrier, 0) == [2, 9]
    assert carrier.flows == {(26_001, 50_000): 1, (26_001, 50_001): 1}


def test_a_way_has_a_largest_packet() -> None:
    carrier = calm(largest=28)
    carrier.take(packet(1), 0, 0)
    carrier.take(packet(2) + b"x", 0, 0)
    carrier.take(packet(3, 1, 0) + b"x", 1, 0)
    assert sorted(len(each.data) for each in carrier.due(0)) == [28, 29]
    assert carrier.dropped == {THERE: 1}


def test_packets_to_unknown_machines_and_from_a_machine_to_itself_disappear() -> None:
    carrier = calm()
    carrier.take(packet(1, target=7), 0, 0)
    carrier.take(packet(2, target=0), 0, 0)
    assert numbers(carrier, 0) == []


def test_only_the_first_part_of_a_tcp_packet_has_a_flow() -> None:
    whole = packet(1)
    assert flow_of(whole) == (26_001, 50_000)
    assert flow_of(whole[:6] + b"\x00\x10" + whole[8:]) is None
    assert flow_of(whole[:9] + b"\x11" + whole[10:]) is None
    assert flow_of(whole[:22]) is None


# ---- real TCP over it ----


@pytest.mark.parametrize("family", [4, 6])
def test_tcp_survives_loss_and_delay(family: int) -> None:
    with machines("a", "b") as (a, b), weather(a, b) as net:
        net.change(loss=0.01, delay=0.01)
        with connected(a, b, address(1, 2, family)) as (ours, theirs):
            assert sent(BYTES, ours, theirs) == BYTES
            while not all(net.wait_dropped(way, 0) for way in (THERE, BACK)):
                assert sent(BYTES, theirs, ours) == BYTES
                assert sent(BYTES, ours, theirs) == BYTES
        net.wait_passed(THERE, len(BYTES) // 1500)


def test_tcp_survives_reordering() -> None:
    with machines("a", "b") as (a, b), weather(a, b, mtu=9000) as net:
        net.change(late=0.3)
        with connected(a, b, address(1, 2)) as (ours, theirs):
            assert sent(BYTES, ours, theirs) == BYTES


def test_three_machines_are_joined_by_one_carrier() -> None:
    with machines("a", "b", "c") as three, weather(*three) as net:
        net.cut(THERE)
        for client, server in ((0, 2), (2, 1)):
            with connected(three[client], three[server], address(1, server + 1)) as (ours, theirs):
                assert sent(BYTES, ours, theirs) == BYTES
        assert len(net.flows()) == 2


@pytest.mark.parametrize("way", [THERE, BACK])
def test_a_cut_of_one_direction_stops_bytes_until_it_is_mended(way: tuple[int, int]) -> None:
    with machines("a", "b") as (a, b), weather(a, b) as net, connected(a, b, address(1, 2)) as (ours, theirs):
        assert sent(b"before", ours, theirs) == b"before"
        net.cut(way)
        ours.sendall(b"meanwhile")
        net.wait_dropped(way, 1)
        if way == THERE:
            theirs.setblocking(False)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
            theirs.settimeout(50)
        net.mend(way)
        assert theirs.recv(9, socket.MSG_WAITALL) == b"meanwhile"
        assert sent(b"after", theirs, ours) == b"after"


def test_a_cut_flow_stops_one_connection_and_no_other() -> None:
    with machines("a", "b") as (a, b), weather(a, b) as net, connected(a, b, address(1, 2)) as (ours, theirs):
        assert list(net.flows()) == [tuple(sorted((ours.getsockname()[1], theirs.getsockname()[1])))]
        (flow,) = net.flows()
        net.change(cut_flows=[flow])
        ours.sendall(b"stopped")
        net.wait_dropped(THERE, 1)
        with connected(a, b, address(1, 2), PORT + 1) as (other, end):
            assert sent(BYTES, other, end) == BYTES
        net.mend()
        assert theirs.recv(7, socket.MSG_WAITALL) == b"stopped"


def test_a_connection_that_is_cut_for_good_ends_by_its_own_limit() -> None:
    with machines("a", "b") as (a, b), weather(a, b) as net, connected(a, b, address(1, 2)) as (ours, theirs):
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 500)
        net.cut()
        ours.sendall(b"never there")
        net.wait_dropped(THERE, 2)
        with pytest.raises(TimeoutError):
            ours.recv(1)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
