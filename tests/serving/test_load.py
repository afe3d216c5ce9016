"""32 clients at once, 200 in the night, of which a quarter leave, while prefill is killed and started again."""

from __future__ import annotations

import random
from collections import Counter

import anyio
import anyio.to_thread
import httpx
import pytest

from tests.profiles import IS_NIGHT
from tests.serving.processes import DIRECT, Job, Three, expected, streamed, three

CLIENTS = 200 if IS_NIGHT else 32
KILLED_AFTER = CLIENTS // 5
"""Answers."""
SMALL = "--blocks", "256", "--longest-line", "32", "--wait-seconds", "2"
SECONDS = 100.0
"""After which the test gives up: it takes 4 to 8 of them where nothing else runs."""
LONG = 600
"""Tokens that a client asks for which leaves after some."""


class Load:
    """Clients, and the answers that they got."""

    def __init__(self, services: Three) -> None:
        self._services = services
        self._limits = httpx.Limits(max_connections=CLIENTS)
        self.answers: dict[int, str] = {}
        self.parts: dict[int, str] = {}
        self.seen: Counter[str] = Counter()
        self._may_be_killed = anyio.Event()
        self._was_killed = anyio.Event()

    async def run(self, jobs: list[Job]) -> None:
        async with (
            httpx.AsyncClient(limits=self._limits, timeout=60, **DIRECT) as client,
            anyio.create_task_group() as group,
        ):
            group.start_soon(self._kill)
            for number, job in enumerate(jobs):
                if number % 4:
                    group.start_soon(self._stay, client, number, job)
                elif number % 8:
                    group.start_soon(self._leave_after, client, number, job, number % 5 + 1)
                else:
                    group.start_soon(self._leave_within, client, job, number / 400)

    async def _kill(self) -> None:
        await self._may_be_killed.wait()
        await anyio.to_thread.run_sync(self._services.prefill.kill)
        self._was_killed.set()
        await anyio.to_thread.run_sync(self._services.wait_retried)  # else none might come while prefill is away
        self._services.prefill.start()
        await anyio.to_thread.run_sync(self._services.prefill.wait_ready)
        self.seen["restarted"] += 1

    async def _stay(self, client: httpx.AsyncClient, number: int, job: Job) -> None:
        """Repeat a request until it is answered, however often the router asks to come again.

        The later half of the clients come once prefill was killed.
        """
        if number >= CLIENTS // 2:
            await self._was_killed.wait()
        while True:
            async with streamed(client, self._services.router.url, job) as (response, texts):
                if response.status_code == 200:
                    self.answers[number] = "".join([text async for text in texts])
                    break
                assert response.status_code == 503, await response.aread()
            self.seen["refused"] += 1
            await anyio.sleep(int(response.headers["Retry-After"]))
        if len(self.answers) >= KILLED_AFTER:
            self._may_be_killed.set()

    async def _leave_after(self, client: httpx.AsyncClient, number: int, job: Job, count: int) -> None:
        async with streamed(client, self._services.router.url, {**job, "max_tokens": LONG}) as (response, texts):
            if response.status_code != 200:
                return
            part = ""
            async for text in texts:
                part += text
                if len(part) == count:
                    self.parts[number] = part
                    self.seen["left"] += 1
                    return

    async def _leave_within(self, client: httpx.AsyncClient, job: Job, seconds: float) -> None:
        """Leave after this time, wherever the request is just then."""
        with anyio.move_on_after(seconds) as scope:
            async with streamed(client, self._services.router.url, {**job, "max_tokens": LONG}) as (response, texts):
                if response.status_code == 200:
                    async for _ in texts:
                        pass
        self.seen["left"] += scope.cancelled_caught


def jobs_of(count: int) -> list[Job]:
    rng = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz ,.äß"
    return [
        {
            "prompt": "".join(rng.choices(letters, k=rng.randrange(1, 300))),
            "max_tokens": rng.randrange(1, 33),
            "seed": n,
        }
        for n in range(count)
    ]


@pytest.mark.timeout(150)
async def test_every_token_is_right_and_nothing_is_kept() -> None:
    jobs = jobs_of(CLIENTS)
    with three(prefill=SMALL, decode=SMALL, router=("--retry-seconds", "30")) as services:
        async with httpx.AsyncClient(**DIRECT) as client:
            assert (await client.post(f"{services.router.url}/v1/completions", json=jobs[0])).is_success
            before = services.opened()  # of connections, the few between the services
        load = Load(services)
        with anyio.fail_after(SECONDS):
            await load.run(jobs)

        services.wait_nothing_kept()
        # One eventfd of the device's is opened under load, and stays: after six such loads it was still one.
        services.wait_no_more_opened(before, more=1)
        ended = {service: service.metrics() for service in services.all}
    assert len(load.answers) == CLIENTS * 3 // 4
    assert load.answers == {number: expected(jobs[number]) for number in load.answers}
    assert load.parts == {n: expected({**jobs[n], "max_tokens": len(part)}) for n, part in load.parts.items()}
    assert load.seen["restarted"] == 1
    assert load.seen["left"] > CLIENTS // 8
    assert ended[services.decode]["serving_links_made_total"] == 2
    assert ended[services.router]["serving_retries_total"] > 0
    assert all(ended[each]['serving_requests_total{outcome="disconnected"}'] > 0 for each in services.all[1:])
