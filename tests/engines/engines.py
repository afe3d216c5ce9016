"""vLLM engines in processes of their own, and a router between them."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("vllm_engine.py")
BLOCK = 128
"""Tokens of a block: vLLM's on a CPU."""
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
ANSWER_SECONDS = 120.0
START_SECONDS = 600.0
"""Time for engines to start that import vLLM side by side on a busy machine."""

Answer = dict[str, Any]


def write_model(folder: Path) -> Path:
    """Write a model with random weights, which any number of workers can share."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    torch, safetensors = import_module("torch"), import_module("safetensors.torch")
    generator = torch.Generator().manual_seed(0)
    hidden, inner, heads = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["head_dim"]
    inputs, keys = MODEL["num_attention_heads"] * heads, MODEL["num_key_value_heads"] * heads
    shapes = {"lm_head": (MODEL["vocab_size"], hidden), "model.embed_tokens": (MODEL["vocab_size"], hidden)}
    ones = ["model.norm"]
    for layer in (f"model.layers.{i}" for i in range(MODEL["num_hidden_layers"])):
        shapes |= {f"{layer}.self_attn.{name}_proj": (keys, hidden) for name in "kv"}
        shapes |= {f"{layer}.self_attn.q_proj": (inputs, hidden), f"{layer}.self_attn.o_proj": (hidden, inputs)}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (hidden, inner)}
        ones += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()
    }
    weights |= {f"{name}.weight": torch.ones(hidden) for name in ones}
    safetensors.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def transfer_config(connector: str, settings: Answer) -> Answer:
    """Return what vLLM calls ``--kv-transfer-config``."""
    own = {} if connector == "MultiConnector" else {"kv_connector_module_path": "aiodatadist.adapters.vllm"}
    return {
        "kv_connector": connector,
        **own,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


class Engine:
    """An engine in its own process. Its output is in ``log``.

    Args:
        inside: a command that starts another one, on another machine say.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: Answer | None,
        connector: str = "AioDataDistConnector",
        inside: Sequence[str] = (),
        **options: Any,
    ) -> None:
        config: Answer = dict(options)
        if transfer is not None:
            config["transfer"] = transfer_config(connector, transfer)
        self.log = log
        self._aside: deque[Answer] = deque()
        self._said: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*inside, sys.executable, PROGRAM, model, json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, "AIODATADIST_RUNTIME": "soft"},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def say(self, **command: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def hear(self, seconds: float = ANSWER_SECONDS) -> Answer:
        """Return the next answer. Raises AssertionError with its last words if it ended, queue.Empty if none comes."""
        return self._aside.popleft() if self._aside else self._hear(seconds)

    def _hear(self, seconds: float = ANSWER_SECONDS) -> Answer:
        answer = self._said.get(timeout=seconds)
        assert answer is not None, self.log.read_text()[-4000:]
        return answer

    def poll(self) -> Answer | None:
        """Return the next answer if there is one already, else None."""
        try:
            return self.hear(0.001)
        except queue.Empty:
            return None

    def generate(self, request: str, prompt: list[int], tokens: int, params: Answer | None = None) -> Answer:
        self.say(op="add", id=request, prompt=prompt, max_tokens=tokens, params=params)
        return self.hear()

    def prefill(self, request: str, prompt: list[int]) -> Answer:
        """Prefill a prompt and return the parameters for the next engine."""
        params: Answer = self.generate(request, prompt, 1, {"do_remote_decode": True})["params"]
        return params

    def finish(self, request: str, prompt: list[int], params: Answer) -> None:
        """Compute a prompt that another engine has asked for, or will."""
        self.say(op="add", id=request, prompt=prompt, max_tokens=1, params={"do_remote_decode": True, **params})

    def state(self) -> Answer:
        """Return free blocks, requests, descriptors, threads, and the connector's counters."""
        self.say(op="state")
        return self._hear_of("requests")

    def wait_arrived(self, hold: str) -> None:
        """Wait until something stands at a hold of its softnpu's."""
        self.say(op="arrived", what=hold)
        self._hear_of("arrived")

    def _hear_of(self, what: str) -> Answer:
        while what not in (answer := self._hear()):
            self._aside.append(answer)  # a request ended meanwhile
        return answer

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Close the engine. Raises AssertionError if it did not end well and was not killed."""
        with self._process, suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                code = self._process.wait(60)
            finally:
                self._process.kill()
                self._reader.join()
        assert code in {0, -signal.SIGKILL}, self.log.read_text()[-4000:]


@contextmanager
def opened(*engines: Engine) -> Iterator[None]:
    """Start engines side by side and close them at the end of the block."""
    with ExitStack() as stack:
        for each in engines:
            stack.callback(each.close)
        for each in engines:
            assert each.hear(START_SECONDS) == {"ready": True}
        yield


def eventually(look: Callable[[], Any], wanted: Any, seconds: float = 20.0) -> None:
    """Wait until ``look`` returns ``wanted``. An engine does not report the end of work that no request waits for."""
    until = time.monotonic() + seconds
    while (found := look()) != wanted and time.monotonic() < until:
        time.sleep(0.05)
    assert found == wanted


def prompts(count: int, seed: int, most: int = 20 * BLOCK) -> list[list[int]]:
    """Return ``count`` random prompts, each of fewer than ``most`` tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(rng.randrange(1, most))] for _ in range(count)]


def free_port() -> int:
    """Return a port that no process listens on just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclass
class PushRouter:
    """Requests go to both engines at once, and the prefill engine pushes them.

    Attributes:
        address: where the prefill engine listens.
    """

    prefill: Engine
    decode: Engine
    address: Answer
    window: int = 8
    answers: dict[str, Answer] = field(default_factory=dict)

    def start(self, request: str, prompt: list[int], tokens: int) -> None:
        params = {"do_remote_prefill": True, "transfer_id": request, "prefill": self.address}
        self.decode.say(op="add", id=request, prompt=prompt, max_tokens=tokens, params=params)
        self.prefill.finish(request, prompt, {"transfer_id": request})

    def serve(self, name: str, wanted: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Serve the prompts and return the tokens of each."""
        waiting = {f"{name}{i}": prompt for i, prompt in enumerate(wanted)}
        order, under_way, prefilled = list(waiting), 0, 0
        until = time.monotonic() + ANSWER_SECONDS
        while len(self.answers) < len(waiting) or prefilled < len(waiting):
            assert time.monotonic() < until, f"{len(self.answers)} of {len(waiting)} requests ended"
            while order and under_way < self.window:
                request = order.pop(0)
                under_way += 1
                self.start(request, waiting[request], tokens)
            prefilled += self.prefill.poll() is not None
            if (done := self.decode.poll()) is not None:
                self.answers[done["id"]] = done
                under_way -= 1
        return [self.answers[request]["tokens"] for request in waiting]


@dataclass
class Router:
    """Requests go to the prefill engine, and with what it says to the decode engine, ``window`` at a time."""

    prefill: Engine
    decode: Engine
    window: int = 8
    answers: dict[str, Answer] = field(default_factory=dict)
    on_decode: Callable[[str], object] = lambda _: None

    def serve(self, name: str, wanted: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Serve the prompts and return the tokens of each."""
        waiting = {f"{name}{i}": prompt for i, prompt in enumerate(wanted)}
        order, under_way = list(waiting), 0
        until = time.monotonic() + ANSWER_SECONDS
        while len(self.answers) < len(waiting):
            assert time.monotonic() < until, f"{len(self.answers)} of {len(waiting)} requests ended"
            while order and under_way < self.window:
                request = order.pop(0)
                under_way += 1
                self.prefill.say(
                    op="add", id=request, prompt=waiting[request], max_tokens=1, params={"do_remote_decode": True}
                )
            if (first := self.prefill.poll()) is not None:
                request = first["id"]
                self.decode.say(
                    op="add", id=request, prompt=waiting[request], max_tokens=tokens, params=first["params"]
                )
                self.on_decode(request)
            if (done := self.decode.poll()) is not None:
                self.answers[done["id"]] = done
                under_way -= 1
        return [self.answers[request]["tokens"] for request in waiting]
