"""vLLM engines: one prefills, another decodes, and the tokens are those of one engine that does both."""

from __future__ import annotations

import os
from pathlib import Path

from tests.engines.engines import BLOCK, Engine, Router, eventually, opened, prompts

REQUESTS = 200 if os.environ.get("AIODATADIST_NIGHTLY") else 60
TOKENS = 8


def expected(alone: Engine, wanted: list[list[int]], tokens: int = TOKENS) -> list[list[int]]:
    for i, prompt in enumerate(wanted):
        alone.say(op="add", id=f"{i}", prompt=prompt, max_tokens=tokens, params=None)
    answers = {answer["id"]: answer["tokens"] for answer in (alone.hear() for _ in wanted)}
    return [answers[f"{i}"] for i in range(len(wanted))]


class Watch:
    """A comparison of idle engines with an earlier state: what they hold, and what they counted since.

    Engines may have more than before: ``descriptors`` for links, or for a pool's client, and ``threads``.
    """

    def __init__(self, *engines: Engine, descriptors: int = 12, threads: int = 4) -> None:
        self._engines = engines
        self._descriptors, self._threads = descriptors, threads
        self._before = [each.state() for each in engines]

    def counted(self, name: str) -> int:
        return sum(
            each.state()["counted"].get(name, 0) - before["counted"].get(name, 0)
            for each, before in zip(self._engines, self._before, strict=True)
        )

    def nothing_is_kept(self) -> None:
        """Check that blocks and requests are given back at both ends, and that neither descriptors nor threads pile up."""
        eventually(lambda: [each.state()["requests"] for each in self._engines], [0] * len(self._engines))
        for each, before in zip(self._engines, self._before, strict=True):
            now = each.state()
            assert now["free"] >= before["free"]
            assert now["descriptors"] <= before["descriptors"] + self._descriptors
            assert now["threads"] <= before["threads"] + self._threads


def test_the_tokens_are_those_of_one_engine(alone: Engine, pair: tuple[Engine, Engine]) -> None:
    wanted = prompts(REQUESTS, 1)
    watch = Watch(*pair)
    assert Router(*pair).serve("r", wanted, TOKENS) == expected(alone, wanted)
    watch.nothing_is_kept()
    assert watch.counted("pull_done") == watch.counted("lease_taken") == REQUESTS
    blocks = sum(-(-len(prompt) // BLOCK) for prompt in wanted)
    assert watch.counted("pulled_blocks") == blocks
    assert watch.counted("pull_failed") == 0


def test_a_pull_that_fails_is_computed_again(alone: Engine, pair: tuple[Engine, Engine]) -> None:
    wanted = prompts(6, 2)
    watch = Watch(*pair)
    pair[1].say(op="fault", what="HcclBatchGet:exec=507053@2;HcclBatchGet:exec=507053@4")
    assert Router(*pair, window=1).serve("f", wanted, TOKENS) == expected(alone, wanted)
    pair[1].say(op="fault", what="")
    watch.nothing_is_kept()
    assert watch.counted("pull_failed") >= 1
    assert watch.counted("pull_failed") + watch.counted("pull_done") == len(wanted)
    assert watch.counted("lease_released") == watch.counted("pull_failed")


def test_an_aborted_request_frees_its_blocks_at_both_ends(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    watch = Watch(*pair)
    decode.say(op="fault", what="HcclBatchGet:hold=pull@*")
    for i, prompt in enumerate(prompts(4, 3)):
        decode.say(op="add", id=f"a{i}", prompt=prompt, max_tokens=TOKENS, params=prefill.prefill(f"a{i}", prompt))
        if i == 0:  # the others are aborted wherever they are, behind it
            decode.wait_arrived("pull")
        decode.say(op="abort", id=f"a{i}")
    decode.say(op="release", what="pull")
    watch.nothing_is_kept()
    decode.say(op="fault", what="")
    assert watch.counted("lease_released") + watch.counted("lease_taken") == 4
    while decode.poll() is not None:  # vLLM may answer an aborted request, or not
        pass


def test_preempted_requests(alone: Engine, pair: tuple[Engine, Engine]) -> None:
    wanted = [prompt + prompt[:1] * (2 * BLOCK - 10 - len(prompt)) for prompt in prompts(24, 4, 2 * BLOCK - 20)]
    watch = Watch(*pair)
    before = pair[1].state()["preemptions"]
    assert Router(*pair, window=24).serve("p", wanted, 300) == expected(alone, wanted, 300)
    assert pair[1].state()["preemptions"] > before
    watch.nothing_is_kept()


def test_what_the_decode_engine_has_is_not_pulled(alone: Engine, pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts(1, 7)
    prompt = (prompt * 700)[: 5 * BLOCK + 10]
    (tokens,) = expected(alone, [prompt])
    watch = Watch(*pair)
    for i, blocks in enumerate((6, 7, 8)):
        assert decode.generate(f"h{i}", prompt, TOKENS, prefill.prefill(f"h{i}", prompt))["tokens"] == tokens
        assert watch.counted("pulled_blocks") == blocks
    params = prefill.prefill("less", prompt[: 2 * BLOCK])  # all of which the decode engine has
    assert decode.generate("less", prompt, TOKENS, params)["tokens"] == tokens
    watch.nothing_is_kept()
    assert watch.counted("pulled_blocks") == 8
    assert (watch.counted("lease_taken"), watch.counted("lease_released")) == (3, 1)


def test_engines_that_do_not_fit_name_both_values(alone: Engine, pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    (prompt,) = prompts(1, 5)
    watch = Watch(*pair)
    params = prefill.prefill("m", prompt)
    (worker,) = params["workers"]
    memory = {**worker["memory"], "regions": [{**each, "dtype": "float16"} for each in worker["memory"]["regions"]]}
    other = {**params, "workers": [{**worker, "memory": memory}]}
    assert decode.generate("m", prompt, TOKENS, other)["tokens"] == expected(alone, [prompt])[0]
    assert "dtype is float32 here and float16 at 127.0.0.1" in decode.log.read_text()
    assert decode.generate("true", prompt, 1, params)["reason"] == "length"
    watch.nothing_is_kept()
    assert (watch.counted("pull_failed"), watch.counted("lease_released")) == (1, 0), "it says so of another engine"
    assert decode.generate("n", prompt, TOKENS, {"do_remote_prefill": True})["reason"] == "length"
    assert "request n" in decode.log.read_text()


def test_a_prefill_engine_that_is_killed_and_started_anew(
    alone: Engine, pair: tuple[Engine, Engine], model: Path
) -> None:
    decode = pair[1]
    wanted = prompts(6, 6)
    tokens = expected(alone, wanted)
    watch = Watch(decode)
    other = Engine(model, model / "killed.log", {})
    with opened(other):
        params = [other.prefill(f"k{i}", prompt) for i, prompt in enumerate(wanted)]
        assert decode.generate("k0", wanted[0], TOKENS, params[0])["tokens"] == tokens[0]
        decode.say(op="fault", what="HcclBatchGet:hold=pull@*;aclrtStreamAbort:hold=abort")
        for i in (1, 2, 3):
            decode.say(op="add", id=f"k{i}", prompt=wanted[i], max_tokens=TOKENS, params=params[i])
        decode.wait_arrived("pull")
        other.kill()
        decode.wait_arrived("abort")  # it knows that the peer is gone
        for hold in ("abort", "pull"):
            decode.say(op="release", what=hold)
        answers = {answer["id"]: answer["tokens"] for answer in (decode.hear() for _ in range(3))}
        assert answers == {f"k{i}": tokens[i] for i in (1, 2, 3)}
        decode.say(op="fault", what="")
        assert decode.generate("k4", wanted[4], TOKENS, params[4])["tokens"] == tokens[4]
    assert watch.counted("pull_done") + watch.counted("pull_failed") == 5
    assert watch.counted("pull_failed") >= 3
    other = Engine(model, model / "anew.log", {"lease_seconds": 4})
    with opened(other):
        fresh = Watch(other)
        assert Router(other, decode).serve("n", wanted, TOKENS) == tokens
        other.prefill("forgotten", wanted[0])  # no decode engine comes for it
        fresh.nothing_is_kept()
        assert fresh.counted("lease_expired") == 1
        assert fresh.counted("lease_taken") == len(wanted)
    watch.nothing_is_kept()
