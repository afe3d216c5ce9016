"""The owner: the end that has a cache, and answers the initiator."""

from __future__ import annotations

import time
from contextlib import suppress

import anyio
from anyio.abc import TaskGroup
from pydantic import ValidationError

from aiodatadist import BlocksCacheKey, LLMDataDist, LLMException, LLMStatusCode, Notification
from aiodatadist._cli.bench.caches import BenchCache, moved, open_cache
from aiodatadist._cli.bench.messages import QUESTION, Answer, Check, Clear, Done, Open, Question, Refused
from aiodatadist.errors import NotLinked


async def serve(datadist: LLMDataDist) -> None:
    """Answer initiators until cancelled.

    An initiator that wants another cache links again: a cache is freed once its link has closed. A registered cache is
    freed only once all other links have closed, too.
    """
    async with anyio.create_task_group() as tasks:
        owner = _Owner(datadist, tasks)
        async for note in datadist.notifications():
            await owner.take(note)


class _Owner:
    def __init__(self, datadist: LLMDataDist, tasks: TaskGroup) -> None:
        self._datadist = datadist
        self._tasks = tasks
        self._caches: dict[int, BenchCache] = {}
        self._unused: list[BenchCache] = []

    async def take(self, note: Notification) -> None:
        try:
            answer = await self._answer(note.cluster_id, QUESTION.validate_json(note.payload))
        except (LLMException, ValidationError) as error:
            answer = Refused(message=str(error))
        try:
            await self._datadist.notify(note.cluster_id, answer.payload())
        except LLMException:  # it went away meanwhile
            return

    async def _answer(self, initiator: int, question: Question) -> Answer:
        if isinstance(question, Open):
            await self._open(initiator, question)
        elif isinstance(question, (Clear, Check)):
            cache = self._caches.get(initiator)
            if cache is None:
                return Refused(message="no cache was asked for over this link")
            if isinstance(question, Check):
                return Done(wrong=await cache.wrong(initiator, moved(cache.case)))
            await cache.fill(0)
        return Done(cpu_seconds=time.process_time())

    async def _open(self, initiator: int, question: Open) -> None:
        key = BlocksCacheKey(self._datadist.cluster_id, question.model_id)
        cache = await open_cache(self._datadist, question.case, key)
        self._caches[initiator] = cache
        self._tasks.start_soon(self._close_with_link, initiator, cache)
        await cache.fill(self._datadist.cluster_id)

    async def _close_with_link(self, initiator: int, cache: BenchCache) -> None:
        with suppress(NotLinked):
            await self._datadist.wait_link_closed(initiator)
        if self._caches.get(initiator) is cache:
            del self._caches[initiator]
        self._unused.append(cache)
        while self._unused:
            unused = self._unused.pop()
            try:
                await unused.aclose()
            except LLMException as error:
                if error.status_code is not LLMStatusCode.LLM_EXIST_LINK:
                    raise
                self._unused.append(unused)  # until the other initiator's link closes
                return
