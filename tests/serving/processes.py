"""The services of ``examples/serving`` in processes of their own, on ports that are free."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from aiodatadist._testing.ports import free_port
from aiodatadist.testing.small_model import Model, blocks_for, empty_cache, sample
from examples.serving.kv import CONFIG, WEIGHTS_SEED
from tests import children

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 40.0
"""Seconds after which a test gives up; says nothing about the services."""

DIRECT: dict[str, Any] = {"trust_env": False, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
"""Options of httpx: no proxy, and no certificates, which it would load for each request though none is over TLS."""

Job = dict[str, Any]
_model = Model(CONFIG, WEIGHTS_SEED)


def expected(job: Job) -> str:
    """Return the text of a single process, whose cache never moves."""
    prompt, count, seed = job["prompt"].encode(), job["max_tokens"], job.get("seed", 0)
    table = range(blocks_for(len(prompt) + count))
    cache = empty_cache(CONFIG, len(table))
    text = [sample(_model.prefill(prompt, cache, table), seed, len(prompt))]
    for position in range(len(prompt), len(prompt) + count - 1):
        text.append(sample(_model.decode_step(text[-1], position, cache, table), seed, position + 1))
    return bytes(text).decode()


class Service:
    """A service in its own process. Its output is in ``log``."""

    def __init__(self, command: list[str], port: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log: list[str] = []
        self._command = [sys.executable, "-m", *command, "--port", port]
        self.start()

    @classmethod
    def of(cls, name: str, *options: str) -> Service:
        """Return a service. ``name`` is ``prefill``, ``decode`` or ``router``."""
        return cls([f"examples.serving.{name}", *options], str(free_port()))

    def start(self) -> None:
        """Start the service, or start it again once it has ended."""
        self._process = children.Popen(self._command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self._process,))
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.log.append(line)
            if "Uvicorn running on" in line:
                self._is_ready.set()
        self._is_ready.set()  # or it has ended

    def wait_ready(self) -> None:
        assert self._is_ready.wait(PATIENCE), self.log
        assert self._process.poll() is None, self.log

    def metrics(self) -> dict[str, float]:
        """By name and labels, as they are written."""
        lines = httpx.get(f"{self.url}/metrics", **DIRECT).text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}

    def kill(self) -> None:
        self._process.kill()
        self._ended()

    def stop(self) -> None:
        """Stop the service like a frozen container."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait_ended(self) -> int:
        code = self._process.wait(PATIENCE)
        self._ended()
        return code

    def _ended(self) -> None:
        self._process.wait(PATIENCE)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def close(self) -> None:
        if not self._reader.is_alive():
            return
        self.kill()

    def complaints(self) -> list[str]:
        """Return the lines of its log about unexpected failures."""
        return [line for line in self.log if "Traceback" in line or "ERROR" in line or "never" in line]


class Three:
    """A router, a prefill and a decode service."""

    def __init__(
        self, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = (), router: tuple[str, ...] = ()
    ) -> None:
        address = f"127.0.0.1:{free_port()}"
        self.prefill = Service.of("prefill", "--kv-listen", address, *prefill)
        self.decode = Service.of("decode", "--prefill", f"1@{address}", *decode)
        self.router = Service.of("router", "--prefill", self.prefill.url, "--decode", self.decode.url, *router)
        self.all = self.prefill, self.decode, self.router

    def wait_ready(self) -> None:
        for service in self.all:
            service.wait_ready()
        eventually(self.health, "ok")

    def health(self) -> str:
        return str(httpx.get(f"{self.router.url}/health", **DIRECT).json()["status"])

    def kept(self) -> dict[str, float]:
        """Return what each end keeps for requests: all numbers are 0 if none is under way."""
        found = {"waiting": 0.0, "leases": self.prefill.metrics()["serving_leases"]}
        for name, service in (("prefill", self.prefill), ("decode", self.decode)):
            counted = service.metrics()
            found[f"blocks of {name}"] = counted["serving_blocks"] - counted["serving_blocks_free"]
            found["waiting"] += counted["serving_requests_waiting"]
        return found

    def wait_nothing_kept(self) -> None:
        eventually(lambda: {name: count for name, count in self.kept().items() if count}, {})

    def wait_retried(self) -> None:
        """Wait until the router has repeated a request."""
        eventually(lambda: self.router.metrics()["serving_retries_total"] > 0, True)

    def opened(self) -> dict[str, float]:
        """Count the descriptors and tasks of each service.

        Asking the router for its health makes it look at its connections.
        """
        self.health()
        found: dict[str, float] = {}
        for name, service in (("prefill", self.prefill), ("decode", self.decode), ("router", self.router)):
            counted = service.metrics()
            found[f"descriptors of {name}"] = counted["process_open_fds"]
            found[f"tasks of {name}"] = counted["serving_tasks"]
        return found

    def wait_no_more_opened(self, before: dict[str, float], more: int = 0) -> None:
        """Wait until no service has more descriptors or tasks than before, plus ``more``."""

        def left() -> dict[str, tuple[float, float]]:
            return {name: (now, before[name]) for name, now in self.opened().items() if now > before[name] + more}

        eventually(left, {})


@contextmanager
def three(**options: tuple[str, ...]) -> Iterator[Three]:
    """Open until the block ends; none of them complained."""
    services = Three(**options)
    try:
        services.wait_ready()
        yield services
    finally:
        for service in services.all:
            service.close()
            print(*service.log, sep="")  # pytest shows it where a test failed
    assert [service.complaints() for service in services.all] == [[], [], []]


def eventually(look: Callable[[], Any], wanted: Any) -> None:
    """Wait until ``look`` returns ``wanted``. A service does not report the end of work that no request waits for."""
    until = time.monotonic() + PATIENCE
    while (found := look()) != wanted and time.monotonic() < until:
        time.sleep(0.02)
    assert found == wanted, f"{found}, not {wanted}"


@asynccontextmanager
async def streamed(
    client: httpx.AsyncClient, url: str, job: Job
) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[str]]]:
    """Yield the response, and the texts of its events. They end with an AssertionError if the answer is not whole."""
    async with client.stream("POST", f"{url}/v1/completions", json={**job, "stream": True}) as response:
        yield response, _texts(response)


async def _texts(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    raise AssertionError("the answer ended without its last event")
