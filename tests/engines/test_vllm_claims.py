"""Clients of a decode engine write ``kv_transfer_params`` of their own, and get nothing that they could not compute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import SMALL
from tests.engines.engines import BLOCK, Answer, Engine, eventually, opened, prompts
from tests.engines.test_vllm import TOKENS, Watch, expected

LONG = 4 * BLOCK + 10


def two(seed: int, length: int = LONG) -> list[list[int]]:
    """Return two prompts of the same length that have nothing in common."""
    return [(prompt * length)[:length] for prompt in prompts(2, seed)]


def salted(
    engine: Engine, request: str, prompt: list[int], salt: str, params: Answer | None, tokens: int = 1
) -> Answer:
    engine.say(op="add", id=request, prompt=prompt, max_tokens=tokens, params=params, salt=salt)
    return engine.hear()


def test_a_client_that_names_another_request_s_blocks_does_not_read_them(
    alone: Engine, pair: tuple[Engine, Engine]
) -> None:
    """Its own prompt and lease, and the other's block numbers: the answer was the other's."""
    prefill, decode = pair
    mine, theirs = two(101)
    answers = expected(alone, [mine, theirs])
    watch = Watch(*pair)
    other, own = prefill.prefill("t1-theirs", theirs), prefill.prefill("t1-mine", mine)
    forged = {**own, "remote_block_ids": other["remote_block_ids"]}
    assert decode.generate("t1-forged", mine, TOKENS, forged)["tokens"] == answers[0]
    assert (watch.counted("pull_refused"), watch.counted("pulled_blocks")) == (1, 0)
    assert decode.generate("t1-cached", mine, TOKENS)["tokens"] == answers[0]  # from the prefix cache
    assert decode.generate("t1-own", mine, TOKENS, own)["tokens"] == answers[0]
    assert decode.generate("t1-other", theirs, TOKENS, other)["tokens"] == answers[1]
    watch.nothing_is_kept()
    assert (watch.counted("lease_taken"), watch.counted("claims_refused")) == (2, 1)


def test_a_lease_of_one_block_gives_no_more(alone: Engine, pair: tuple[Engine, Engine]) -> None:
    """Also no blocks that were freed."""
    prefill, decode = pair
    (mine, freed), (short,) = two(102), prompts(1, 103, BLOCK // 2)
    answers = expected(alone, [mine])
    blocks = prefill.prefill("t1-freed", freed)
    assert decode.generate("t1-took", freed, 1, blocks)["reason"] == "length"
    watch = Watch(*pair)
    own = prefill.prefill("t1-short", short)
    assert len(own["remote_block_ids"]) == 1
    forged = {**own, "remote_block_ids": blocks["remote_block_ids"], "remote_num_tokens": LONG}
    assert decode.generate("t1-more", mine, TOKENS, forged)["tokens"] == answers[0]
    assert (watch.counted("pull_refused"), watch.counted("pulled_blocks")) == (1, 0)
    assert decode.generate("t1-less", short, 1, own)["reason"] == "length"
    watch.nothing_is_kept()
    assert watch.counted("lease_taken") == 1


def test_a_client_that_sends_another_prompt_with_an_offer_has_it_computed(
    alone: Engine, pair: tuple[Engine, Engine]
) -> None:
    """The blocks of one prompt counted as computed tokens of another, and stood in the prefix cache under its hash."""
    prefill, decode = pair
    mine, theirs = two(104)
    answers = expected(alone, [mine, theirs])
    watch = Watch(*pair)
    offer = prefill.prefill("t2-theirs", theirs)
    assert decode.generate("t2-forged", mine, TOKENS, offer)["tokens"] == answers[0]
    assert (watch.counted("pull_refused"), watch.counted("pulled_blocks")) == (1, 0)
    assert decode.generate("t2-cached", mine, TOKENS)["tokens"] == answers[0]
    assert decode.generate("t2-true", theirs, TOKENS, offer)["tokens"] == answers[1]
    watch.nothing_is_kept()
    assert (watch.counted("lease_taken"), watch.counted("lease_released")) == (1, 0)


@pytest.mark.parametrize(
    ("forge", "pulls"),
    [
        pytest.param(lambda tokens: tokens - 7, 1, id="fewer"),
        pytest.param(lambda tokens: tokens + 7, 1, id="more"),
        pytest.param(lambda tokens: tokens - 2 * BLOCK, 0, id="blocks fewer"),
    ],
)
def test_an_offer_with_another_number_of_tokens(
    alone: Engine, pair: tuple[Engine, Engine], forge: Any, pulls: int
) -> None:
    """The last tokens of its last block are those of no prompt, or of another one. More blocks than tokens are no offer."""
    prefill, decode = pair
    seed = 105 + forge(LONG)
    (theirs,) = two(seed)[:1]
    mine = theirs[:-1] + two(seed + 1)[0][:20]
    (answer,) = expected(alone, [mine])
    watch = Watch(*pair)
    offer = prefill.prefill(f"t2-{seed}", theirs)
    forged = {**offer, "remote_num_tokens": forge(offer["remote_num_tokens"])}
    assert decode.generate(f"t2-forged-{seed}", mine, TOKENS, forged)["tokens"] == answer
    assert watch.counted("pull_refused") == pulls
    assert decode.generate(f"t2-true-{seed}", theirs, 1, offer)["reason"] == "length"
    watch.nothing_is_kept()
    assert watch.counted("lease_taken") == 1


def test_a_tenant_s_salt_is_part_of_the_prompt(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = two(106)[:1]
    watch = Watch(*pair)
    offer = salted(prefill, "salt-a", prompt, "a", {"do_remote_decode": True})["params"]
    assert salted(decode, "salt-b", prompt, "b", offer)["reason"] == "length"
    assert salted(decode, "salt-none", prompt, "", offer)["reason"] == "length"
    assert (watch.counted("pull_refused"), watch.counted("pulled_blocks")) == (2, 0)
    assert salted(decode, "salt-a", prompt, "a", offer)["reason"] == "length"
    watch.nothing_is_kept()
    assert watch.counted("lease_taken") == 1


def test_a_client_that_aborts_another_prompt_s_request_ends_no_lease(
    alone: Engine, pair: tuple[Engine, Engine]
) -> None:
    """Naming a lease was enough to have its blocks given up."""
    prefill, decode = pair
    mine, theirs = two(107)
    answers = expected(alone, [mine, theirs])
    assert decode.generate("end-first", mine, TOKENS)["tokens"] == answers[0]
    watch = Watch(*pair)
    offer = prefill.prefill("end-theirs", theirs)
    few = {**offer, "remote_num_tokens": BLOCK}  # which the decode engine has of the other prompt: it wants none
    assert decode.generate("end-forged", mine, TOKENS, few)["tokens"] == answers[0]
    decode.say(op="add", id="end-aborted", prompt=mine, max_tokens=1, params={**offer, "do_remote_prefill": True})
    decode.say(op="abort", id="end-aborted")
    assert decode.generate("end-true", theirs, TOKENS, offer)["tokens"] == answers[1]
    while decode.poll() is not None:  # vLLM may answer an aborted request, or not
        pass
    watch.nothing_is_kept()
    assert (watch.counted("lease_taken"), watch.counted("lease_released")) == (1, 0)


@pytest.mark.parametrize("size", [2 * BLOCK, BLOCK // 2, 1 << 20])
def test_an_offer_with_another_block_size(alone: Engine, pair: tuple[Engine, Engine], size: int) -> None:
    """A decode engine that has the beginning would take the rest from other blocks of the same lease."""
    prefill, decode = pair
    (prompt,) = two(108 + size)[:1]
    (answer,) = expected(alone, [prompt])
    offers = [prefill.prefill(f"size-{size}-{number}", prompt) for number in range(2)]
    assert decode.generate(f"size-begin-{size}", prompt[: 2 * BLOCK], 1)["reason"] == "length"
    watch = Watch(*pair)
    forged = {**offers[0], "remote_block_size": size, "remote_num_tokens": LONG}
    assert decode.generate(f"size-forged-{size}", prompt, TOKENS, forged)["tokens"] == answer
    assert decode.generate(f"size-cached-{size}", prompt, TOKENS)["tokens"] == answer
    worker = forged["workers"][0]
    memory = {**worker["memory"], "regions": [{**each, "tokens": size} for each in worker["memory"]["regions"]]}
    forged = {
        **offers[1],
        **forged,
        "lease": offers[1]["lease"],
        "workers": [{**worker, "memory": memory}],
    }
    decode.say(op="forget")
    assert decode.generate(f"size-begins-{size}", prompt[: 2 * BLOCK], 1)["reason"] == "length"
    assert decode.generate(f"size-layout-{size}", prompt, TOKENS, forged)["tokens"] == answer
    assert decode.generate(f"size-cached-again-{size}", prompt, TOKENS)["tokens"] == answer
    assert watch.counted("pulled_blocks") == 0
    decode.say(op="forget")
    for number, offer in enumerate(offers):
        assert decode.generate(f"size-true-{size}-{number}", prompt, TOKENS, offer)["tokens"] == answer
    watch.nothing_is_kept()


@pytest.fixture(scope="module")
def limited(model: Path) -> Iterator[Engine]:
    """Start an engine that lets few blocks be kept for others, or wait for them."""
    settings = {"device_id": 6, "max_leased": 0.3, "max_awaited": 0.3, "lease_seconds": 8}
    engine = Engine(model, model / "limited.log", settings, **SMALL)
    with opened(engine):
        engine.generate("ready", prompts(1, 110)[0], 1)
        yield engine


def test_requests_whose_blocks_no_engine_fetches_take_no_more_than_their_share(limited: Engine) -> None:
    """Limit leased blocks that no engine fetches: they took the whole KV cache for as long as leases last."""
    watch = Watch(limited)
    first, second, third = (two(111 + number)[0] for number in range(3))  # of five blocks each, of 41
    assert limited.prefill("leased-0", first) is not None
    assert limited.prefill("leased-1", second) is not None
    answer = limited.generate("leased-2", third, 1, {"do_remote_decode": True})
    assert (answer["reason"], answer["params"]) == ("length", None)
    assert limited.prefill("leased-again", first) is not None, "all but its last block are kept already"
    eventually(lambda: watch.counted("lease_no_room"), 1)
    eventually(lambda: watch.counted("lease_expired"), 3)
    assert limited.prefill("leased-3", third) is not None
    watch.nothing_is_kept()


def test_requests_that_no_engine_computes_take_no_more_than_their_share(
    alone: Engine, pair: tuple[Engine, Engine], limited: Engine, address: Answer
) -> None:
    """Limit blocks that wait for an engine: a few requests of invented transfers held the whole KV cache of another."""
    watch = Watch(limited)
    *waiting, honest = (two(120 + number)[0] for number in range(9))  # of five blocks each, of 41
    (answer,) = expected(alone, [honest])
    for number, prompt in enumerate(waiting):
        params = {"do_remote_prefill": True, "transfer_id": f"no-engine-computes-{number}", "prefill": address}
        limited.say(op="add", id=f"waiting-{number}", prompt=prompt, max_tokens=1, params=params)
    limited.say(op="add", id="honest", prompt=honest, max_tokens=TOKENS, params=None)
    answers = {each["id"]: each["tokens"] for each in (limited.hear() for _ in range(7))}
    assert answers["honest"] == answer
    assert answers.keys() == {"honest", *(f"waiting-{number}" for number in range(2, 8))}
    assert watch.counted("offer_no_room") == 6
    for number in range(2):
        limited.say(op="abort", id=f"waiting-{number}")
    watch.nothing_is_kept()
