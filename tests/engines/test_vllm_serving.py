"""The router of ``examples/serving`` before two ``vllm serve``, which have HTTP servers of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.engines import Answer, eventually, free_port, prompts
from tests.engines.vllm_engine import ENVIRONMENT
from tests.serving.processes import ROOT, Service

START_SECONDS = 120.0
TAKEN = "vllm:aiodatadist_num_kv_taken_reqs_total"
OPTIONS = (
    "--skip-tokenizer-init --load-format dummy --enforce-eager --dtype float32 --max-model-len 4096 --max-num-seqs 16"
    " --seed 0 --served-model-name small"
)
"""Without a tokenizer prompts are numbers, and so are answers."""


class Server:
    """A service of the example, as which it becomes vLLM's server."""

    def __init__(self, service: str, model: Path, log: Path, *more: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        given = ["--vllm", str(model), "--port", str(port), *more]
        command = [sys.executable, "-m", f"examples.serving.{service}", *given, *OPTIONS.split()]
        with log.open("w") as words:
            environment = {**os.environ, **ENVIRONMENT, "AIODATADIST_RUNTIME": "soft"}
            self._process = subprocess.Popen(command, stdout=words, stderr=words, cwd=ROOT, env=environment)

    def counted(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

    def close(self) -> None:
        with self._process:
            self._process.terminate()
            try:
                self._process.wait(60)
            finally:
                self._process.kill()


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[tuple[Server, Server, Service]]:
    """Start a prefill engine, a decode engine, and the router."""
    address = f"127.0.0.1:{free_port()}"
    prefill = Server("prefill", model, model / "serve_prefill.log", "--kv-listen", address)
    decode = Server("decode", model, model / "serve_decode.log")
    router = Service.of("router", "--prefill", prefill.url, "--decode", decode.url)
    try:
        router.wait_ready()
        eventually(lambda: httpx.get(f"{router.url}/health", trust_env=False).status_code, 200, START_SECONDS)
        yield prefill, decode, router
    finally:
        for each in (router, decode, prefill):
            each.close()


def job_of(prompt: list[int], tokens: int = 12) -> Answer:
    return {
        "model": "small", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip


def tokens_of(url: str, job: Answer) -> list[int]:
    response = httpx.post(f"{url}/v1/completions", json=job, trust_env=False, timeout=60)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def streamed(url: str, job: Answer) -> list[int]:
    found: list[int] = []
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**job, "stream": True}, trust_env=False, timeout=60
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line and line != "data: [DONE]":
                choice: dict[str, Any] = json.loads(line.removeprefix("data: "))["choices"][0]
                found += choice["token_ids"] or ()
    return found


def test_the_tokens_are_those_of_one_engine(servers: tuple[Server, Server, Service]) -> None:
    prefill, decode, router = servers
    wanted = [job_of(prompt) for prompt in prompts(16, 11, 1500)]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda job: streamed(router.url, job), wanted))
        assert answers == list(clients.map(lambda job: tokens_of(prefill.url, job), wanted))
    assert tokens_of(router.url, wanted[0]) == answers[0]
    assert prefill.counted(TAKEN) + prefill.counted("vllm:aiodatadist_num_kv_released_reqs_total") == len(wanted) + 1
    assert decode.counted("vllm:aiodatadist_num_successful_transfers_total") > 0
    assert decode.counted("vllm:aiodatadist_num_failed_transfers_total") == 0


def test_a_client_that_leaves_ends_its_request(servers: tuple[Server, Server, Service]) -> None:
    _, decode, router = servers
    (prompt,) = prompts(1, 12)
    job = {**job_of(prompt, 3000 - len(prompt)), "stream": True}
    with httpx.stream("POST", f"{router.url}/v1/completions", json=job, trust_env=False, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        eventually(lambda: decode.counted("vllm:num_requests_running"), 1.0)
    eventually(lambda: decode.counted("vllm:num_requests_running"), 0.0)
    eventually(lambda: router.metrics().get('serving_requests_total{outcome="disconnected"}'), 1.0)
