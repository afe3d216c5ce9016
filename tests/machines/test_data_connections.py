"""Data connections between machines, with ``transport="tcp"``: they are cut, some or all, while bytes travel, or between.

A transfer is large and the network slow, so that what happens to it happens in its middle. The carrier counts packets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.machines.ends import BRISK, End, Refused, at, opened, over, pair, trust_of
from tests.machines.networks import PORT, address, cable, forward, machines
from tests.machines.programs import Weather, weather
from tests.profiles import IS_NIGHT, at_night

LARGE = {"blocks": 16, "block": 1 << 18}
"""A cache of 16 MiB."""
ALL = list(range(16))
BYTES = 16 << 20
MIDDLE = 1500
"""Packets of a large transfer that have passed in its middle: there are about 12000."""
STREAMS = 4
ONE_SIDED: dict[str, Any] = {"enable_remote_cache_accessible": True}
REQUESTS: dict[str, Any] = {"enable_remote_cache_accessible": False}
modes = pytest.mark.parametrize("mode", [ONE_SIDED, at_night(REQUESTS)], ids=["one_sided", "requests"])
transfers = pytest.mark.parametrize(
    ("what", "mode"),
    [("pull", ONE_SIDED), ("push", ONE_SIDED), at_night("pull", REQUESTS)],
    ids=["pull", "push", "request"],
)
THERE, BACK = (0, 1), (1, 0)
LOST = {"PeerLost", "LinkClosed"}
CANCELS = 10_000 if IS_NIGHT else 40
PATIENT = {"sync_kv_timeout": 600_000}
"""The link's end comes first."""
LASTING: dict[str, Any] = {"deadline": 600.0}
"""The same for a pull, if only messages shall time out soon."""


def begin(end: End, what: str, net: Weather) -> None:
    """Begin a transfer of all blocks; return when it is in its middle."""
    way = THERE if what == "pull" else BACK
    passed = net.wait_passed(way, 0)
    end.begin("fail", what=what, peer=1, src=ALL, dst=ALL)
    net.wait_passed(way, passed + MIDDLE)


def relinked(net: Weather, *ends: End) -> None:
    """Mend the network, and wait until both ends have noticed the loss and are linked again."""
    net.mend()
    for end in ends:
        end.call("until", phase="LINKED")


def moves_right(puller: End, what: str = "pull", **limit: Any) -> None:
    """Transfer all blocks, and look at those that came."""
    assert puller.call(what, peer=1, src=ALL, dst=ALL, **limit) == BYTES
    if what == "pull":
        puller.call("verify", moved={str(block): [1, block] for block in ALL})


def data_flows(net: Weather) -> list[tuple[int, int]]:
    """Return the flows of the data connections. Those of messages and heartbeats were there before."""
    flows = list(net.flows())
    assert len(flows) == 2 + STREAMS
    return flows[2:]


def test_bytes_travel_over_every_data_connection_and_each_comes_to_the_listening_port() -> None:
    with pair("tcp", LARGE, **PATIENT) as (_, puller, net):
        flows = data_flows(net)
        before = net.flows()
        moves_right(puller)
        after = net.flows()
        assert list(after) == list(before), "a transfer makes no connection"
        assert {low for low, _ in after} == {PORT}
        assert min(after[flow] - before[flow] for flow in flows) > 500
        assert sum(after[flow] - before[flow] for flow in flows) > BYTES // 1500


@transfers
@pytest.mark.parametrize("transport", ["tcp", at_night("plain")])
def test_a_network_that_is_cut_in_the_middle_of_a_transfer_loses_it_and_no_byte_lands_later(
    transport: str, what: str, mode: dict[str, Any]
) -> None:
    with pair(transport, LARGE, **PATIENT, **mode) as (owner, puller, net):
        begin(puller, what, net)
        net.cut()
        kind, words = puller.answer()
        assert kind in LOST, words
        owner.call("until", phase="LOST")
        owner.call("keep")
        relinked(net, owner, puller)
        puller.call("ping", peer=1)
        assert puller.call("unchanged")
        assert owner.call("unchanged")
        moves_right(puller, what)


@pytest.mark.parametrize("what", ["pull", "push"])
@pytest.mark.parametrize("count", [at_night(1), STREAMS])
def test_data_connections_that_are_cut_in_the_middle_of_a_transfer_lose_the_link(count: int, what: str) -> None:
    """Messages and heartbeats still pass: only what is sent, and not acknowledged, shows it."""
    with pair("tcp", LARGE, **PATIENT) as (owner, puller, net):
        flows = data_flows(net)[:count]
        begin(puller, what, net)
        net.change(cut_flows=flows)
        kind, words = puller.answer()
        assert kind in LOST, words
        for end in (owner, puller):
            end.call("until", phase="LOST")
        relinked(net, owner, puller)
        assert puller.call("unchanged")
        moves_right(puller, what)


def test_messages_that_are_cut_let_a_pull_end_and_heartbeats_that_are_cut_lose_the_link() -> None:
    with pair("tcp", LARGE, sync_kv_timeout=1500) as (owner, puller, net):
        puller.call("pull", peer=1, src=[0], dst=[0], **LASTING)
        messages, heartbeats = list(net.flows())[:2]
        net.change(cut_flows=[messages])
        assert puller.call("pull", peer=1, src=ALL, dst=ALL, **LASTING) == BYTES
        with pytest.raises(Refused, match=r"LinkTimeout: .*did not answer"):
            puller.call("ping", peer=1)
        net.change(cut_flows=[heartbeats])
        for end in (owner, puller):
            end.call("until", phase="LOST")
        relinked(net, owner, puller)
        moves_right(puller, **LASTING)


@transfers
def test_an_owner_that_is_killed_in_the_middle_of_a_transfer_loses_it(what: str, mode: dict[str, Any]) -> None:
    with pair("tcp", LARGE, **PATIENT, **mode) as (owner, puller, net):
        begin(puller, what, net)
        owner.program.kill()
        kind, words = puller.answer()
        assert kind in LOST, words
        puller.call("until", phase="LOST")
        assert puller.call("unchanged")


@transfers
def test_an_owner_that_is_stopped_in_the_middle_of_a_transfer_finds_its_link_lost(
    what: str, mode: dict[str, Any]
) -> None:
    with pair("tcp", LARGE, **PATIENT, **mode) as (owner, puller, net):
        begin(puller, what, net)
        owner.program.stop()
        kind, words = puller.answer()
        assert kind in LOST, words
        owner.program.go_on()
        for end in (owner, puller):
            end.call("until", phase="LOST")
        relinked(net, owner, puller)
        assert puller.call("unchanged")
        moves_right(puller, what)


@pytest.mark.nightly
@transfers
def test_an_initiator_that_is_stopped_in_the_middle_of_a_transfer_finds_its_link_lost(
    what: str, mode: dict[str, Any]
) -> None:
    with pair("tcp", LARGE, **PATIENT, **mode) as (owner, puller, net):
        begin(puller, what, net)
        puller.program.stop()
        owner.call("until", phase="LOST")
        owner.call("keep")
        puller.program.go_on()
        kind, words = puller.answer()
        assert kind in LOST, words
        relinked(net, owner, puller)
        puller.call("ping", peer=1)
        assert puller.call("unchanged")
        assert owner.call("unchanged")


@modes
def test_a_pull_is_cancelled_at_once_while_the_network_is_cut(mode: dict[str, Any]) -> None:
    """Heartbeats are so seldom that the link has not been lost when the cancellation is delivered."""
    seldom = {**PATIENT, "heartbeat_interval": 5.0}
    with pair("tcp", LARGE, **{**seldom, **mode}) as (_, puller, net):
        passed = net.wait_passed(THERE, 0)
        puller.call("begin", what="pull", peer=1, src=ALL, dst=ALL)
        net.wait_passed(THERE, passed + MIDDLE)
        net.cut()
        if mode == ONE_SIDED:
            assert puller.call("cancel")
            net.mend()
        else:  # the owner writes: it must say that it has stopped
            net.mend()
            puller.call("cancel")
        puller.call("ping", peer=1)
        assert puller.call("unchanged")


@pytest.mark.nightly
def test_a_push_whose_peer_cannot_confirm_its_cancellation_loses_the_link() -> None:
    with pair("tcp", LARGE, **{**PATIENT, "heartbeat_interval": 5.0}) as (owner, puller, net):
        passed = net.wait_passed(BACK, 0)
        puller.call("begin", what="push", peer=1, src=ALL, dst=ALL)
        net.wait_passed(BACK, passed + MIDDLE)
        net.cut()
        with pytest.raises(Refused, match="PeerLost"):
            puller.call("cancel")
        puller.call("until", phase="LOST")
        relinked(net, owner, puller)
        moves_right(puller, "push")


@pytest.mark.parametrize("transport", ["tcp", at_night("plain")])
def test_a_cancelled_push_over_a_slow_network_leaves_the_link_usable(transport: str) -> None:
    """The bytes under way take two seconds, and the channel has patience as long as some move."""
    with pair(transport, LARGE, **{**PATIENT, "heartbeat_interval": 5.0}) as (owner, puller, net):
        passed = net.wait_passed(BACK, 0)
        net.change(BACK, rate=4e6)
        puller.call("begin", what="push", peer=1, src=ALL, dst=ALL)
        net.wait_passed(BACK, passed + 100)
        assert puller.call("cancel")
        owner.call("keep")
        net.change(BACK, rate=0.0)
        puller.call("ping", peer=1)
        puller.call("pull", peer=1, src=[2], dst=[3])
        assert owner.call("unchanged")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["tcp", at_night("plain")])
@pytest.mark.parametrize("what", ["pulls", "pushes"])
def test_no_byte_lands_after_many_cancellations_on_a_network_with_delay_and_loss(what: str, transport: str) -> None:
    """The copy that memory is compared with is made right after the cancellation was delivered, or told of."""
    seldom = {**PATIENT, "heartbeat_interval": 5.0}
    with pair(transport, {"blocks": 16, "block": 1 << 12}, **seldom) as (owner, puller, net):
        net.change(delay=0.002, loss=0.01, late=0.05)
        if what == "pushes":
            owner.begin("watch_pushes", peer=2)
            cancelled, lost = puller.call("cancel_pushes", peer=1, count=CANCELS, seconds=0.03)
            owner.answer()
            assert 0 <= lost <= CANCELS // 20
        else:
            cancelled = puller.call("cancel_pulls", peer=1, count=CANCELS, seconds=0.03)
            lost = 0
        print(f"{cancelled} of {CANCELS} {what} over {transport} were cancelled, {lost} were lost")
        assert CANCELS // 3 < cancelled + lost <= CANCELS
        net.change(delay=0.0, loss=0.0, late=0.0)
        puller.call("ping", peer=1)


@pytest.mark.usefixtures("nft")
@pytest.mark.parametrize("trust", ["key", "certificates"])
@pytest.mark.parametrize("transport", ["tcp", at_night("plain")])
@modes
def test_blocks_come_from_behind_a_forwarded_port(
    mode: dict[str, Any], transport: str, trust: str, tmp_path: Path
) -> None:
    """The listener cannot be seen: the data connections are dialled where the link was."""
    settings = {**over(transport), **BRISK, **mode}
    with machines("a", "router", "b") as (a, router, b):
        cable(a, router)
        cable(router, b, net=2)
        router.set("ipv4/ip_forward", 1)
        forward(router, 4000, address(2, 2))
        with (
            opened(b, 1, listen=at(address(2, 2)), **settings, **trust_of(trust, tmp_path, 1)) as owner,
            opened(a, 2, **settings, **trust_of(trust, tmp_path, 2)) as puller,
        ):
            for end in (owner, puller):
                end.call("cache")
            puller.call("link", peer=1, host=address(1, 2), port=4000)
            puller.call("pull", peer=1, src=[3, 4], dst=[0, 1])
            puller.call("verify", moved={"0": [1, 3], "1": [1, 4]})


@modes
@pytest.mark.parametrize(("family", "mtu"), [(6, 9000), at_night(4, 9000), at_night(6, 1500)])
def test_blocks_cross_networks_of_both_families_and_of_large_packets(
    family: int, mtu: int, mode: dict[str, Any]
) -> None:
    settings, host = {**over("tcp"), **mode}, address(1, 1, family)
    with (
        machines("a", "b") as (a, b),
        weather(a, b, mtu=mtu),
        opened(a, 1, listen=at(host), **settings) as owner,
        opened(b, 2, **settings) as puller,
    ):
        for end in (owner, puller):
            end.call("cache", **LARGE)
        puller.call("link", peer=1, host=host, port=PORT)
        moves_right(puller)


@pytest.mark.nightly
@modes
@pytest.mark.parametrize("loss", [0.01, 0.05])
def test_blocks_arrive_whole_on_networks_that_lose_packets(loss: float, mode: dict[str, Any]) -> None:
    patient = {**PATIENT, "heartbeat_interval": 1.0}
    with pair("tcp", {"blocks": 16, "block": 1 << 14}, **{**patient, **mode}) as (owner, puller, net):
        owner.call("keep")
        net.change(delay=0.01, loss=loss, late=0.05)
        for _ in range(3):
            puller.call("pull", peer=1, src=ALL, dst=ALL)
        puller.call("verify", moved={str(block): [1, block] for block in ALL})
        assert owner.call("unchanged")
