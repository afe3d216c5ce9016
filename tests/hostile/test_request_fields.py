"""Any JSON value in any field of a request: it is refused, or does what the field says, and ends no scheduler.

Engines check some of these fields, others and older versions do not. An exception in a scheduler ends its engine, with
the requests of all clients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from aiodatadist import new_lease_name
from aiodatadist._adapters.peers import PeerRule, Peers
from aiodatadist._adapters.pull_orders import WorkerAddress
from aiodatadist._adapters.regions import Heads
from aiodatadist._adapters.rendezvous_asks import RendezvousAsks
from aiodatadist._adapters.settings import Settings
from tests.adapters.kv_memory import opaque_memory
from tests.hostile.vllm_names import asking_manager, both_halves, sglang_manager
from tests.keys import having


def nested(depth: int, width: int = 1) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] * width
    return value


def objects(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


VALUES: dict[str, Any] = {
    "null": None, "true": True, "false": False,
    **{str(number): number for number in (0, -1, 1, 16, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 16.0, 1e308)},
    "a huge number": 1 << 100_000, "nan": float("nan"), "infinity": float("inf"),
    "empty": "", "word": "word", "digits of a lease": "0" * 32, "surrogate": "\ud800", "zero byte": "a\0b",
    "lines": "a\r\n\x1b[2J\u2028", "long": "x" * 100_000, "other digits": "\u0663",
    "empty list": [], "list of null": [None], "list of -1": [-1], "list of true": [True], "list of nan": [float("nan")],
    "list of texts": ["1"], "list in a list": [[]], "list of objects": [{}], "deep": nested(900), "wide": nested(2, 64),
    "long list": list(range(100_000)), "empty object": {}, "object": {"": None, "\ud800": "\r\n"},
    "deep objects": objects(900), "types": {"type": nested(900), "kind": []},
    "many names": {str(number): number for number in range(10_000)},
}  # fmt: skip
TEXTS = {name: value for name, value in VALUES.items() if isinstance(value, str)}
PLACE = {"cluster_id": 7, "host": "127.0.0.1", "port": 26000}
MEMORY = json.loads(opaque_memory(16, ("tokens", "heads", 4), Heads(0, 2, 2)).model_dump_json())
WORKER = {**PLACE, "cache_ids": [1], "layout": {"block_size": 16, "dtype": "uint8"}, "memory": MEMORY}
PULLED: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "p", "remote_block_ids": [1, 2],
    "remote_num_tokens": 32, "remote_block_size": 16, "lease": new_lease_name(), "lease_seconds": 60.0,
    "workers": [WORKER], "client": "c",
}  # fmt: skip
PUSHED = {"do_remote_prefill": True, "transfer_id": "t", "prefill": PLACE}
PARAMETERS: dict[str, dict[str, Any]] = {
    "a pull": PULLED,
    "a push": PUSHED,
    "blocks to keep": {"do_remote_decode": True, "client": "c"},
    "blocks to push": {"do_remote_decode": True, "transfer_id": "t", "client": "c"},
    "both": {**PUSHED, "do_remote_decode": True},
}


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each field, the way to the whole first."""
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inside:
        yield from paths(each, (*at, name))


def put(into: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with this value at the end of the way."""
    if not path:
        return value
    made = dict(into) if isinstance(into, dict) else list(into)
    made[path[0]] = put(into[path[0]], path[1:], value)
    return made


@pytest.fixture(scope="module")
def vllm() -> Iterator[SimpleNamespace]:
    with both_halves() as halves:
        yield halves


class Scheduler:
    """The scheduler's half of an engine of three workers, and requests that pass through all of it."""

    def __init__(self, vllm: SimpleNamespace) -> None:
        self.side = vllm.scheduler_side.SchedulerSide(Settings(max_leased_per_client=0.5), 16, 64, 3)
        own = {**WORKER, "cluster_id": 99}  # not the one that offers
        self.side.meet({rank: WorkerAddress.model_validate(own) for rank in range(3)})
        self._status = vllm.scheduler_side.RequestStatus.FINISHED_LENGTH_CAPPED

    def serve(self, params: Any, **fields: Any) -> tuple[int, bool]:
        """Let a request wait, be computed, be preempted, be computed again and end."""
        request = SimpleNamespace(**{
            "request_id": "r", "kv_transfer_params": params, "num_prompt_tokens": 32, "num_computed_tokens": 32,
            "status": self._status, "prompt_token_ids": [0] * 32, "lora_request": None, "cache_salt": None,
            "mm_features": [], "prompt_embeds": None, **fields,
        })  # fmt: skip
        name = request.request_id
        self.side.matched_tokens(request, 0)
        found: tuple[int, bool] = self.side.matched_tokens(request, 0)
        for external in (found[0], 0):
            self.side.allocated(request, [1, 2], external)
            self._step(name, 32)
        self.side.received([name])
        answer = self.side.finished(request, [1, 2])
        json.dumps(answer, allow_nan=False)
        self._step(name, 0)
        self.side.sent([name])
        self.side.take_counters()
        return found

    def _step(self, name: str, tokens: int) -> None:
        new = [SimpleNamespace(req_id=name, num_computed_tokens=0)] if tokens else []
        again = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        scheduled = SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=again, num_scheduled_tokens={name: tokens}
        )
        self.side.take_orders(scheduled)


@pytest.mark.parametrize("kind", PARAMETERS)
def test_no_value_of_a_parameter_ends_vllm_s_scheduler(vllm: SimpleNamespace, kind: str) -> None:
    scheduler, true = Scheduler(vllm), PARAMETERS[kind]
    for path in paths(true):
        for name, value in VALUES.items():
            try:
                scheduler.serve(put(true, path, value))
            except Exception as error:
                raise AssertionError(f"{name} at {path}") from error
    assert scheduler.serve(put(PULLED, (), dict(PULLED))) == (32, True), "the next request is served"


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("field", ["request_id", "cache_salt", "lora_request"])
def test_no_text_of_a_request_ends_vllm_s_scheduler(vllm: SimpleNamespace, field: str, name: str) -> None:
    value = SimpleNamespace(lora_name=TEXTS[name]) if field == "lora_request" else TEXTS[name]
    scheduler = Scheduler(vllm)
    for params in PARAMETERS.values():
        scheduler.serve(dict(params), **{field: value})
    assert scheduler.serve(dict(PULLED)) == (32, True)


def test_no_value_of_a_request_ends_sglang_s_scheduler() -> None:
    """Find no ranks: nothing listens there, or the address is refused."""
    with sglang_manager() as module, closing(RendezvousAsks(having(None))) as asks:
        manager = asking_manager(module, Peers([PeerRule(host="::1"), PeerRule(host="a.invalid")]), asks)
        for value in VALUES.values():
            with_limits = value if not isinstance(value, int) or value.bit_length() < 10_000 else 10**4000
            for address in (f"{with_limits}:1", f"::1:{with_limits}", f"[{with_limits}]:{with_limits}"):
                assert manager.try_ensure_parallel_info(address) is False


ROOMS = {name: value for name, value in VALUES.items() if type(value) in {int, bool, str}}


@pytest.mark.parametrize("name", sorted(VALUES.keys() - ROOMS.keys()))
def test_a_room_that_is_neither_a_number_nor_a_text_is_refused(name: str) -> None:
    """A batch has lists of rooms, and requests without a room would share one name."""
    with sglang_manager() as module, pytest.raises(ValueError, match=r"the room is .*: must be a number or a text"):
        module.name_of_room(VALUES[name])


def test_a_room_that_is_a_number_or_a_text_has_a_name_or_is_refused() -> None:
    with sglang_manager() as module:
        for value in ROOMS.values():
            try:
                room = module.name_of_room(value)
            except ValueError:
                continue
            assert room == str(value)
