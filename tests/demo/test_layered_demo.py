"""The demo with layers that travel while the next one is computed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from aiodatadist._cli.demo.messages import LayerTimes
from aiodatadist._cli.demo.timeline import lines, trace, write_trace
from aiodatadist._cli.kit.errors import CommandError

from .process import PATIENCE, Demo
from .test_real_demo import Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_demo(length: int, *arguments: str) -> Demo:
            prompt = tmp_path / "prompt.txt"
            prompt.write_text(("It was the best of times, it was the worst of times. " * 20)[:length])
            demo = Demo.real("--prompt", str(prompt), "--layered", *arguments)
            stack.callback(demo.close)
            return demo

        yield start_demo


def test_layers_arrive_while_others_are_computed_and_tokens_are_equal(start: Start, tmp_path: Path) -> None:
    demo = start(1000, "--tokens", "8", "--json", "--trace", str(tmp_path / "trace.json"))
    out, errors = demo.process.communicate(timeout=PATIENCE)
    assert (demo.process.returncode, errors) == (0, "")
    result = json.loads(out)
    assert result["tokens_equal"]
    assert result["kv_equal"]
    layers = [LayerTimes(**layer) for layer in result["layers"]]
    assert len(layers) == 8
    assert all(layer.began < layer.ready < layer.landed for layer in layers)
    assert layers[0].landed < layers[-1].ready, "the first layer was there before the last was computed"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 16


def test_the_timeline_is_drawn(start: Start) -> None:
    out, _ = start(100, "--tokens", "4").process.communicate(timeout=PATIENCE)
    drawn = [line for line in out.splitlines() if line.strip().startswith("layer ")]
    assert len(drawn) == 8
    assert all("#" in line and ">" in line for line in drawn)
    assert out.splitlines()[-2:] == ["KV bytes equal: yes", "tokens equal: yes"]
    assert [line for line in out.splitlines() if len(line) > 80 and "/" not in line] == []


@pytest.mark.nightly  # the parent is the one that test_real_demo.py shows
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_death_of_one_worker_between_two_layers_ends_everything_with_one_line(start: Start, victim: str) -> None:
    demo = start(100, "--tokens", "200")
    demo.wait_until_started()
    demo.read_until("pull: 50%")
    os.kill(demo.pids[victim], signal.SIGKILL)
    demo.wait_until_all_ended()
    assert demo.process.returncode == 1
    assert (
        demo.errors()
        == f"aiodatadist: the {victim} process (pid {demo.pids[victim]}) was killed by SIGKILL; the demo ends\n"
    )


def test_a_timeline_needs_layers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        demo = Demo.real("--trace", str(tmp_path / "nothing.json"))
        stack.callback(demo.close)
        check_refused(demo)


def check_refused(demo: Demo) -> None:
    demo.wait_until_all_ended()
    assert demo.process.returncode == 2
    assert "need --layered" in demo.errors()


LAYERS = [LayerTimes(layer=i, began=100 + i, ready=101 + i, landed=101.5 + i) for i in range(4)]


def test_lines_and_trace_are_to_scale(tmp_path: Path) -> None:
    bars = [line.split("|")[1] for line in lines(LAYERS, 45)[:4]]
    assert [bar.index("#") for bar in bars] == [0, 10, 20, 30]
    assert [bar.count("#") for bar in bars] == [10] * 4
    assert [bar.count(">") for bar in bars] == [5] * 4
    spans = [event for event in trace(LAYERS)["traceEvents"] if event["ph"] == "X"]
    assert [(event["ts"], event["dur"]) for event in spans if event["tid"] == 2] == [
        (1e6 * (i + 1), 5e5) for i in range(4)
    ]
    with pytest.raises(CommandError, match="cannot be written"):
        write_trace(LAYERS, tmp_path / "missing" / "trace.json")
