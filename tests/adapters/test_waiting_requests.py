"""Requests that wait at a vLLM scheduler, and samples of one prompt, as its half of the connector sees them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aiodatadist._adapters.settings import Settings
from aiodatadist._adapters.vllm.siblings import Siblings, parent_of
from tests.hostile.test_offers import offer, worker
from tests.hostile.vllm_names import both_halves

BLOCKS = 64


@pytest.fixture
def vllm() -> Iterator[SimpleNamespace]:
    with both_halves() as found:
        yield found


class Scheduler:
    """vLLM's scheduler, over our half."""

    def __init__(self, vllm: SimpleNamespace, **settings: Any) -> None:
        self._status = vllm.scheduler_side.RequestStatus
        self.side = vllm.scheduler_side.SchedulerSide(Settings(**settings), 16, BLOCKS)
        self.side.meet({0: vllm.scheduler_side.WorkerAddress.model_validate(worker(cluster_id=3))})

    def arrives(self, name: str, params: dict[str, Any]) -> Any:
        request = SimpleNamespace(
            request_id=name, kv_transfer_params=params, num_prompt_tokens=32, num_computed_tokens=32,
            prompt_token_ids=list(range(32)), lora_request=None, cache_salt=None, mm_features=[],
        )  # fmt: skip
        self.side.arrived(request)
        return request

    def schedule(self, request: Any, computed: int = 0) -> int:
        """Schedule a request; return the tokens that are loaded."""
        tokens, _ = self.side.matched_tokens(request, computed)
        self.side.allocated(request, [1, 2], tokens)
        return int(tokens)

    def finish(self, request: Any, how: str = "FINISHED_LENGTH_CAPPED") -> tuple[bool, dict[str, Any] | None]:
        request.status = self._status[how]
        found: tuple[bool, dict[str, Any] | None] = self.side.finished(request, [1, 2])
        return found

    def step(self) -> Any:
        none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[])
        return self.side.take_orders(SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=none))


# ---- requests that wait ----


def test_what_is_offered_to_a_request_that_waits_is_held_once_until_it_is_loaded(vllm: SimpleNamespace) -> None:
    scheduler = Scheduler(vllm)
    request = scheduler.arrives("r", offer(lease_seconds=7.0))
    (held,) = scheduler.step().holds
    assert (held.request_id, held.offer.lease_seconds) == ("r", 7.0)
    assert scheduler.step().holds == [], "its worker names it again by itself"
    assert scheduler.schedule(request) == 32
    orders = scheduler.step()
    assert (orders.holds, len(orders.loads)) == ([], 1)
    assert orders.loads[0].prompt_digest == held.prompt_digest


def test_a_request_that_is_scheduled_at_once_costs_no_message(vllm: SimpleNamespace) -> None:
    scheduler = Scheduler(vllm)
    assert scheduler.schedule(scheduler.arrives("r", offer())) == 32
    assert scheduler.step().holds == []


@pytest.mark.parametrize("how", ["aborted", "has it all", "no room"])
def test_what_a_request_does_not_need_is_released_by_its_name(vllm: SimpleNamespace, how: str) -> None:
    scheduler = Scheduler(vllm, max_awaited=0.0 if how == "no room" else 0.5)
    request = scheduler.arrives("r", offer())
    assert len(scheduler.step().holds) == 1
    if how == "aborted":
        scheduler.finish(request, "FINISHED_ABORTED")
    else:
        scheduler.schedule(request, 32 if how == "has it all" else 0)
    orders = scheduler.step()
    assert [each.request_id for each in orders.releases] == ["r"]
    assert (orders.holds, orders.loads) == ([], [])


def test_a_request_that_comes_and_goes_within_a_step_is_not_held(vllm: SimpleNamespace) -> None:
    scheduler = Scheduler(vllm)
    scheduler.finish(scheduler.arrives("r", offer()), "FINISHED_ABORTED")
    orders = scheduler.step()
    assert (orders.holds, len(orders.releases)) == ([], 1)


def test_a_burst_is_read_once_and_held(vllm: SimpleNamespace) -> None:
    scheduler = Scheduler(vllm)
    for number in range(200):
        scheduler.arrives(f"r{number}", offer())
    assert [each.request_id for each in scheduler.step().holds] == [f"r{number}" for number in range(200)]


def test_requests_without_an_offer_are_not_held(vllm: SimpleNamespace) -> None:
    scheduler = Scheduler(vllm)
    for number, params in enumerate([{}, {"do_remote_decode": True}, offer(workers=[worker(host="10.9.9.9")])]):
        scheduler.arrives(f"r{number}", params)
    assert scheduler.step().holds == []


# ---- several takers ----


def test_samples_that_share_their_parameters_all_load(vllm: SimpleNamespace) -> None:
    """In one process vLLM gives all samples of a request the same dictionary."""
    scheduler = Scheduler(vllm)
    shared = offer(takers=3)
    requests = [scheduler.arrives(f"{number}_r", shared) for number in range(3)]
    assert [scheduler.schedule(request) for request in requests] == [32, 32, 32]
    assert [(each.request_id, each.offer.takers) for each in scheduler.step().loads] == [
        ("0_r", 3), ("1_r", 3), ("2_r", 3),
    ]  # fmt: skip


def test_a_router_says_how_many_requests_take_the_blocks(vllm: SimpleNamespace) -> None:
    scheduler = Scheduler(vllm)
    is_kept, params = scheduler.finish(scheduler.arrives("r", {"do_remote_decode": True, "takers": 3}))
    assert is_kept
    assert params is not None
    assert params["takers"] == scheduler.step().keeps[0].takers == 3


@pytest.mark.parametrize("takers", [0, -1, 17, 10**30, 2.0, "2", True, None, [2]])
def test_takers_that_cannot_be_are_refused_and_logged(
    vllm: SimpleNamespace, takers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler(vllm)
    assert scheduler.finish(scheduler.arrives("r", {"do_remote_decode": True, "takers": takers})) == (False, None)
    assert "request r: its blocks are not kept: takers is " in caplog.text
    assert "must be from 1 to 16, the setting max_takers" in caplog.text
    assert scheduler.step().keeps == []


@pytest.mark.parametrize("takers", [0, 65, "3", 1.0])
def test_an_offer_has_a_bounded_number_of_takers(vllm: SimpleNamespace, takers: Any) -> None:
    scheduler = Scheduler(vllm)
    assert scheduler.schedule(scheduler.arrives("r", offer(takers=takers))) == 0


def test_of_samples_at_a_prefill_engine_one_is_kept_and_all_offer_it(vllm: SimpleNamespace) -> None:
    scheduler = Scheduler(vllm)
    requests = [scheduler.arrives(f"{number}_r-1a2b", {"do_remote_decode": True}) for number in range(2)]
    first, second = map(scheduler.finish, requests)
    assert first[0]
    assert second == (False, first[1]), "its blocks are free at once"
    assert first[1] is not None
    assert first[1]["takers"] == 2
    assert [(each.request_id, each.takers) for each in scheduler.step().keeps] == [("0_r-1a2b", 2)]


def test_a_sample_that_was_aborted_offers_nothing(vllm: SimpleNamespace) -> None:
    scheduler = Scheduler(vllm)
    requests = [scheduler.arrives(f"{number}_r", {"do_remote_decode": True}) for number in range(2)]
    assert scheduler.finish(requests[0], "FINISHED_ABORTED") == (False, None)
    assert scheduler.finish(requests[1])[0]


def test_requests_of_other_prompts_share_nothing(vllm: SimpleNamespace) -> None:
    """A client chooses the name of its request, and cannot get the blocks of another prompt by it."""
    scheduler = Scheduler(vllm)
    one, other = (scheduler.arrives(f"{number}_r", {"do_remote_decode": True}) for number in range(2))
    other.prompt_token_ids = list(range(100, 132))
    assert [scheduler.finish(each)[0] for each in (one, other)] == [True, True]
    assert len(scheduler.step().keeps) == 2


def test_nothing_is_remembered_of_requests_that_ended(vllm: SimpleNamespace) -> None:
    siblings = Siblings()
    for number in range(3):
        siblings.add(f"{number}_r")
    siblings.add("r")
    siblings.offered("0_r", b"digest", {"offer": 1})
    siblings.remove("0_r")
    assert siblings.count("1_r") == 3
    assert siblings.offer("1_r", b"digest") == {"offer": 1}
    assert siblings.offer("1_r", b"other") is None
    assert siblings.offer("0_r", b"digest") is None
    for name in ("1_r", "2_r", "r", "no sample", "7_x"):
        siblings.remove(name)
    assert len(siblings) == 0


@pytest.mark.parametrize(
    ("name", "parent"),
    [("0_r", "r"), ("12_a_b", "a_b"), ("r", None), ("_r", None), ("x_r", None), ("01_r", None), ("1_", None)],
)
def test_samples_are_known_by_their_names(name: str, parent: str | None) -> None:
    assert parent_of(name) == parent


def test_parameters_of_a_request_are_left_as_they_came(vllm: SimpleNamespace) -> None:
    scheduler = Scheduler(vllm)
    params = offer()
    before = copy.deepcopy(params)
    scheduler.schedule(scheduler.arrives("r", params))
    assert params == before
