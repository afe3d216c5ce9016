"""Links between machines: keys and certificates, messages and heartbeats, whatever the network does to them.

No byte of a cache crosses the network here. softnpu's processes meet in a folder, which is not on the network either.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.machines.ends import BRISK, QUICK, End, Refused, at, opened, trust_of
from tests.machines.networks import PORT, address, cable, forward, machines, route, switch
from tests.machines.programs import weather
from tests.profiles import at_night

THERE, BACK = (0, 1), (1, 0)
BOTH: dict[str, Any] = {**BRISK, "relink": QUICK}


pytestmark = pytest.mark.usefixtures("meeting")


def use(one: End, other: End) -> None:
    """Send messages both ways: they arrive, in their order."""
    for sender, taker in ((one, other), (other, one)):
        sender.call("ping", peer=taker.cluster_id)
        for number in range(3):
            sender.call("notify", peer=taker.cluster_id, text=f"note {number}")
        notes = [taker.call("note") for _ in range(3)]
        assert notes == [[sender.cluster_id, f"note {number}"] for number in range(3)]


def reasons(told: list[list[str]]) -> list[str]:
    """Return the classes of the reasons of losses."""
    return [kind for _, phase, kind, _ in told if phase == "LOST"]


# ---- every network ----


@pytest.mark.parametrize("family", [4, at_night(6)])
@pytest.mark.parametrize("trust", [at_night("key"), "certificates"])
def test_ends_link_use_the_link_and_end_it(trust: str, family: int, tmp_path: Path) -> None:
    host = address(1, 1, family)
    with (
        machines("a", "b") as (a, b),
        weather(a, b, mtu=9000 if family == 6 else 1500),
        opened(a, 1, listen=at(host), **trust_of(trust, tmp_path, 1)) as one,
        opened(b, 2, **trust_of(trust, tmp_path, 2)) as other,
    ):
        assert one.listens_at == [host, PORT]
        other.call("link", peer=1, host=host, port=PORT)
        use(one, other)
        other.call("unlink", peer=1)
        assert "unlink" in one.call("closed", peer=2)
        with pytest.raises(Refused, match="NotLinked"):
            other.call("ping", peer=1)
        other.call("link", peer=1, host=host, port=PORT)
        use(one, other)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [4, 6])
def test_ends_in_two_networks_link_through_a_router(family: int) -> None:
    host = address(2, 1, family)
    with machines("a", "router", "b") as (a, router, b):
        route(a, router, b, mtus=(9000, 1500))
        with opened(b, 1, listen=at(host)) as one, opened(a, 2) as other:
            other.call("link", peer=1, host=host, port=PORT)
            use(one, other)


@pytest.mark.usefixtures("nft")
@pytest.mark.parametrize("trust", ["key", "certificates"])
def test_an_end_behind_a_forwarded_port_is_linked(trust: str, tmp_path: Path) -> None:
    """The listener cannot be seen, the dialler has the router's address, and the port is another one."""
    with machines("a", "router", "b") as (a, router, b):
        cable(a, router)
        cable(router, b, net=2)
        router.set("ipv4/ip_forward", 1)
        forward(router, 4000, address(2, 2))
        with (
            opened(b, 1, listen=at(address(2, 2)), **BRISK, **trust_of(trust, tmp_path, 1)) as one,
            opened(a, 2, **BRISK, **trust_of(trust, tmp_path, 2)) as other,
        ):
            other.call("link", peer=1, host=address(1, 2), port=4000)
            use(one, other)
            one.program.stop()
            assert "no heartbeat" in other.call("closed", peer=1)


@pytest.mark.nightly
def test_three_ends_link_to_each_other_over_a_switch() -> None:
    with machines("hub", "a", "b", "c") as (hub, *three), ExitStack() as stack:
        switch(hub, *three)
        ends = [
            stack.enter_context(opened(each, number, listen=at(address(1, number))))
            for number, each in enumerate(three, 1)
        ]
        for one, other in ((0, 1), (1, 2), (2, 0)):
            ends[one].call("link", peer=other + 1, host=address(1, other + 1), port=PORT)
        for one, other in ((0, 1), (1, 2), (2, 0)):
            use(ends[one], ends[other])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "change",
    [{"loss": 0.01, "delay": 0.01}, {"delay": 0.05}, {"late": 0.2}, {"loss": 0.05, "late": 0.1, "delay": 0.01}],
    ids=["loss", "far", "reordered", "all"],
)
@pytest.mark.parametrize("trust", ["key", "certificates"])
def test_messages_arrive_in_their_order_on_a_bad_network(trust: str, change: dict[str, Any], tmp_path: Path) -> None:
    with (
        machines("a", "b") as (a, b),
        weather(a, b) as net,
        opened(a, 1, listen=at(address(1, 1)), **trust_of(trust, tmp_path, 1)) as one,
        opened(b, 2, **trust_of(trust, tmp_path, 2)) as other,
    ):
        net.change(**change)
        other.call("link", peer=1, host=address(1, 1), port=PORT)
        for number in range(60):
            other.call("notify", peer=1, text=f"{number} {'x' * 5000}")
        assert [one.call("note")[1].split()[0] for _ in range(60)] == [str(number) for number in range(60)]
        other.call("ping", peer=1)


# ---- broken ----


def test_a_network_that_is_cut_loses_the_link_at_both_ends_and_relinks_when_it_is_mended() -> None:
    with (
        machines("a", "b") as (a, b),
        weather(a, b) as net,
        opened(a, 1, listen=at(address(1, 1)), **BOTH) as one,
        opened(b, 2, **BOTH) as other,
    ):
        other.call("link", peer=1, host=address(1, 1), port=PORT)
        for end in (one, other):
            end.call("until", phase="LINKED")
        before = [end.call("held") for end in (one, other)]
        net.cut()
        for end, peer in ((one, 2), (other, 1)):
            (told,) = end.call("until", phase="LOST")
            assert told[:3] == [peer, "LOST", "PeerLost"]
            assert "no heartbeat for" in told[3]
        net.mend()
        for end in (one, other):
            assert end.call("until", phase="LINKED")[-1][1] == "LINKED"
        use(one, other)
        assert [end.call("held") for end in (one, other)] == before


@pytest.mark.nightly
@pytest.mark.parametrize("way", [THERE, BACK])
def test_a_network_that_carries_one_direction_loses_the_link_at_both_ends(way: tuple[int, int]) -> None:
    with (
        machines("a", "b") as (a, b),
        weather(a, b) as net,
        opened(a, 1, listen=at(address(1, 1)), **BOTH) as one,
        opened(b, 2, **BOTH) as other,
    ):
        other.call("link", peer=1, host=address(1, 1), port=PORT)
        net.cut(way)
        for end in (one, other):
            assert reasons(end.call("until", phase="LOST")) == ["PeerLost"]
        net.mend()
        for end in (one, other):
            end.call("until", phase="LINKED")
        use(one, other)


def test_a_cable_that_is_pulled_out_loses_the_link_and_relinks_when_it_is_back() -> None:
    with machines("a", "b") as (a, b):
        cable(a, b)
        with opened(a, 1, listen=at(address(1, 1)), **BOTH) as one, opened(b, 2, **BOTH) as other:
            other.call("link", peer=1, host=address(1, 1), port=PORT)
            b.ip("link set net1 down")
            for end in (one, other):
                assert reasons(end.call("until", phase="LOST")) == ["PeerLost"]
            b.ip("link set net1 up")
            for end in (one, other):
                end.call("until", phase="LINKED")
            use(one, other)


@pytest.mark.parametrize("number", [0, 1], ids=["messages", "heartbeats"])
def test_one_of_the_connections_of_a_link_that_is_cut_never_hangs(number: int) -> None:
    """The first connection has the messages, the second one the heartbeats."""
    with (
        machines("a", "b") as (a, b),
        weather(a, b) as net,
        opened(a, 1, listen=at(address(1, 1)), sync_kv_timeout=1500, **BRISK) as one,
        opened(b, 2, sync_kv_timeout=1500, **BRISK) as other,
    ):
        other.call("link", peer=1, host=address(1, 1), port=PORT)
        use(one, other)
        flows = list(net.flows())
        assert len(flows) == 2
        net.change(cut_flows=[flows[number]])
        if number == 1:
            # The end that misses them first parts, which the other one may hear before it misses them, too.
            assert any("no heartbeat for" in end.call("closed", peer=peer) for end, peer in ((one, 2), (other, 1)))
        else:
            with pytest.raises(Refused, match=r"LinkTimeout: .*did not answer"):
                other.call("ping", peer=1)
            net.mend()
            use(one, other)


@pytest.mark.nightly
@pytest.mark.parametrize("trust", ["key", "certificates"])
@pytest.mark.parametrize("fault", ["forgotten", "too_large"])
def test_a_network_that_swallows_messages_but_not_heartbeats_loses_the_link(
    fault: str, trust: str, tmp_path: Path
) -> None:
    """A firewall has forgotten the connection, or packets are larger than the route lets pass: neither tells the sender."""
    with (
        machines("a", "b") as (a, b),
        weather(a, b) as net,
        opened(a, 1, listen=at(address(1, 1)), **BOTH, **trust_of(trust, tmp_path, 1)) as one,
        opened(b, 2, **BOTH, **trust_of(trust, tmp_path, 2)) as other,
    ):
        other.call("link", peer=1, host=address(1, 1), port=PORT)
        for end in (one, other):
            end.call("until", phase="LINKED")
        if fault == "forgotten":
            net.change(cut_flows=[next(iter(net.flows()))])
        else:
            net.change(largest=1000)
        other.call("notify", peer=1, text="x" * 5000)
        (*_, lost) = other.call("until", phase="LOST")
        assert lost[2] == "PeerLost"
        assert "the network does not deliver messages" in lost[3]
        net.mend()
        for end in (one, other):
            end.call("until", phase="LINKED")
        use(one, other)


@pytest.mark.nightly
@pytest.mark.timeout(150)
def test_an_idle_connection_that_a_firewall_forgot_is_noticed() -> None:
    with (
        machines("a", "b") as (a, b),
        weather(a, b) as net,
        opened(a, 1, listen=at(address(1, 1)), **BOTH) as one,
        opened(b, 2, **BOTH) as other,
    ):
        other.call("link", peer=1, host=address(1, 1), port=PORT)
        for end in (one, other):
            end.call("until", phase="LINKED")
        net.change(cut_flows=[next(iter(net.flows()))])
        assert reasons(other.call("until", phase="LOST")) == ["PeerLost"]
        net.mend()
        for end in (one, other):
            end.call("until", phase="LINKED")
        use(one, other)


def test_a_peer_that_is_killed_and_started_again_is_linked_again() -> None:
    host = address(1, 1)
    with machines("a", "b") as (a, b), weather(a, b), opened(b, 2, **BOTH) as other:
        for generation in range(2):
            with opened(a, 1, listen=at(host), **BRISK) as one:
                if generation == 0:
                    other.call("link", peer=1, host=host, port=PORT)
                other.call("until", phase="LINKED")
                use(one, other)
                one.program.kill()
                assert reasons(other.call("until", phase="LOST")) == ["PeerLost"]


@pytest.mark.nightly
def test_a_machine_that_lost_its_power_and_is_back_is_linked_again() -> None:
    """The peer says no last word, and heartbeats are too seldom to notice: the process that returns knows no link."""
    host = address(1, 1)
    seldom: dict[str, Any] = {"heartbeat_interval": 30.0, "relink": QUICK}
    with machines("a", "b") as (a, b), weather(a, b) as net, opened(b, 2, **seldom) as other:
        with opened(a, 1, listen=at(host), **seldom) as one:
            other.call("link", peer=1, host=host, port=PORT)
            use(one, other)
            net.cut()
        with opened(a, 1, listen=at(host), **seldom) as one:
            net.mend()
            with pytest.raises(Refused, match="PeerLost"):
                other.call("ping", peer=1)
            assert reasons(other.call("until", phase="LOST")) == ["PeerLost"]
            other.call("until", phase="LINKED")
            use(one, other)


@pytest.mark.nightly
def test_a_peer_that_is_stopped_is_lost_and_finds_its_link_lost_when_it_continues() -> None:
    with (
        machines("a", "b") as (a, b),
        weather(a, b),
        opened(a, 1, listen=at(address(1, 1)), **BRISK) as one,
        opened(b, 2, **BOTH) as other,
    ):
        other.call("link", peer=1, host=address(1, 1), port=PORT)
        one.program.stop()
        (*_, lost) = other.call("until", phase="LOST")
        assert "no heartbeat for" in lost[3]
        one.program.go_on()
        one.call("closed", peer=2)
        other.call("until", phase="LINKED")
        one.call("wait_linked", peer=2)
        use(one, other)


@pytest.mark.nightly
def test_a_machine_that_is_switched_off_while_it_links_ends_the_attempt() -> None:
    with (
        machines("a", "b") as (a, b),
        weather(a, b) as net,
        opened(a, 1, listen=at(address(1, 1)), **BRISK) as one,
        opened(b, 2, **BRISK) as other,
    ):
        net.change(delay=0.5)
        other.begin("link", peer=1, host=address(1, 1), port=PORT, timeout=4)
        net.wait_passed(BACK, 1)
        net.cut()
        with pytest.raises(Refused, match=r"LinkTimeout: .*10\.77\.1\.1:26001 accepted"):
            other.answer()
        net.change(delay=0)
        net.mend()
        other.call("link", peer=1, host=address(1, 1), port=PORT)
        use(one, other)


@pytest.mark.nightly
def test_links_that_come_and_go_on_a_bad_network_leave_nothing() -> None:
    with (
        machines("a", "b") as (a, b),
        weather(a, b) as net,
        opened(a, 1, listen=at(address(1, 1)), **BOTH) as one,
        opened(b, 2, **BOTH) as other,
    ):
        net.change(delay=0.005, loss=0.01)
        other.call("link", peer=1, host=address(1, 1), port=PORT)
        held = []
        for _ in range(10):
            for end in (one, other):
                end.call("until", phase="LINKED")
            use(one, other)
            held.append([end.call("held") for end in (one, other)])
            net.cut()
            for end in (one, other):
                end.call("until", phase="LOST")
            net.mend()
        assert held[1:] == held[1:2] * 9
