"""vLLM engines that compute a request at the same time: the prefill engine pushes each layer as soon as it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.engines import BLOCK, Answer, Engine, PushRouter, eventually, free_port, opened, prompts
from tests.engines.test_vllm import REQUESTS, TOKENS, Watch, expected


@pytest.fixture
def router(pair: tuple[Engine, Engine], address: Answer) -> PushRouter:
    return PushRouter(*pair, address)


def test_the_tokens_are_those_of_one_engine(alone: Engine, router: PushRouter) -> None:
    """Both engines have room for few of the requests at a time: they wait, and some are preempted."""
    wanted = prompts(REQUESTS, 11)
    watch = Watch(router.prefill, router.decode)
    assert router.serve("r", wanted, TOKENS) == expected(alone, wanted)
    watch.nothing_is_kept()
    assert watch.counted("push_arrived") == watch.counted("push_done") == REQUESTS
    assert watch.counted("pushed_blocks") >= sum(-(-len(prompt) // BLOCK) for prompt in wanted)
    assert watch.counted("push_missed") == watch.counted("push_failed") == 0


def test_a_push_that_fails_is_computed_again(alone: Engine, router: PushRouter) -> None:
    wanted = prompts(6, 12)
    watch = Watch(router.prefill, router.decode)
    router.prefill.say(op="fault", what="HcclBatchPut:exec=507053@2;HcclBatchPut:exec=507053@6")
    router.window = 1
    assert router.serve("f", wanted, TOKENS) == expected(alone, wanted)
    router.prefill.say(op="fault", what="")
    watch.nothing_is_kept()
    assert watch.counted("push_missed") == watch.counted("push_failed") >= 1
    assert watch.counted("push_arrived") + watch.counted("push_missed") == len(wanted)


def test_what_the_decode_engine_has_is_not_pushed(alone: Engine, router: PushRouter) -> None:
    (prompt,) = prompts(1, 17)
    prompt = (prompt * 700)[: 5 * BLOCK + 10]
    tokens = expected(alone, [prompt])
    watch = Watch(router.prefill, router.decode)
    for name, blocks in (("h", 6), ("i", 7)):
        router.answers.clear()
        assert router.serve(name, [prompt], TOKENS) == tokens
        assert watch.counted("pushed_blocks") == blocks
    watch.nothing_is_kept()


def test_aborts_at_either_end(router: PushRouter) -> None:
    watch = Watch(router.prefill, router.decode)
    for i, prompt in enumerate(prompts(8, 13)):
        router.start(f"a{i}", prompt, TOKENS)
        (router.decode if i % 2 else router.prefill).say(op="abort", id=f"a{i}")
    watch.nothing_is_kept()
    for engine in (router.prefill, router.decode):
        while engine.poll() is not None:
            pass


def test_a_decode_engine_that_never_asks(router: PushRouter) -> None:
    watch = Watch(router.prefill)
    (prompt,) = prompts(1, 14)
    router.prefill.finish("lonely", prompt, {"transfer_id": "lonely"})
    assert router.prefill.hear()["id"] == "lonely"
    assert router.prefill.state()["requests"] == 1
    watch.nothing_is_kept()
    assert watch.counted("push_expired") == 1


def test_preempted_requests(alone: Engine, router: PushRouter) -> None:
    wanted = [prompt + prompt[:1] * (2 * BLOCK - 10 - len(prompt)) for prompt in prompts(24, 15, 2 * BLOCK - 20)]
    watch = Watch(router.prefill, router.decode)
    before = router.decode.state()["preemptions"]
    router.window = 24
    assert router.serve("p", wanted, 300) == expected(alone, wanted, 300)
    assert router.decode.state()["preemptions"] > before
    watch.nothing_is_kept()


def test_a_prefill_engine_that_is_killed_and_started_anew(alone: Engine, router: PushRouter, model: Path) -> None:
    wanted = prompts(4, 16)
    tokens = expected(alone, wanted)
    watch = Watch(router.decode)
    address = {"host": "127.0.0.1", "port": free_port(), "cluster_id": 4811}
    settings = {"port": address["port"], "cluster_id": address["cluster_id"], "push": True}
    for name in ("killed", "anew"):
        other = Engine(model, model / f"{name}.log", settings)
        with opened(other):
            fresh = PushRouter(other, router.decode, address)
            assert fresh.serve(f"{name}0", wanted[:1], TOKENS) == tokens[:1]
            if name == "anew":
                break
            other.say(op="fault", what="HcclBatchPut:hold=push@*")
            for i in (1, 2, 3):
                fresh.start(f"k{i}", wanted[i], TOKENS)
            other.wait_arrived("push")
            eventually(lambda: watch.counted("push_arrived"), 1)
            other.kill()
            answers = {answer["id"]: answer["tokens"] for answer in (router.decode.hear() for _ in range(3))}
            assert answers == {f"k{i}": tokens[i] for i in (1, 2, 3)}
    watch.nothing_is_kept()
    assert (watch.counted("push_arrived"), watch.counted("push_missed")) == (2, 3)
