"""Claims of ``docs/serving.md`` about the three services, part by part."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

from aiodatadist import new_lease_name
from aiodatadist._testing.ports import free_port
from aiodatadist.testing.small_model import BLOCK
from tests.serving.processes import DIRECT, ROOT, Job, Service, Three, eventually, expected, streamed, three

BLOCKS = 128
LONG: Job = {"prompt": "a long answer", "max_tokens": 1500, "stream": True}
"""Takes a second or more."""
DISCONNECTED = 'serving_requests_total{outcome="disconnected"}'
RELEASED = 'serving_leases_ended_total{how="released"}'
WITHDRAWN = 'serving_leases_ended_total{how="withdrawn"}'


@pytest.fixture(scope="module")
def services() -> Iterator[Three]:
    few = "--blocks", str(BLOCKS), "--longest-line", "1", "--wait-seconds", "30"
    with three(prefill=few, decode=few) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does with the services that tests share."""
    yield
    if "services" in request.fixturenames:
        request.getfixturevalue("services").wait_nothing_kept()


def ask(service: Service, job: Job) -> httpx.Response:
    return httpx.post(f"{service.url}/v1/completions", json=job, **DIRECT, timeout=30)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def keep(services: Three, prompt: str) -> dict[str, Any]:
    """Keep a prompt's blocks at prefill, and return what the router would tell a decode service."""
    lease = {"do_remote_decode": True, "lease": new_lease_name()}
    response = ask(services.prefill, {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": lease})
    assert response.status_code == 200, response.text
    kept: dict[str, Any] = response.json()["kv_transfer_params"]
    return kept


def take_back(services: Three, kept: dict[str, Any]) -> None:
    response = httpx.delete(f"{services.prefill.url}/v1/leases/{kept['ticket']['lease']}", **DIRECT)
    assert response.status_code == 204


# ---- the page ----


def test_commands_of_the_page() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$ (.*)$", page, flags=re.MULTILINE)
    shown = {
        name: float(value) for name, value in re.findall(r"^((?:serving|aiodatadist)_\S+) (\S+)$", page, re.MULTILINE)
    }
    assert len(shown) >= 12
    ports = {port: str(free_port()) for port in ("8000", "8001", "8002", "26001")}
    commands = [shlex.split(re.sub("|".join(ports), lambda port: ports[port[0]], line)) for line in lines[1:]]
    services = [
        Service(command[2:], ports[port]) for command, port in zip(commands, ("8001", "8002", "8000"), strict=False)
    ]
    try:
        for service in services:
            service.wait_ready()
        router = f"http://127.0.0.1:{ports['8000']}"
        assert commands[3][2] == f"{router}/v1/completions"
        eventually(lambda: httpx.get(f"{router}/health", **DIRECT).status_code, 200)
        job = json.loads(commands[3][-1])
        text = httpx.post(commands[3][2], json={**job, "stream": False}, **DIRECT).json()["choices"][0]["text"]
        assert text == expected(job)

        def counted() -> dict[str, float | None]:
            found = services[1].metrics()
            return {name: found.get(name) for name in shown}

        eventually(counted, shown)  # blocks are given back behind the answer
    finally:
        for service in services:
            service.close()


# ---- answers ----


@pytest.mark.parametrize("prompt", ["a", "x" * BLOCK, "Grüße an alle " * 20], ids=["short", "block", "long"])
async def test_answers_are_those_of_one_process(services: Three, prompt: str) -> None:
    job = {"prompt": prompt, "max_tokens": 20, "seed": 5}
    assert text_of(ask(services.router, job)) == expected(job)
    async with httpx.AsyncClient(**DIRECT) as client, streamed(client, services.router.url, job) as (_, texts):
        assert [text async for text in texts] == list(expected(job))


@pytest.mark.parametrize(
    ("job", "what"),
    [
        ({"prompt": ""}, "body.prompt: "),
        ({"prompt": "a", "temperature": 1}, "body.temperature: "),
        ({"prompt": "a" * (BLOCKS * BLOCK + 1)}, f"needs {BLOCKS + 1} blocks, and the cache has {BLOCKS}"),
        ({"prompt": "a", "max_tokens": BLOCKS * BLOCK}, f"needs {BLOCKS + 1} blocks, and the cache has {BLOCKS}"),
        ('{"prompt": "\\ud800"}', "body.prompt: "),
        ('{"prompt": "a", "max_tokens": NaN}', "body.max_tokens: "),
        ('["a"]', "body: "),
        ('{"prompt": "a"', "body."),
        ("[" * 100_000, "body"),
    ],
    ids=["empty", "option", "prompt", "answer", "surrogate", "nan", "list", "torn", "deep"],
)
def test_a_request_that_cannot_be_answered_says_why(services: Three, job: Job | str, what: str) -> None:
    body = job if isinstance(job, str) else json.dumps(job)
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{services.router.url}/v1/completions", content=body, headers=headers, **DIRECT)
    assert response.status_code == 400
    assert what in response.json()["error"]["message"]


def test_a_ticket_of_another_prompt_or_service_is_refused(services: Three) -> None:
    kept = keep(services, "a prompt")
    assert ask(services.decode, {"prompt": "another prompt, longer", "kv_transfer_params": kept}).status_code == 400
    other = {**kept, "ticket": {**kept["ticket"], "cluster_id": 9}}
    response = ask(services.decode, {"prompt": "a prompt", "kv_transfer_params": other})
    assert (response.status_code, "none of the prefill services [1]" in response.text) == (400, True)
    take_back(services, kept)


def test_a_ticket_gives_its_own_blocks_to_its_own_prompt_only(services: Three) -> None:
    kept, theirs = keep(services, "a prompt"), keep(services, "a secret")
    forged = {**kept, "ticket": {**kept["ticket"], "blocks": theirs["ticket"]["blocks"]}}
    for prompt, ticket, why in (("a prompt", forged, "other blocks"), ("b prompt", kept, "another prompt")):
        response = ask(services.decode, {"prompt": prompt, "kv_transfer_params": ticket})
        assert (response.status_code, why in response.text) == (410, True)
    response = ask(services.decode, {"prompt": "a prompt", "max_tokens": 3, "kv_transfer_params": kept})
    assert text_of(response) == expected({"prompt": "a prompt", "max_tokens": 3})
    take_back(services, theirs)


# ---- a client leaves ----


async def test_a_client_that_leaves_in_the_middle_frees_the_blocks_at_the_other_end(services: Three) -> None:
    before = services.decode.metrics().get(DISCONNECTED, 0.0)
    async with httpx.AsyncClient(**DIRECT) as client, streamed(client, services.router.url, LONG) as (_, texts):
        assert await anext(texts) == expected({**LONG, "max_tokens": 1})
        assert services.kept()["blocks of decode"] > 0
    eventually(lambda: services.decode.metrics().get(DISCONNECTED), before + 1)
    services.wait_nothing_kept()


async def test_a_client_that_leaves_while_it_waits_for_blocks(services: Three) -> None:
    everything = keep(services, "a" * (BLOCKS * BLOCK))
    async with httpx.AsyncClient(**DIRECT) as client, anyio.create_task_group() as group:
        group.start_soon(lambda: client.post(f"{services.router.url}/v1/completions", json={"prompt": "a"}))
        await anyio.to_thread.run_sync(eventually, lambda: services.kept()["waiting"], 1.0)
        group.cancel_scope.cancel()
    eventually(lambda: services.kept()["waiting"], 0.0)
    take_back(services, everything)


async def test_a_decode_that_is_cancelled_tells_prefill(services: Three) -> None:
    """The first client holds the decode service's blocks; the second one's are kept at prefill until it leaves."""
    before = services.prefill.metrics().get(RELEASED, 0.0)
    whole = {**LONG, "max_tokens": BLOCKS * BLOCK - len(LONG["prompt"])}
    url = f"{services.decode.url}/v1/completions"
    async with (
        httpx.AsyncClient(**DIRECT) as client,
        streamed(client, services.router.url, whole) as (_, texts),
        anyio.create_task_group() as group,
    ):
        await anext(texts)
        job = {"prompt": "a", "kv_transfer_params": await anyio.to_thread.run_sync(keep, services, "a")}
        group.start_soon(lambda: client.post(url, json=job))
        await anyio.to_thread.run_sync(eventually, lambda: services.kept()["waiting"], 1.0)
        assert services.kept()["leases"] == 1.0
        group.cancel_scope.cancel()
    eventually(lambda: services.prefill.metrics().get(RELEASED, 0.0), before + 1)


def test_what_the_router_takes_back_before_it_is_computed_is_not_kept(services: Three) -> None:
    lease = {"do_remote_decode": True, "lease": new_lease_name()}
    take_back(services, {"ticket": lease})
    response = ask(services.prefill, {"prompt": "a", "kv_transfer_params": lease})
    assert (response.status_code, "was taken back" in response.text) == (410, True)


def test_what_is_taken_back_cannot_be_pulled(services: Three) -> None:
    before = services.prefill.metrics().get(WITHDRAWN, 0.0)
    kept = keep(services, "a prompt")
    take_back(services, kept)
    assert services.prefill.metrics()[WITHDRAWN] == before + 1
    response = ask(services.decode, {"prompt": "a prompt", "kv_transfer_params": kept})
    assert (response.status_code, "keeps no blocks" in response.text) == (410, True)


# ---- the pool is full ----


def test_a_request_that_finds_no_room_in_time_is_told_to_come_again() -> None:
    with three(prefill=("--blocks", "4", "--wait-seconds", "0.2")) as services:
        everything = keep(services, "a" * (4 * BLOCK))
        response = ask(services.router, {"prompt": "a"})
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert "not free within 0.2 s" in response.text
        take_back(services, everything)
        eventually(lambda: ask(services.router, {"prompt": "a"}).status_code, 200)


async def test_one_request_waits_and_the_next_is_refused_at_once(services: Three) -> None:
    everything = keep(services, "a" * (BLOCKS * BLOCK))
    statuses: list[int] = []

    async def wait() -> None:
        statuses.append((await anyio.to_thread.run_sync(ask, services.router, {"prompt": "a"})).status_code)

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.to_thread.run_sync(eventually, lambda: services.kept()["waiting"], 1.0)
        response = await anyio.to_thread.run_sync(ask, services.router, {"prompt": "a"})
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert "1 requests wait for blocks already" in response.text
        await anyio.to_thread.run_sync(take_back, services, everything)
    assert statuses == [200]


# ---- a service ends ----


def test_prefill_that_was_started_again_is_linked_again() -> None:
    with three(decode=("--link-seconds", "0.2"), router=("--retry-seconds", "1")) as services:
        kept = keep(services, "a prompt")
        job = {"prompt": "a prompt", "max_tokens": 4}
        services.prefill.kill()
        eventually(services.health, "services are missing")
        response = ask(services.decode, {**job, "kv_transfer_params": kept})
        assert (response.status_code, "no link to prefill service 1" in response.text) == (410, True)
        response = ask(services.router, job)
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")

        services.prefill.start()
        services.prefill.wait_ready()
        eventually(services.health, "ok")
        response = ask(services.decode, {**job, "kv_transfer_params": kept})
        assert (response.status_code, "keeps no blocks" in response.text) == (410, True)
        assert text_of(ask(services.router, job)) == expected(job)
        assert services.decode.metrics()["serving_links_made_total"] == 2
        services.wait_nothing_kept()


def test_each_link_that_is_made_again_leaves_nothing_of_the_last_one() -> None:
    with three() as services:
        opened = []
        for made in (2, 3):
            services.prefill.kill()
            services.prefill.start()
            services.prefill.wait_ready()
            eventually(lambda: services.decode.metrics()["serving_links_made_total"], made)
            eventually(services.health, "ok")
            assert ask(services.router, {"prompt": "a"}).status_code == 200
            opened.append(services.opened())
        services.wait_no_more_opened(opened[0])


async def test_an_answer_whose_decode_service_died_does_not_look_whole() -> None:
    with three() as services:
        async with (
            httpx.AsyncClient(**DIRECT) as client,
            client.stream("POST", f"{services.router.url}/v1/completions", json=LONG) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            await anyio.to_thread.run_sync(services.decode.kill)
            rest = [json.loads(line.removeprefix("data: ")) async for line in lines if line]
        assert "the decode service ended" in rest[-1]["error"]["message"]
        services.decode.start()
        services.decode.wait_ready()
        eventually(services.health, "ok")
        assert ask(services.router, {"prompt": "a"}).status_code == 200
        services.wait_nothing_kept()


@pytest.mark.nightly  # eight seconds of heartbeats
async def test_decode_that_is_stopped_for_a_while_goes_on_and_keeps_nothing() -> None:
    lost = 'aiodatadist_links_ended_total{cluster="1",reason="heartbeats_missed"}'
    with three() as services:
        async with (
            httpx.AsyncClient(**DIRECT, timeout=60) as client,
            streamed(client, services.router.url, LONG) as (_, texts),
        ):
            text = await anext(texts)
            kept = await anyio.to_thread.run_sync(keep, services, "a prompt")
            services.decode.stop()
            await anyio.to_thread.run_sync(eventually, lambda: services.prefill.metrics()[lost], 1.0)
            services.decode.go_on()
            text += "".join([more async for more in texts])
        assert text == expected(LONG)
        eventually(lambda: services.decode.metrics()["serving_links_made_total"], 2.0)
        job = {"prompt": "a prompt", "max_tokens": 4}
        assert text_of(ask(services.decode, {**job, "kv_transfer_params": kept})) == expected(job)
        assert text_of(ask(services.router, job)) == expected(job)
        services.wait_nothing_kept()


async def test_decode_that_shall_end_finishes_its_answers() -> None:
    job = {**LONG, "max_tokens": 400}
    with three() as services:
        async with (
            httpx.AsyncClient(**DIRECT) as client,
            streamed(client, services.router.url, job) as (_, texts),
        ):
            text = await anext(texts)
            services.decode.terminate()
            text += "".join([more async for more in texts])
        assert text == expected(job)
        assert await anyio.to_thread.run_sync(services.decode.wait_ended) in {0, -signal.SIGTERM}


def test_prefill_that_shall_end_waits_until_its_blocks_are_taken() -> None:
    with three() as services:
        job = {"prompt": "a prompt", "max_tokens": 4}
        kept = keep(services, "a prompt")
        services.prefill.terminate()
        eventually(lambda: any("Waiting for application shutdown" in line for line in services.prefill.log), True)
        assert text_of(ask(services.decode, {**job, "kv_transfer_params": kept})) == expected(job)
        assert services.prefill.wait_ended() in {0, -signal.SIGTERM}


def test_a_lease_that_is_never_pulled_ends_with_its_time() -> None:
    with three(prefill=("--lease-seconds", "0.2")) as services:
        kept = keep(services, "a prompt")
        services.wait_nothing_kept()
        assert services.prefill.metrics()['serving_leases_ended_total{how="expired"}'] == 1
        assert ask(services.decode, {"prompt": "a prompt", "kv_transfer_params": kept}).status_code == 410
