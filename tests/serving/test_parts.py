"""The line for blocks, and how a request's generator ends."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import httpx
import pytest
from fastapi.routing import APIRoute

from aiodatadist import BlockPool, CacheDesc, DataType, LLMRole, new_lease_name
from aiodatadist._adapters.settings import Settings
from aiodatadist.testing import open_cluster, soft_counters
from examples.serving import decode, prefill
from examples.serving.answer import Answer, Pieces, Refused
from examples.serving.api import PrefillJob
from examples.serving.blocks import Blocks
from examples.serving.kv import KvSettings, open_kv
from examples.serving.metrics import Metrics
from examples.serving.prefill import Prefill
from examples.serving.router import Job, Router, app_of, service_url

# ---- blocks ----


@pytest.mark.parametrize(
    ("count", "line", "seconds", "status", "after"),
    [(5, 8, 10.0, 400, {}), (4, 0, 10.0, 503, {"Retry-After": "1"}), (4, 8, 0.01, 503, {"Retry-After": "1"})],
    ids=["never", "line", "late"],
)
async def test_refused(count: int, line: int, seconds: float, status: int, after: dict[str, str]) -> None:
    async with open_cluster(1) as cluster:
        cache = await cluster.blocks(CacheDesc(2, [4, 64], DataType.DT_UINT8))
        pool = BlockPool(cluster.datadist.cache_manager, cache)
        blocks = Blocks(pool, line, seconds)
        async with blocks.take(1):
            with pytest.raises(Refused) as refused:
                async with blocks.take(count):
                    raise AssertionError
            assert (refused.value.status, refused.value.headers) == (status, after)
            assert (pool.waiting, pool.free) == (0, 3)
        assert pool.free == 4


# ---- router ----


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": True, "stream_options": {"include_usage": True}}])
async def test_a_client_says_nothing_about_blocks(stream: Job) -> None:
    """vLLM prefers kv_transfer_params to those in vllm_xargs, but not if they are null, as when it keeps no blocks."""
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": [], "kv_transfer_params": None})

    forged = {"do_remote_prefill": True, "workers": []}
    job = {
        "prompt": "a",
        "kv_transfer_params": forged,
        "vllm_xargs": {"kv_transfer_params": forged, "other": 1},
        **stream,
    }
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        router = Router(client, ["http://prefill"], ["http://decode"], 1.0, Metrics())
        for each in (job, {"prompt": "a", "vllm_xargs": "no object"}):
            assert [json.loads(piece) async for piece in router.answer(each)]
    assert [body["vllm_xargs"] for body in bodies] == [{"other": 1}] * 2 + ["no object"] * 2
    asked, decoded = bodies[:2]
    assert asked["kv_transfer_params"].keys() == {"do_remote_decode", "lease"}
    assert decoded["kv_transfer_params"] is None
    assert (asked["stream"], decoded.get("stream")) == (False, stream.get("stream"))


def test_requests_come_in_on_one_route_alone() -> None:
    """Add a route only if it also drops what clients say about blocks."""
    app = app_of(Namespace(retry_seconds=1.0, read_seconds=1.0, prefill=["p"], decode=["d"], spans=None))
    routes = {route.path for route in app.routes if isinstance(route, APIRoute) and route.methods != {"GET"}}
    assert routes == {"/v1/completions"}


async def test_prefill_is_asked_for_one_token_of_one_answer() -> None:
    """Ask for all that the client wants, and vLLM keeps the blocks once for each answer, or refuses the request."""
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": [], "kv_transfer_params": None})

    counts = {
        "n": 4,
        "best_of": 4,
        "use_beam_search": True,
        "min_tokens": 5,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "echo": True,
    }
    job = {"prompt": "a", "max_tokens": 9, "seed": 3, "temperature": 0.5, **counts}
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        router = Router(client, ["http://prefill"], ["http://decode"], 1.0, Metrics())
        assert [json.loads(piece) async for piece in router.answer(job)]
    asked, decoded = ({name: value for name, value in body.items() if name != "kv_transfer_params"} for body in bodies)
    assert asked == {"prompt": "a", "max_tokens": 1, "seed": 3, "temperature": 0.5, "stream": False}
    assert decoded == job


# ---- prefill ----

SETTINGS = KvSettings(
    cluster_id=1,
    listen=None,
    device_id=0,
    blocks=64,
    longest_line=8,
    wait_seconds=10,
    drain_seconds=10,
    trust=None,
)


@pytest.mark.parametrize("pieces", [0, 1], ids=["computing", "sending"])
async def test_a_router_that_goes_before_it_has_prefills_answer_leaves_no_block(pieces: int) -> None:
    lease = new_lease_name()
    job = PrefillJob.model_validate({"prompt": "a" * 900, "kv_transfer_params": {"lease": lease}})
    metrics = Metrics()
    async with open_kv(LLMRole.PROMPT, SETTINGS, metrics) as kv:
        assert await outcome(Prefill(kv, metrics, 30.0).answer(job), Client(goes_after=pieces)) == "disconnected"
        assert (kv.blocks.pool.free, kv.blocks.pool.waiting) == (64, 0)
        assert (b'leases_ended_total{how="withdrawn"} 1.0' in metrics.text()) is (pieces == 1)


async def test_its_memory_is_not_adopted() -> None:
    before = soft_counters()["adopted"]
    async with open_kv(LLMRole.PROMPT, SETTINGS, Metrics()):
        assert soft_counters()["adopted"] == before


# ---- answers ----


class Client:
    """A client that goes after a number of pieces, or never."""

    def __init__(self, goes_after: int = -1) -> None:
        self._goes_after = goes_after
        self._is_gone = anyio.Event()
        self.status = 0
        self.pieces: list[bytes] = []

    async def receive(self) -> dict[str, Any]:
        if len(self.pieces) != self._goes_after:
            await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.pieces.append(message["body"])
        if len(self.pieces) == self._goes_after:
            self._is_gone.set()
            await anyio.sleep_forever()  # as where the network is slower than the model


async def outcome(pieces: Pieces, client: Client) -> str:
    counted: list[str] = []
    with anyio.fail_after(10):
        await Answer(pieces, "text/plain", counted.append)({"type": "http", "headers": []}, client.receive, client.send)
    (found,) = counted
    return found


async def numbers(ended: list[str], refused: bool = False) -> AsyncGenerator[bytes]:
    try:
        if refused:
            raise Refused(503, "there is no room", 1)
        for number in range(3):
            yield b"%d" % number
    finally:
        await anyio.lowlevel.cancel_shielded_checkpoint()
        ended.append("ended")


async def test_an_answer() -> None:
    client, ended = Client(), list[str]()
    assert await outcome(numbers(ended), client) == "answered"
    assert (client.status, client.pieces, ended) == (200, [b"0", b"1", b"2", b""], ["ended"])


async def test_a_client_that_goes_ends_its_request_before_the_answer_returns() -> None:
    client, ended = Client(goes_after=2), list[str]()
    assert await outcome(numbers(ended), client) == "disconnected"
    assert (client.pieces, ended) == ([b"0", b"1"], ["ended"])


async def test_a_client_that_goes_before_the_first_piece() -> None:
    async def waiting() -> AsyncGenerator[bytes]:
        await anyio.sleep_forever()
        yield b""

    client = Client(goes_after=0)
    assert await outcome(waiting(), client) == "disconnected"
    assert (client.status, client.pieces) == (0, [])


async def test_a_request_that_is_refused() -> None:
    client, ended = Client(), list[str]()
    assert await outcome(numbers(ended, refused=True), client) == "refused"
    assert (client.status, ended) == (503, ["ended"])
    assert b"there is no room" in client.pieces[0]


# ---- vLLM in the place of the model ----


def started(monkeypatch: pytest.MonkeyPatch, main: Any, *options: str) -> tuple[list[str], dict[str, Any]]:
    """Start a service and return its command, and the settings for the connector."""
    commands: list[list[str]] = []

    def execv(path: str, command: list[str]) -> None:
        assert path == command[0] == sys.executable
        commands.append(command)
        raise SystemExit

    monkeypatch.setattr("os.execv", execv)
    monkeypatch.setattr("sys.argv", ["service", *options])
    with pytest.raises(SystemExit):
        main()
    (command,) = commands
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "AioDataDistConnector"
    return command, transfer["kv_connector_extra_config"]


def test_a_prefill_service_becomes_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    options: tuple[str, ...]
    options = "--vllm", "MODEL", "--kv-listen", "10.0.0.7:26001", "--trust", "/keys", "--dtype", "float32"
    options = *options[:4], "--kv-peers", "10.0.0.0/24", "decode-*.svc", *options[4:]
    command, settings = started(monkeypatch, prefill.main, *options)
    assert command[3:9] == ["--model", "MODEL", "--host", "127.0.0.1", "--port", "8001"]
    assert command[-2:] == ["--dtype", "float32"]
    assert settings == {
        "cluster_id": 1, "device_id": 0, "host": "10.0.0.7", "port": 26001, "trust": "/keys", "lease_seconds": 30.0,
        "peers": ["10.0.0.0/24", "decode-*.svc"],
    }  # fmt: skip
    Settings(**settings)


def test_a_decode_service_becomes_vllm_and_needs_no_prefill_service(monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings = started(monkeypatch, decode.main, "--vllm", "MODEL")
    assert settings == {"cluster_id": 2, "device_id": 1}
    Settings(**settings)


@pytest.mark.parametrize(
    ("options", "says"),
    [((), "--prefill is needed without --vllm"), (("--prefill", "1@127.0.0.1:9", "--dtype"), "unrecognized")],
    ids=["prefill", "unknown"],
)
def test_without_vllm_a_decode_service_is_told_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr("sys.argv", ["decode", *options])
    with pytest.raises(SystemExit):
        decode.main()
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["foo", "127.0.0.1:8001", "http://", "http://h:x", "http://h:99999", "ftp://h:1", "http://h:1/v1"]
)
def test_the_router_says_what_a_service_looks_like(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"is no URL of a service: must be like http://127\.0\.0\.1:8001"):
        service_url(text)


def test_the_router_takes_the_url_of_a_service() -> None:
    assert [service_url(text) for text in ("http://h:1", "https://[::1]:8001/")] == ["http://h:1", "https://[::1]:8001"]


@pytest.mark.parametrize("text", ["foo", "1@h:", "x@h:1", "1@h:x", "@h:1", "1@:1"])
def test_decode_says_what_a_prefill_looks_like(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"is not ID@IP:PORT: must be like 1@127\.0\.0\.1:26001"):
        decode.peer(text)
