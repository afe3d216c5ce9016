"""A process under the cluster id of another one: it does not replace a live link, and a link that ends makes room."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

from aiodatadist import BlocksCacheKey, LLMStatusCode
from aiodatadist._cluster.link_table import RIVAL_SECONDS
from aiodatadist._concurrency.signal import Signal
from aiodatadist._link.reactions import REACTIONS, Reactions
from aiodatadist._link.session import Session
from aiodatadist._wire.messages import Accept, Ping, Refuse, Unsupported
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster, verify
from tests.hostile.test_half_made import ask
from tests.hostile.test_strangers import DESC, KEY, client_of, link
from tests.test_pull import moved


@asynccontextmanager
async def another(cluster_id: int, device_id: int) -> AsyncIterator[Cluster]:
    """Open a cluster that says an id that is in use, as another process might; this one refuses it at init()."""
    async with open_cluster(100 + device_id, device_id=device_id, auth_key=KEY) as cluster:
        inside(cluster.datadist).cluster_id = cluster_id
        yield cluster


class Silence:
    """Keeps every process from answering when it is asked for a sign of life. Each still sends heartbeats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._asked = 0
        self._news = Signal()

        async def ping(session: Session, seconds: float = 0) -> None:
            self._asked += 1
            self._news.wake()
            await session.while_it_lasts(anyio.sleep_forever)

        monkeypatch.setattr(Session, "ping", ping)

    async def wait_asked(self, times: int) -> None:
        while self._asked < times:
            await self._news.wait()


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Silence:
    return Silence(monkeypatch)


async def test_a_live_link_is_not_replaced_and_the_log_names_both_places(caplog: pytest.LogCaptureFixture) -> None:
    async with open_cluster(1, auth_key=KEY) as prompt, open_cluster(2, device_id=1, auth_key=KEY) as decoder:
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        await link(decoder, prompt)
        async with another(2, device_id=2) as rival:
            linked = await rival.datadist.link_clusters([cluster_info(prompt)], 60_000)
            assert linked[1] == [LLMStatusCode.LLM_ALREADY_LINK]
            assert "another process has this id, from 127.0.0.1" in str(linked.errors[0])
            told = next(record for record in caplog.records if "another process" in record.message)
            assert told.levelno == logging.WARNING
            assert told.message.startswith("cluster 1: a client was not linked: 127.0.0.1:")
            assert "cluster 2 is linked already" in told.message
            for cluster in (prompt, decoder):
                assert [each.generation for each in cluster.datadist.statistics().links] == [1]
            await decoder.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [3], [0])
            verify(decoder.memory(cache), cache, moved(DESC, {0: 3}))


async def test_a_process_that_claims_not_to_know_the_question_keeps_its_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(here: Reactions, message: Ping) -> None:
        here.session.post(Unsupported(kind=message.type, call=message.call))

    async with open_cluster(1, auth_key=KEY) as prompt, open_cluster(2, device_id=1, auth_key=KEY) as decoder:
        await link(decoder, prompt)
        monkeypatch.setitem(REACTIONS, Ping, unknown)
        async with another(2, device_id=2) as rival:
            linked = await rival.datadist.link_clusters([cluster_info(prompt)], 60_000)
            assert linked[1] == [LLMStatusCode.LLM_ALREADY_LINK]
    assert "Traceback" not in caplog.text


@pytest.mark.autojump
async def test_a_process_that_does_not_answer_keeps_its_link_and_the_newcomer_waits_ten_seconds(
    silence: Silence,
) -> None:
    async with open_cluster(1, auth_key=KEY) as prompt, open_cluster(2, device_id=1, auth_key=KEY) as decoder:
        await link(decoder, prompt)
        async with client_of(prompt) as client:
            await ask(prompt, client, 2)
            began = anyio.current_time()
            refusal = await client.hear()
            assert isinstance(refusal, Refuse)
            assert refusal.status == LLMStatusCode.LLM_ALREADY_LINK
            assert anyio.current_time() - began == pytest.approx(RIVAL_SECONDS, abs=0.5)
        assert [each.generation for each in prompt.datadist.statistics().links] == [1]


async def test_a_newcomer_that_waits_is_linked_when_the_other_link_ends(silence: Silence) -> None:
    async with open_cluster(1, auth_key=KEY) as prompt, open_cluster(2, device_id=1, auth_key=KEY) as decoder:
        await link(decoder, prompt)
        async with client_of(prompt) as client:
            await ask(prompt, client, 2)
            await silence.wait_asked(1)
            inside(prompt.datadist).links.any(2).session.lost("its heartbeat connection was closed")
            assert isinstance(await client.hear(), Accept)


async def test_of_two_newcomers_one_gets_the_room_of_a_link_that_ended(silence: Silence) -> None:
    """Both waited, and both open their channels. The later one does not replace the link of the earlier one."""
    async with AsyncExitStack() as stack:
        prompt = await stack.enter_async_context(open_cluster(1, auth_key=KEY))
        decoder = await stack.enter_async_context(open_cluster(2, device_id=1, auth_key=KEY))
        await link(decoder, prompt)
        rivals = [await stack.enter_async_context(another(2, device_id)) for device_id in (2, 3)]
        asked: list[Any] = [
            asyncio.ensure_future(rival.datadist.link_clusters([cluster_info(prompt)], 60_000)) for rival in rivals
        ]
        await silence.wait_asked(2)
        await decoder.datadist.finalize()
        ends = [(await each).errors[0] for each in asked]
        assert ends.count(None) == 1
        assert "another process has this id" in str(next(filter(None, ends)))
        assert [each.generation for each in prompt.datadist.statistics().links] == [2]
