"""LLMModel: from the prompt to the slot of a batch, both roles, every status; and nothing is left when it fails."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aiodatadist import CacheKey, FeatureNotEnabled, LLMRole, LLMStatusCode, ParamInvalid
from aiodatadist.legacy import LLMReq, ModelConfig, ModelRunner
from aiodatadist.testing import inside, soft_fault, soft_faults_cleared, soft_hold
from tests.faults.test_cancellation import cancelled_at, hows
from tests.held import PUSH, each_held, turns
from tests.legacy.pairs import (
    OK,
    SHAPE,
    TENSORS,
    UNSET,
    AsyncWriter,
    Models,
    Writer,
    info_of,
    models,
    open_one,
    options,
    pair,
    uses_of,
)
from tests.legacy.test_kv_cache_manager import refused, until_served

S = LLMStatusCode
IDLE = LLMReq()
runners = pytest.mark.parametrize("kind", [Writer, AsyncWriter])


def request(req_id: int, length: int = 0, prefix_id: int = UNSET) -> LLMReq:
    return LLMReq(req_id, length, 1, 2, prefix_id)


def wrote(slot: int, values: list[float], first: int = 0) -> tuple[int, int, list[float]]:
    return slot, first, values


# ---- the way of a request ----


@runners
async def test_a_request_goes_from_predict_to_its_slot_of_the_batch(kind: type[Writer]) -> None:
    async with models(kind=kind) as m:
        free = m.pair.free()
        inputs = [wrote(0, [1, 2, 3]), wrote(1, [7])]
        assert await m.prompt.predict([request(10), request(11)], inputs, answer=("logits", 5)) == ("logits", 5)
        await m.decoder.pull_kv(request(11, length=32))
        await m.decoder.merge_kv(request(11), 0)
        await m.decoder.pull_kv(request(10, length=3))
        await m.decoder.merge_kv(request(10), 1)
        assert m.pair.free() == free, "both keys are consumed, and the prompt's memory is back"
        assert m.slot(0)[:2] == [7, 0]
        assert m.slot(1)[:3] == [1, 2, 3]
        assert await m.decoder.predict([request(11), request(10)], [wrote(1, [4], 3)]) == "done"
        assert await m.decoder.predict((IDLE, request(10)), [wrote(1, [5], 4)]) == "done"
        assert m.slot(1)[:6] == [1, 2, 3, 4, 5, 0]


async def test_only_the_tokens_of_the_prompt_travel_where_slots_are_of_tokens() -> None:
    async with models("-1,-1,8") as m:
        free = m.pair.free()
        await m.prompt.predict(request(10, 5), [wrote(0, [1, 2, 3, 4, 5])])
        assert m.writer.shapes == [[1, 5, 8]]
        await m.decoder.pull_kv(request(10, 5))
        await m.decoder.merge_kv(request(10), 1)
        assert m.slot(1)[:6] == [1, 2, 3, 4, 5, 0]
        link = m.pair.decoder.statistics().links[0]
        assert link.pulled_bytes == TENSORS * 5 * 8 * 4
        await refused(lambda: m.prompt.predict(request(11), []), S.LLM_PARAM_INVALID, "prompt_length is 0")
        assert m.pair.free() == free


async def test_the_staging_area_holds_what_was_pulled_last_until_it_is_merged() -> None:
    async with models() as m:
        await m.prompt.predict([request(10), request(11)], [wrote(0, [1]), wrote(1, [2])])
        await refused(
            lambda: m.decoder.merge_kv(request(10), 0), S.LLM_KV_CACHE_NOT_EXIST, "nothing is; pull_kv|nothing"
        )
        await m.decoder.pull_kv(request(10))
        await m.decoder.pull_kv(request(11))
        await refused(lambda: m.decoder.merge_kv(request(10), 0), S.LLM_KV_CACHE_NOT_EXIST, "request 11 is")
        await m.decoder.merge_kv(request(11), 0)
        await refused(lambda: m.decoder.merge_kv(request(11), 0), S.LLM_KV_CACHE_NOT_EXIST, "is not staged")
        await refused(lambda: m.decoder.pull_kv(request(10)), S.LLM_KV_CACHE_NOT_EXIST, "consumed")


async def test_a_failed_pull_leaves_nothing_staged() -> None:
    async with models() as m:
        await m.prompt.predict(request(10), [wrote(0, [1])])
        await m.decoder.pull_kv(request(10))
        await refused(lambda: m.decoder.pull_kv(request(99)), S.LLM_KV_CACHE_NOT_EXIST)
        await refused(lambda: m.decoder.merge_kv(request(10), 0), S.LLM_KV_CACHE_NOT_EXIST, "is not staged")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.decoder.merge_kv(request(10), 2), "batch_index is 2: the batch has 2 slots"),
        (lambda m: m.decoder.merge_kv(request(10), 0, 1), "batch_id is 1"),
        (lambda m: m.decoder.merge_kv(IDLE, 0), "an idle slot has no cache"),
        (lambda m: m.decoder.pull_kv(IDLE), "an idle slot has no cache"),
        (lambda m: m.decoder.pull_kv(request(10, 33)), "prompt_length is 33: a slot has 32 tokens"),
        (lambda m: m.prompt.pull_kv(request(10)), "pull_kv is for LLMRole.DECODER"),
        (lambda m: m.prompt.merge_kv(request(10), 0), "merge_kv is for LLMRole.DECODER"),
        (lambda m: m.prompt.pull_blocks(request(10), [0], [0]), "pull_blocks is for LLMRole.DECODER"),
        (lambda m: m.decoder.pull_blocks(request(10), [0], [0]), "needs paged attention"),
        (lambda m: m.decoder.preload_prompt_prefix(request(1, 0, 5), []), "is for LLMRole.PROMPT"),
        (lambda m: m.decoder.release_prompt_prefix(request(1, 0, 5)), "is for LLMRole.PROMPT"),
        (lambda m: m.prompt.preload_prompt_prefix(request(1), []), "prefix_id is 18446744073709551615"),
        (lambda m: m.prompt.release_prompt_prefix(request(1)), "prefix_id is 18446744073709551615"),
        (lambda m: m.prompt.predict([], []), "llm_req is empty"),
        (lambda m: m.prompt.predict([IDLE, IDLE], []), "all requests of llm_req are idle"),
        (lambda m: m.prompt.predict([request(1), request(2), request(3)], []), "3 requests: .* has 2 slots"),
        (lambda m: m.prompt.predict(request(1, 33), []), "prompt_length is 33: a slot has 32 tokens"),
        (lambda m: m.decoder.predict([IDLE], []), "1 requests: the batch has 2 slots"),
        (lambda m: m.decoder.predict([request(5), IDLE], []), r"request 5 is at index 0: merge_kv\(\) put \w+ there"),
    ],
)
async def test_what_breaks_a_rule_is_refused_and_nothing_is_left(call: Any, words: str) -> None:
    async with models() as m:
        free = m.pair.free()
        await refused(lambda: call(m), S.LLM_PARAM_INVALID, words)
        assert m.pair.free() == free
        assert m.writer.shapes == []


@pytest.mark.parametrize("wrong", [None, 7, [None], {1: request(1)}])
async def test_requests_are_requests(wrong: Any) -> None:
    async with models() as m:
        for model in (m.prompt, m.decoder):
            with pytest.raises(TypeError):
                await model.predict(wrong, [])


async def test_a_request_is_at_the_index_where_it_was_merged_until_it_is_completed() -> None:
    async with models() as m:
        await m.prompt.predict(request(10), [wrote(0, [1])])
        await m.decoder.pull_kv(request(10))
        await m.decoder.merge_kv(request(10), 1)
        await m.decoder.predict([IDLE, request(10)], [])
        await refused(
            lambda: m.decoder.predict([request(10), IDLE], []), S.LLM_PARAM_INVALID, r"merge_kv\(\) put [a-z]+ there"
        )
        await m.pair.decoder.complete_request(request(10))
        await refused(
            lambda: m.decoder.predict([IDLE, request(10)], []), S.LLM_PARAM_INVALID, r"merge_kv\(\) put [a-z]+ there"
        )


# ---- repeats, completion, capacity ----


async def test_a_request_has_one_cache_until_it_is_pulled_or_completed() -> None:
    async with models() as m:
        free = m.pair.free()
        twice = [request(10), request(10)]
        await refused(lambda: m.prompt.predict(twice, []), S.LLM_REPEAT_REQUEST, "request 10: it is named twice")
        await refused(lambda: m.decoder.predict(twice, []), S.LLM_REPEAT_REQUEST, "request 10: it is named twice")
        await m.prompt.predict(request(10), [])
        await refused(lambda: m.prompt.predict(request(10), []), S.LLM_REPEAT_REQUEST, "not pulled yet")
        for _ in range(2):
            await m.pair.prompt.complete_request(request(10))
        assert m.pair.free() == free
        await m.prompt.predict(request(10), [])
        await m.decoder.pull_kv(request(10))
        await m.prompt.predict(request(10), [])
        await m.pair.prompt.complete_request(request(10))
        await m.pair.decoder.complete_request(request(10))
        await refused(lambda: m.decoder.merge_kv(request(10), 0), S.LLM_KV_CACHE_NOT_EXIST, "is not staged")
        assert m.pair.free() == free


class Gated(Writer):
    """Waits for a word before it ends."""

    def __init__(self, datadist: Any) -> None:
        super().__init__(datadist)
        self.began, self.go = asyncio.Event(), asyncio.Event()

    async def run_model(self, kv_cache: Any, input_tensors: Any, **kwargs: Any) -> Any:
        super().run_model(kv_cache, input_tensors, **kwargs)
        self.began.set()
        await self.go.wait()
        return "late"


async def test_what_is_completed_while_its_model_runs_leaves_no_cache() -> None:
    async with models(kind=Gated) as m:
        free, gate = m.pair.free(), m.writer
        assert isinstance(gate, Gated)
        running = asyncio.create_task(m.prompt.predict([request(10), request(11)], []))
        await gate.began.wait()
        await refused(lambda: m.prompt.predict(request(11), []), S.LLM_REPEAT_REQUEST, "it is being predicted")
        await refused(lambda: m.decoder.pull_kv(request(10)), S.LLM_KV_CACHE_NOT_EXIST)
        await m.pair.prompt.complete_request(request(10))
        gate.go.set()
        assert await running == "late"
        await refused(lambda: m.decoder.pull_kv(request(10)), S.LLM_KV_CACHE_NOT_EXIST)
        await m.decoder.pull_kv(request(11))
        assert m.pair.free() == free


async def test_what_is_completed_before_its_model_runs_is_told_so() -> None:
    async with models() as m:
        await m.prompt.preload_prompt_prefix(request(UNSET, 0, 5), [])
        free = m.pair.free()
        with soft_hold("aclrtMemcpyAsync") as copy:
            running = asyncio.create_task(m.prompt.predict(request(10, 0, 5), []))
            await copy.arrived()
            await m.pair.prompt.complete_request(request(10))
            copy.release()
            await refused(lambda: running, S.LLM_REQUEST_ALREADY_COMPLETED, "request 10 was completed before")
        assert m.writer.shapes == [[1, 32, 8]]
        assert m.pair.free() == free


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_what_is_completed_while_it_is_pulled_is_not_staged(is_waiting: bool) -> None:
    """While it is on its way, and while it waits for another one's turn to end."""
    async with models() as m:
        await m.prompt.predict([request(10), request(11)], [wrote(0, [1]), wrote(1, [2])])
        with soft_hold(PUSH, at="half") as copy:
            pulls = [asyncio.create_task(m.decoder.pull_kv(request(req_id))) for req_id in (10, 11)]
            await copy.arrived()
            ended = 10 + is_waiting
            await m.pair.decoder.complete_request(request(ended))
            copy.release()
            await refused(lambda: pulls[is_waiting], S.LLM_REQUEST_ALREADY_COMPLETED, f"request {ended} was completed")
            await pulls[not is_waiting]
        await refused(lambda: m.decoder.merge_kv(request(ended), 0), S.LLM_KV_CACHE_NOT_EXIST, "is not staged")
        await m.decoder.merge_kv(request(21 - ended), 0)
        assert m.slot(0)[:2] == [2 - is_waiting, 0]


async def test_what_is_completed_while_it_is_pulled_has_nothing_staged_and_may_be_pulled_again() -> None:
    async with models() as m:
        for attempt in range(2):
            await m.prompt.predict(request(10), [wrote(0, [attempt + 1])])
            with soft_hold(PUSH, at="half") as copy:
                pulling = asyncio.create_task(m.decoder.pull_kv(request(10)))
                await copy.arrived()
                if attempt == 0:
                    await m.pair.decoder.complete_request(request(10))
                copy.release()
                if attempt == 0:
                    await refused(lambda: pulling, S.LLM_REQUEST_ALREADY_COMPLETED)  # noqa: B023
                    assert m.decoder._staged is None
                else:
                    await pulling
        await m.decoder.merge_kv(request(10), 0)
        assert m.slot(0)[:2] == [2, 0]


async def test_what_is_completed_while_it_is_merged_has_no_slot() -> None:
    async with models() as m:
        await m.prompt.predict(request(10), [wrote(0, [1])])
        await m.decoder.pull_kv(request(10))
        with soft_hold("aclrtMemcpyAsync") as copy:
            merging = asyncio.create_task(m.decoder.merge_kv(request(10), 1))
            await copy.arrived()
            await m.pair.decoder.complete_request(request(10))
            copy.release()
            await refused(lambda: merging, S.LLM_REQUEST_ALREADY_COMPLETED, "request 10 was completed")
        await refused(
            lambda: m.decoder.predict([IDLE, request(10)], []), S.LLM_PARAM_INVALID, r"merge_kv\(\) put [a-z]+ there"
        )
        await refused(lambda: m.decoder.merge_kv(request(10), 1), S.LLM_KV_CACHE_NOT_EXIST, "is not staged")


async def test_capacity_is_what_a_request_may_have_now() -> None:
    async with models("-1,-1,8") as m:
        state = m.pair.prompt.check_capacity(1)
        total = int(4194304 * 0.95) // 1024 * 1024
        assert state.is_available
        assert state.total_tokens_num == total // TENSORS // 32
        usage = m.pair.owner.pool_usage()
        assert usage is not None
        assert m.pair.prompt.check_capacity(state.free_tokens_num).is_available
        assert not m.pair.prompt.check_capacity(state.free_tokens_num + 1).is_available
        await m.prompt.predict(request(10, state.free_tokens_num), [])
        assert not m.pair.prompt.check_capacity(64).is_available
        await refused(lambda: m.prompt.predict(request(11, 64), []), S.LLM_DEVICE_OUT_OF_MEMORY, "do not fit")
        await m.pair.prompt.complete_request(request(10))
        assert m.pair.prompt.check_capacity(1) == state
        for wrong, error in ((0, ParamInvalid), (2**63, ValueError), ("1", TypeError)):
            with pytest.raises(error):
                m.pair.prompt.check_capacity(wrong)  # type: ignore[arg-type]
        with pytest.raises(ParamInvalid, match=r"is for LLMRole\.PROMPT"):
            m.pair.decoder.check_capacity(1)


async def test_capacity_of_a_fixed_shape_is_that_of_its_batch() -> None:
    async with models() as m:
        assert m.pair.prompt.check_capacity(64).is_available
        assert not m.pair.prompt.check_capacity(65).is_available, "two slots of 32 tokens"


@pytest.mark.parametrize("has_model", [True, False])
async def test_capacity_needs_to_know_what_a_token_is(has_model: bool) -> None:
    async with open_one(LLMRole.PROMPT, 1) as prompt:
        if has_model:
            await prompt.add_model(options(kv_tensor_format=None), ModelRunner())
        with pytest.raises(ParamInvalid, match="kv_tensor_format is not set" if has_model else "there is no model"):
            prompt.check_capacity(1)


# ---- shared prefixes ----


@pytest.mark.parametrize("shape", [SHAPE, "2,-1,8"])
async def test_a_shared_prefix_is_in_the_slot_before_the_model_runs(shape: str) -> None:
    async with models(shape) as m:
        before = m.pair.free()
        await m.prompt.preload_prompt_prefix(request(UNSET, 3, 5), [wrote(0, [1, 2, 3])])
        free = m.pair.free()
        for req_id in (10, 11):
            await m.prompt.predict([request(req_id, 5, 5)], [wrote(0, [8, 9], 3)])
            await m.decoder.pull_kv(request(req_id, 5))
            await m.decoder.merge_kv(request(req_id), 1)
            assert m.slot(1)[:6] == [1, 2, 3, 8, 9, 0]
        assert m.pair.free() == free
        await refused(
            lambda: m.prompt.preload_prompt_prefix(request(UNSET, 3, 5), []), S.LLM_PREFIX_ALREADY_EXIST, "prefix 5"
        )
        await refused(lambda: m.prompt.predict([request(12, 5, 6)], []), S.LLM_PREFIX_NOT_EXIST, "prefix 6")
        await m.prompt.release_prompt_prefix(request(UNSET, 0, 5))
        assert m.pair.free() == before
        await refused(lambda: m.prompt.release_prompt_prefix(request(UNSET, 0, 5)), S.LLM_PREFIX_NOT_EXIST, "prefix 5")
        await refused(lambda: m.prompt.predict([request(12, 5, 5)], []), S.LLM_PREFIX_NOT_EXIST, "prefix 5")


async def test_a_prefix_can_be_pulled_by_its_key() -> None:
    async with models() as m:
        await m.prompt.preload_prompt_prefix(request(UNSET, 0, 5), [wrote(0, [1, 2])])
        cache = await m.pair.puller.allocate_cache(await prefix_desc(m))
        for _ in range(2):
            await m.pair.puller.pull_cache(CacheKey(1, UNSET, 0, 5), cache)
        assert [float(each) for each in m.pair.puller.arrays(cache)[0][0, :3, 0]] == [1, 2, 0]


async def prefix_desc(m: Models) -> Any:
    (prefix,) = m.prompt._prefixes.values()
    assert prefix is not None
    return prefix.cache_desc


async def test_a_prefix_that_is_released_meanwhile_is_in_all_slots_and_its_memory_comes_back() -> None:
    async with models() as m:
        before = m.pair.free()
        await m.prompt.preload_prompt_prefix(request(UNSET, 0, 5), [wrote(0, [1, 2])])
        with soft_hold("aclrtMemcpyAsync") as copy:
            predicting = asyncio.create_task(m.prompt.predict([request(10, 0, 5), request(11, 0, 5)], []))
            await copy.arrived()
            releasing = asyncio.create_task(m.prompt.release_prompt_prefix(request(UNSET, 0, 5)))
            await asyncio.sleep(0)
            await refused(lambda: m.prompt.predict(request(12, 0, 5), []), S.LLM_PREFIX_NOT_EXIST)
            assert not releasing.done()
            copy.release()
            await releasing
            assert await predicting == "done"
        for slot in (0, 1):
            await m.decoder.pull_kv(request(10 + slot))
            await m.decoder.merge_kv(request(10 + slot), slot)
            assert m.slot(slot)[:3] == [1, 2, 0]
        assert m.pair.free() == before


async def test_prefixes_have_to_be_switched_on() -> None:
    async with open_one(LLMRole.PROMPT, 1) as prompt:
        model = await prompt.add_model(options(enable_shared_system_prefix=False), Writer(prompt))
        with pytest.raises(FeatureNotEnabled, match="enable_shared_system_prefix"):
            await model.preload_prompt_prefix(request(UNSET, 0, 5), [])


# ---- failure and cancellation ----


@runners
async def test_what_a_model_raises_is_raised_and_nothing_is_left(kind: type[Writer]) -> None:
    async with models(kind=kind) as m:
        free = m.pair.free()

        def fail() -> None:
            raise ZeroDivisionError("the model's own")

        m.writer.interrupt = fail
        for call in (
            lambda: m.prompt.predict(request(10), []),
            lambda: m.prompt.preload_prompt_prefix(request(UNSET, 0, 5), []),
        ):
            with pytest.raises(ZeroDivisionError, match="own"):
                await call()
        m.writer.interrupt = lambda: None
        assert m.pair.free() == free
        await m.prompt.preload_prompt_prefix(request(UNSET, 0, 5), [])
        await m.prompt.predict(request(10, 0, 5), [])
        await m.decoder.pull_kv(request(10))


async def test_a_model_without_run_model_says_what_is_missing() -> None:
    async with open_one(LLMRole.PROMPT, 1) as prompt:
        model = await prompt.add_model(options(), ModelRunner())
        with pytest.raises(NotImplementedError, match="ModelRunner must override"):
            await model.predict(request(1), [])


async def test_a_blocking_model_runs_beside_the_loop_and_is_outlasted_when_cancelled() -> None:
    async with models() as m:
        free, loop = m.pair.free(), asyncio.get_running_loop()
        began, go, ended = asyncio.Event(), threading.Event(), threading.Event()

        def block() -> None:
            loop.call_soon_threadsafe(began.set)
            assert go.wait(20), "the loop was blocked"
            ended.set()

        m.writer.interrupt = block
        running = asyncio.create_task(m.prompt.predict(request(10), []))
        await began.wait()
        running.cancel()
        await turns()
        assert not running.done(), "the model may still write"
        running.cancel()
        go.set()
        await asyncio.wait([running])
        assert running.cancelled()
        assert ended.is_set()
        assert m.pair.free() == free
        await refused(lambda: m.decoder.pull_kv(request(10)), S.LLM_KV_CACHE_NOT_EXIST)


@hows
@runners
async def test_predict_cancelled_at_any_await_leaves_nothing(how: str, kind: type[Writer]) -> None:
    async with models(kind=kind) as m:
        await m.prompt.preload_prompt_prefix(request(UNSET, 0, 5), [wrote(0, [1])])
        free, k, is_cancelled = m.pair.free(), 1, True
        registry = inside(m.pair.prompt).registry
        while is_cancelled:

            async def predict() -> None:
                await m.prompt.predict(request(10, 0, 5), [wrote(0, [2], 1)])

            async with each_held("aclrtMemcpyAsync"):
                is_cancelled = await cancelled_at(k, predict, how)
            for cache_id in list(
                registry._deallocations
            ):  # cancelled while memory went back: a task of its own ends that
                await registry.wait_given_back(cache_id)
            if is_cancelled:
                assert m.prompt._scheduled == set()
                assert m.pair.free() == free
            k += 1
        await m.decoder.pull_kv(request(10))
        assert m.pair.free() == free
        assert k > 2


@hows
async def test_pull_and_merge_cancelled_at_any_await_can_be_repeated(how: str) -> None:
    async with models() as m:
        free, k, is_cancelled = m.pair.free(), 1, True
        while is_cancelled:
            await m.prompt.predict(request(10), [wrote(0, [k, 2])])

            async def fetch() -> None:
                await m.decoder.pull_kv(request(10))
                await m.decoder.merge_kv(request(10), 1)

            is_cancelled = await cancelled_at(k, fetch, how)
            if is_cancelled and m.decoder._staged is not None:
                await m.decoder.merge_kv(request(10), 1)
                assert m.slot(1)[:2] == [k, 2]
            await m.pair.prompt.complete_request(request(10))
            assert m.pair.free() == free
            assert uses_of(m.pair.puller) == {}
            k += 1
        assert m.slot(1)[:2] == [k - 1, 2]
        assert k > 3


async def test_a_pull_that_takes_too_long_can_be_repeated() -> None:
    async with models(sync_kv_timeout=200) as m:
        await m.prompt.predict(request(10), [wrote(0, [1])])
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:hang")
            await refused(lambda: m.decoder.pull_kv(request(10)), S.LLM_WAIT_PROCESS_TIMEOUT)
        await m.decoder.pull_kv(request(10))


async def test_a_link_in_use_is_busy_for_a_model_too() -> None:
    async with models(sync_kv_timeout=60_000) as m:
        await m.prompt.predict(request(10), [])
        with soft_faults_cleared():
            soft_fault("HcclBatchPut:hang")
            pulling = asyncio.create_task(m.decoder.pull_kv(request(10)))
            await until_served(m.pair)
            await refused(lambda: m.pair.decoder.check_link_status(1), S.LLM_LINK_BUSY, "pull_cache")
            pulling.cancel()
            await asyncio.wait([pulling])
        assert await m.pair.decoder.unlink_clusters([info_of(m.pair.prompt)]) == (OK, [OK])
        await refused(lambda: m.decoder.pull_kv(request(10)), S.LLM_NOT_YET_LINK)


# ---- models come and go ----


async def test_a_decoders_runner_hears_of_its_cache_and_a_prompts_does_not() -> None:
    async with models() as m:
        reader, writer, before = m.reader, m.writer, m.pair.free()
        ((kind, cache),) = reader.told
        assert (kind, cache.cache_desc.shape) == ("allocated", [2, 32, 8])
        assert before[1] < before[0]
        await m.pair.decoder.finalize()
        assert [kind for kind, _ in reader.told] == ["allocated", "deallocated"]
        assert cache.per_device_tensor_addrs == []
        await m.pair.prompt.finalize()
        assert writer.told == []


class Returning(ModelRunner):
    """A plain function that returns an awaitable, which cancels itself."""

    def run_model(self, kv_cache: Any, input_tensors: Any, **kwargs: Any) -> Any:
        async def answer() -> None:
            raise asyncio.CancelledError

        return answer()


class Cancelling(ModelRunner):
    async def run_model(self, kv_cache: Any, input_tensors: Any, **kwargs: Any) -> None:
        raise asyncio.CancelledError


@pytest.mark.parametrize("kind", [Returning, Cancelling])
async def test_a_model_that_cancels_itself_fails_its_request_alone(kind: type[ModelRunner]) -> None:
    async with open_one(LLMRole.PROMPT, 1) as prompt:
        before = prompt.kv_cache_manager.pool_usage()
        model = await prompt.add_model(options(), kind())
        task = asyncio.create_task(model.predict([request(10)], []))
        await asyncio.wait([task])
        assert not task.cancelled()
        assert isinstance(error := task.exception(), RuntimeError)
        assert "CancelledError" in str(error)
        assert prompt.kv_cache_manager.pool_usage() == before


async def test_a_runner_that_refuses_its_cache_gets_no_model(no_leaks: None) -> None:
    class Refusing(ModelRunner):
        async def on_cache_allocated(self, kv_cache: Any) -> None:
            raise ZeroDivisionError

    async with open_one(LLMRole.DECODER, 2) as decoder:
        before = decoder.kv_cache_manager.pool_usage()
        with pytest.raises(ZeroDivisionError):
            await decoder.add_model(options(), Refusing())
        assert decoder.kv_cache_manager.pool_usage() == before
        model = await decoder.add_model(options(), Writer(decoder))
        assert model.model_id == 0


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_finalize_ends_a_model_that_runs_before_its_memory_goes(is_awaited: bool) -> None:
    async with open_one(LLMRole.PROMPT, 1) as prompt:
        began, go = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        class Slow(Writer):
            def run_model(self, kv_cache: Any, input_tensors: Any, **kwargs: Any) -> Any:
                loop.call_soon_threadsafe(began.set)
                go.wait(20)
                return super().run_model(kv_cache, [wrote(0, [1])])

        class Waiting(Writer):
            async def run_model(self, kv_cache: Any, input_tensors: Any, **kwargs: Any) -> Any:
                began.set()
                await asyncio.Event().wait()

        model = await prompt.add_model(options(), (Waiting if is_awaited else Slow)(prompt))
        running = asyncio.create_task(model.predict(request(10), []))
        await began.wait()
        ending = asyncio.create_task(prompt.finalize())
        if not is_awaited:  # it waits for the thread
            await turns()
            assert not ending.done()
            go.set()
        await ending
        await refused(lambda: running, S.LLM_ENGINE_FINALIZED, "finalized meanwhile")
        await refused(lambda: model.predict(request(11), []), S.LLM_ENGINE_FINALIZED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_shapes": None}, "has no llm.RefInputShapes"),
        ({"kv_dtypes": None}, "has no llm.RefInputDtypes"),
        ({"kv_shapes": [SHAPE]}, "1 shapes and 4 types"),
        ({"kv_shapes": [SHAPE, SHAPE, SHAPE, "2,32,9"]}, "all must be alike"),
        ({"kv_shapes": ["2,x,8"] * 4}, "whole numbers separated by commas"),
        ({"kv_shapes": ["2,0,8"] * 4}, "dimensions must be above 0"),
        ({"kv_shapes": ["2,-1,-1"] * 4}, "one after the batch may be -1"),
        ({"kv_shapes": ["2,32,-1"] * 4}, "dimension 2 of .* is the one that a request decides"),
        ({"kv_seq_len_dim_index": 3}, "must be a dimension of"),
        ({"kv_tensor_format": "BS"}, "a letter for each of the 3 dimensions"),
        ({"kv_shapes": ["2,-1,8"] * 4}, "DECODER, and paged attention, need all dimensions"),
        ({"kv_shapes": ["-1,32,8"] * 4}, "DECODER, and paged attention, need all dimensions"),
    ],
)
async def test_options_that_describe_no_cache_are_refused(change: dict[str, Any], words: str) -> None:
    async with open_one(LLMRole.DECODER, 2) as decoder:
        with pytest.raises(ParamInvalid, match=words):
            await decoder.add_model(options(**change), Writer(decoder))
        with pytest.raises(FeatureNotEnabled, match="no built-in runner"):
            await decoder.add_model(options())
        with pytest.raises(TypeError):
            await decoder.add_model({"llm.RefInputShapes": 3}, Writer(decoder))  # type: ignore[dict-item]


# ---- paged attention ----


async def test_with_paged_attention_blocks_are_pulled_straight_into_the_decoders() -> None:
    async with pair() as p:
        paged = options("8,4,16", enable_page_attention=True)
        writer, reader = Writer(p.prompt), Writer(p.decoder)
        prompt, decoder = await p.prompt.add_model(paged, writer), await p.decoder.add_model(paged, reader)
        free = p.free()
        await prompt.predict(request(10, 8), [wrote(3, [1, 2, 3, 4]), wrote(5, [5, 6, 7, 8])])
        await decoder.pull_blocks(request(10), [3, 5], [0, 7])
        await decoder.predict(request(10), [])
        m = Models(p, prompt, decoder, writer, reader)
        assert (m.slot(0), m.slot(7)) == ([1, 2, 3, 4], [5, 6, 7, 8])
        assert p.free() == free
        await refused(lambda: prompt.predict(request(11, 33), []), S.LLM_SEQ_LENOVERLIMIT, "8 blocks hold 32 tokens")
        await refused(lambda: decoder.pull_blocks(request(10)), S.LLM_PARAM_INVALID, "prompt_blocks is empty")
        for call in (lambda: decoder.pull_kv(request(10)), lambda: decoder.merge_kv(request(10), 0)):
            await refused(call, S.LLM_PARAM_INVALID, "use pull_blocks")
        large = options("4096,64,64", enable_page_attention=True)
        await refused(lambda: p.decoder.add_model(large, reader), S.LLM_BLOCKS_OUT_OF_MEMORY, "do not fit")
        assert p.free() == free


def test_a_model_config_becomes_options() -> None:
    config = ModelConfig()
    assert config.generate_options() == {
        "llm.EnablePagedAttention": "0", "llm.EnableSharedSystemPrefix": "0", "llm.IsFlowModel": "0",
    }  # fmt: skip
    config.ge_options = {"ge.x": "1"}
    config.om_paths = ["a.om", "b.om"]
    config.is_flow_model = True
    assert config.generate_options()["llm.OmCachePath"] == "a.om;b.om"
    assert config.generate_options()["ge.x"] == "1"
    made = options("2,-1,8")
    assert (made["llm.RefInputShapes"], made["llm.RefInputDtypes"]) == (";".join(["2,-1,8"] * 4), "0;0;0;0")
    for name, wrong in (("kv_shapes", "2,3"), ("kv_dtypes", [0]), ("kv_seq_len_dim_index", "1"), ("om_paths", "a.om"),
                        ("is_flow_model", 1), ("enable_page_attention", 0), ("kv_tensor_format", 1)):  # fmt: skip
        with pytest.raises(TypeError):
            setattr(config, name, wrong)
