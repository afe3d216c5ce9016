"""Values that travel between prefill and decode through a router are JSON, and their numbers are numbers."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from aiodatadist import LeaseTicket, ParamInvalid, new_lease_name
from aiodatadist._adapters import push_messages
from aiodatadist._adapters.peers import LOOPBACK, Peers
from aiodatadist._adapters.vllm.offer import Offers
from aiodatadist._values.lease_ticket import MAX_TICKET_BLOCKS
from tests.adapters.kv_memory import opaque_memory

NOT_ONE = [True, 1.0, "1"]
"""Each of which pydantic takes for 1 unless it is told not to."""
TICKET = {"cluster_id": 1, "lease": new_lease_name(), "cache_id": 1, "blocks": [1], "seconds": 1.0}
MEMORY = json.loads(opaque_memory(1).model_dump_json())
WORKER = {
    "cluster_id": 1,
    "host": "127.0.0.1",
    "port": 1,
    "cache_ids": [1],
    "layout": {"dtype": "uint8", "heads": 1},
    "memory": MEMORY,
}
OFFER = {
    "do_remote_prefill": True,
    "remote_request_id": "r",
    "remote_block_ids": [1],
    "remote_num_tokens": 1,
    "remote_block_size": 1,
    "lease": new_lease_name(),
    "lease_seconds": 1.0,
    "workers": [WORKER],
}
PUSHED = {"do_remote_prefill": True, "transfer_id": "t", "prefill": {"cluster_id": 1, "host": "127.0.0.1", "port": 1}}


def region(**changes: Any) -> dict[str, Any]:
    return {**MEMORY, "regions": [{**MEMORY["regions"][0], **changes}]}


def read(request_id: str, params: dict[str, Any]) -> Any:
    """Read the offer as the only worker of an engine on loopback."""
    return Offers(1, Peers(LOOPBACK), 64).offer_of(request_id, params, 1 << 30)


@pytest.mark.parametrize("name", ["cluster_id", "cache_id", "seconds", "blocks"])
@pytest.mark.parametrize("wrong", NOT_ONE, ids=repr)
def test_a_ticket_takes_nothing_for_a_number(name: str, wrong: Any) -> None:
    if name == "seconds" and isinstance(wrong, float):
        return
    given = {**TICKET, name: [0, wrong, wrong] if name == "blocks" else wrong}
    where = f"blocks: number 1 is {wrong!r}: a block number is an int" if name == "blocks" else f"{name} is {wrong!r}:"
    with pytest.raises(ParamInvalid) as refused:
        LeaseTicket.of(given)
    assert str(refused.value).startswith(f"ticket: {where}")


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([0, -1], "number 1 is -1"),
        ([2**63], f"number 0 is {2**63}"),
        ([1, 2**5000], "number 1 is an int of 5001 bits"),
        ([[1]], r"number 0 is \[1\]"),
        (["\x1b" * 99], "number 0 is '.{1,80}: a block number"),
        ([], "0 block numbers: there must be 1 to 65536"),
        ([0] * (MAX_TICKET_BLOCKS + 1), "65537 block numbers: there must be 1 to 65536"),
        ({"1": 2}, "must be a list"),
        ("12", "must be a list"),
    ],
    ids=["negative", "large", "huge", "list", "text", "none", "many", "mapping", "string"],
)
def test_a_ticket_says_what_is_wrong_with_its_blocks(blocks: Any, said: str) -> None:
    with pytest.raises(ParamInvalid, match=f"ticket: blocks: {said}"):
        LeaseTicket.of({**TICKET, "blocks": blocks})


def test_a_ticket_goes_through_json_and_back() -> None:
    ticket = LeaseTicket.of({**TICKET, "blocks": [0, 2**63 - 1], "seconds": 1})
    assert ticket.blocks == (0, 2**63 - 1)
    assert LeaseTicket.of(ticket.model_dump(mode="json")) == ticket
    assert LeaseTicket.model_validate_json(ticket.model_dump_json()) == ticket


@pytest.mark.parametrize("wrong", NOT_ONE, ids=repr)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("remote_block_ids: number 0", lambda wrong: {"remote_block_ids": [wrong]}),
        ("remote_num_tokens", lambda wrong: {"remote_num_tokens": wrong}),
        ("remote_block_size", lambda wrong: {"remote_block_size": wrong}),
        ("workers.0.cluster_id", lambda wrong: {"workers": [{**WORKER, "cluster_id": wrong}]}),
        ("workers.0.port", lambda wrong: {"workers": [{**WORKER, "port": wrong}]}),
        ("workers.0.cache_ids.0", lambda wrong: {"workers": [{**WORKER, "cache_ids": [wrong]}]}),
        (
            "workers.0.memory.regions.0.tokens",
            lambda wrong: {"workers": [{**WORKER, "memory": region(tokens=wrong)}]},
        ),
    ],
)
def test_an_offer_takes_nothing_for_a_number(
    caplog: pytest.LogCaptureFixture, name: str, change: Any, wrong: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read("r", {**OFFER, **change(wrong)}) is None
    assert f"request r: kv_transfer_params: {name} is {wrong!r}:" in caplog.text


@pytest.mark.parametrize("wrong", [True, 1.0], ids=repr)
def test_a_layout_takes_nothing_for_a_number(wrong: Any) -> None:
    """``"1"`` is a word there, and not equal to 1."""
    worker = {**WORKER, "layout": {"dtype": "uint8", "heads": wrong}}
    assert read("r", {**OFFER, "workers": [worker]}) is None


@pytest.mark.parametrize("wrong", NOT_ONE, ids=repr)
def test_a_pushed_request_takes_nothing_for_a_number(wrong: Any) -> None:
    for name in ("cluster_id", "port"):
        prefill = {"cluster_id": 1, "host": "127.0.0.1", "port": 1, name: wrong}
        assert read("r", {**PUSHED, "prefill": prefill}) is None


def test_offers_go_through_json_and_back() -> None:
    offer = read("r", OFFER)
    assert offer.remote_block_ids == (1,)
    assert offer.workers[0].memory.regions[0].axes == (("part", 4096, 1),)
    assert read("r", offer.model_dump(mode="json")) == offer
    pushed = read("r", PUSHED)
    assert read("r", pushed.model_dump(mode="json") | {"do_remote_prefill": True}) == pushed


@pytest.mark.parametrize("wrong", ["true", "1.0", '"1"'])
def test_a_want_takes_nothing_for_a_number(wrong: str) -> None:
    want = '{"kind":"want","transfer":"t","first":%s,"into":[%s],"count":%s,"caches":%s,"layout":{}}'
    assert push_messages.decode((want % ("1", "1", "1", "1")).encode())
    for at in range(4):
        values = ["1"] * 4
        values[at] = wrong
        with pytest.raises(ValueError, match="integer"):
            push_messages.decode((want % tuple(values)).encode())
