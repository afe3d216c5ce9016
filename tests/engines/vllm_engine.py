"""A vLLM engine in a process of its own: ``vllm_engine.py MODEL CONFIG``. Commands and answers are lines of JSON.

``add`` a request, ``abort`` one, ask for its ``state``, ``forget`` its prefix cache, have softnpu do ``fault``, hear when
something has ``arrived`` at a hold of softnpu's, and ``release`` that. A finished request is answered by its id, tokens,
reason and what its connector says to the next engine. It steps as a server's loop does, also when nothing runs.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 4096,
    "max_num_seqs": 16, "seed": 0,
}  # fmt: skip


class Program:
    """The engine, and what it was told."""

    def __init__(self, model: str, config: dict[str, Any], out: TextIO) -> None:
        self._vllm = import_module("vllm")
        transfer = config.pop("transfer", None)
        options = {**OPTIONS, "model": model, **config}
        if transfer is not None:
            options["kv_transfer_config"] = import_module("vllm.config").KVTransferConfig(**transfer)
        self._engine = self._vllm.LLMEngine.from_engine_args(self._vllm.EngineArgs(**options))
        self._core = self._engine.engine_core.engine_core
        self._out = out
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._counted: Counter[str] = Counter()
        self._preemptions = 0
        self._saying = threading.Lock()
        self._count_preemptions()
        self._watch_stats()

    def _count_preemptions(self) -> None:
        scheduler = self._core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted

    def _watch_stats(self) -> None:
        """Collect what the connector gives each step, as vLLM's own loggers do."""
        scheduler = self._core.scheduler
        update = scheduler.update_from_output

        def watched(scheduled: Any, output: Any) -> Any:
            told = output.kv_connector_output
            if told is not None:
                self._count(told.kv_connector_stats)
            return update(scheduled, output)

        scheduler.update_from_output = watched
        if scheduler.connector is None:
            return
        take = scheduler.connector.get_kv_connector_stats

        def taken() -> Any:
            stats = take()
            self._count(stats)
            return stats

        scheduler.connector.get_kv_connector_stats = taken

    def _count(self, stats: Any) -> None:
        """Add the figures of a connector, or those of each connector of a MultiConnector."""
        if stats is None:
            return
        each = [stats] if "counters" in stats.data else stats.data.values()
        for own in each:
            self._counted.update(own.data["counters"])

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        self._say({"ready": True})
        while True:
            try:
                command = self._commands.get(timeout=0.001 if self._core.scheduler.has_requests() else None)
            except queue.Empty:
                command = {"op": "step"}
            if command is None:
                break
            self._do(command)
            for output in self._engine.step():
                if output.finished:
                    self._finished(output)
        self._core.shutdown()

    def _read(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        self._commands.put(None)

    def _say(self, answer: dict[str, Any]) -> None:
        with self._saying:
            print(json.dumps(answer), file=self._out)

    def _do(self, command: dict[str, Any]) -> None:
        match command["op"]:
            case "add":
                params, samples = command["params"], command.get("n", 1)
                greedy: dict[str, Any] = {"temperature": 0}
                if samples > 1:
                    together = import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
                    greedy = {"temperature": 1, "top_k": 1, "n": samples, "output_kind": together}
                sampling = self._vllm.SamplingParams(
                    max_tokens=command["max_tokens"],
                    **greedy,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={"kv_transfer_params": params} if params is not None else None,
                )
                prompt = {"prompt_token_ids": command["prompt"]}
                if command.get("salt"):
                    prompt["cache_salt"] = command["salt"]
                self._engine.add_request(command["id"], prompt, sampling)
            case "abort":
                self._engine.abort_request([command["id"]])
            case "fault":
                import_module("aiodatadist.testing").soft_fault(command["what"])
            case "arrived":
                threading.Thread(target=self._wait_at, args=(command["what"],), daemon=True).start()
            case "release":
                import_module("aiodatadist.testing").SoftHold(command["what"]).release()
            case "forget":
                assert self._core.scheduler.reset_prefix_cache()
            case "state":
                self._say(self._state())

    def _wait_at(self, hold: str) -> None:
        import_module("anyio").run(import_module("aiodatadist.testing").SoftHold(hold).arrived)
        self._say({"arrived": hold})

    def _state(self) -> dict[str, Any]:
        scheduler = self._core.scheduler
        return {
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "requests": len(scheduler.requests),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
            "counted": dict(self._counted),
            "preemptions": self._preemptions,
        }

    def _finished(self, output: Any) -> None:
        done = output.outputs[0]
        self._say(
            {
                "id": output.request_id,
                "tokens": list(done.token_ids),
                "samples": [list(each.token_ids) for each in output.outputs],
                "params": output.kv_transfer_params,
                "reason": done.finish_reason,
            }
        )


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    Program(sys.argv[1], json.loads(sys.argv[2]), out).run()


if __name__ == "__main__":
    main()
