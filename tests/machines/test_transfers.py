"""Transfers between machines: bytes arrive where they should, and none after a cancellation, whatever the network does.

Each case is for every transport that reaches another machine; ``auto`` is in ``test_auto.py``. HCCL of softnpu reaches
another namespace of this one, through memory that is shared: what then crosses the network is what the two ends tell each
other.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.machines.ends import BRISK, QUICK, Refused, at, opened, over, pair
from tests.machines.networks import PORT, address, machines, route
from tests.machines.programs import weather
from tests.profiles import IS_NIGHT, at_night

TRANSPORTS = ("hccl", "tcp", at_night("plain"))
pytestmark = [
    pytest.mark.usefixtures("meeting"),
    pytest.mark.parametrize("transport", TRANSPORTS),
]
ONE_SIDED: dict[str, Any] = {"enable_remote_cache_accessible": True}
REQUESTS: dict[str, Any] = {"enable_remote_cache_accessible": False}
modes = pytest.mark.parametrize("mode", [ONE_SIDED, REQUESTS], ids=["one_sided", "requests"])
BAD = {"delay": 0.01, "loss": 0.01, "late": 0.05}
"""A round trip of 20 ms, with 1 % of the packets lost, and some late."""
BYTES = 4 * 4096
"""The bytes of a block, over all tensors."""
CANCELLED = 300 if IS_NIGHT else 30


@modes
@pytest.mark.parametrize("change", [{}, at_night(BAD)], ids=["calm", "bad"])
def test_pulled_blocks_arrive(mode: dict[str, Any], change: dict[str, Any], transport: str) -> None:
    with pair(transport, **mode) as (_, puller, net):
        net.change(**change)
        assert puller.call("pull", peer=1, src=[3, 4, 9], dst=[0, 1, 7]) == 3 * BYTES
        puller.call("verify", moved={"0": [1, 3], "1": [1, 4], "7": [1, 9]})


@pytest.mark.parametrize("change", [{}, at_night(BAD)], ids=["calm", "bad"])
def test_pushed_blocks_arrive_whole_or_layer_by_layer(change: dict[str, Any], transport: str) -> None:
    with pair(transport) as (owner, puller, net):
        net.change(**change)
        assert puller.call("push", peer=1, src=[5], dst=[2]) == BYTES
        puller.call("push_layers", peer=1, src=[6, 7], dst=[3, 4])
        puller.call("notify", peer=1, text="pushed")
        assert owner.call("note") == [2, "pushed"]
        owner.call("verify", moved={"2": [2, 5], "3": [2, 6], "4": [2, 7]})


@pytest.mark.nightly
@modes
@pytest.mark.parametrize("family", [4, 6])
def test_blocks_cross_a_router(family: int, mode: dict[str, Any], transport: str) -> None:
    host = address(2, 1, family)
    settings = {**over(transport), **mode}
    with machines("a", "router", "b") as (a, router, b):
        route(a, router, b, mtus=(9000, 1500))
        with opened(b, 1, listen=at(host), **settings) as owner, opened(a, 2, **settings) as puller:
            for end in (owner, puller):
                end.call("cache")
            puller.call("link", peer=1, host=host, port=PORT)
            puller.call("pull", peer=1, src=list(range(16)), dst=list(range(16)))
            puller.call("verify", moved={str(block): [1, block] for block in range(16)})


@modes
def test_no_byte_lands_after_a_cancellation(mode: dict[str, Any], transport: str) -> None:
    """The copy that memory is compared with is made right after the cancellation was delivered."""
    with pair(transport, **mode) as (_, puller, net):
        net.change(delay=0.002, late=0.05, loss=0.005)
        cancelled = puller.call("cancel_pulls", peer=1, count=CANCELLED, seconds=0.01)
        if transport == "hccl" and mode["enable_remote_cache_accessible"]:
            # Of softnpu's own bytes none crosses the network: a pull may end before any cancellation, unless it is held.
            assert puller.call("cancel_held", peer=1)
        else:
            assert 1 <= cancelled <= CANCELLED
        puller.call("pull", peer=1, src=[2], dst=[1])
        puller.call("verify_blocks", moved={"1": [1, 2]})


def test_a_request_that_is_cut_off_fails_and_later_ones_succeed(transport: str) -> None:
    with pair(transport, **REQUESTS) as (owner, puller, net):
        puller.call("pull", peer=1, src=[1], dst=[1])
        net.change((1, 0), is_cut=True)
        puller.begin("pull", peer=1, src=[2], dst=[2])
        with pytest.raises(Refused, match=r"PeerLost|LinkClosed"):
            puller.answer()
        puller.call("verify", moved={"1": [1, 1]})
        net.mend()
        for end in (owner, puller):
            end.call("until", phase="LINKED")
        puller.call("pull", peer=1, src=[2], dst=[2])
        puller.call("verify", moved={"1": [1, 1], "2": [1, 2]})


@pytest.mark.nightly
@modes
def test_an_owner_that_is_killed_and_started_again_serves_again(mode: dict[str, Any], transport: str) -> None:
    settings = {**over(transport), **BRISK, **mode}
    with machines("a", "b") as (a, b), weather(a, b), opened(b, 2, **settings, relink=QUICK) as puller:
        puller.call("cache")
        for generation in range(2):
            with opened(a, 1, listen=at(address(1, 1)), **settings) as owner:
                owner.call("cache")
                if generation == 0:
                    puller.call("link", peer=1, host=address(1, 1), port=PORT)
                puller.call("until", phase="LINKED")
                puller.call("pull", peer=1, src=[4], dst=[generation])
                owner.program.kill()
                puller.call("until", phase="LOST")
                with pytest.raises(Refused, match=r"PeerLost|NotLinked|LinkClosed"):
                    puller.call("pull", peer=1, src=[5], dst=[9])
        puller.call("verify", moved={"0": [1, 4], "1": [1, 4]})
