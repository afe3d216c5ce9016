"""A stand-in for the demo's workers, run by path: ``fake_worker.py SCENARIO prefill|decode``. Knows the messages.

Scenarios: ``good`` runs to the end; ``different`` has other tokens than the reference; ``idle`` only waits for the end
of its stdin; ``deaf`` does not even look at it, and depends on Linux; ``complain`` lets decode give up when it has
its job; ``crash`` lets decode end with a traceback; ``busy`` lets prefill find its port in use; ``endless`` lets
prefill report for ever.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys

from aiodatadist._cli.kit.pipes import die_with_parent


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def prefill(scenario: str, port: int) -> None:
    if scenario == "busy":
        say(kind="failed", message=f"cannot use port {port}: address in use", exit_code=2)
        return
    for done in itertools.count() if scenario == "endless" else range(9):
        say(kind="progress", phase="prefill", done=done, total=8)
    say(kind="prefilled", port=4711, blocks=[2, 0, 1], digest="d", first_token=65, seconds=0.5)


def decode(scenario: str) -> None:
    if scenario == "complain":
        say(kind="failed", message="the link\nis gone")
        return
    if scenario == "crash":
        raise RuntimeError("a bug of the demo's")
    ready = json.loads(sys.stdin.readline())
    for done in range(1, 65):
        say(kind="progress", phase="reference", done=done, total=64)
    pulls = [
        {"blocks": 2, "ranges": 32, "bytes": 2 << 18, "seconds": 2e-4, "memcpy_seconds": 1e-4},
        {"blocks": 1, "ranges": 16, "bytes": 1 << 18, "seconds": 1e-4, "memcpy_seconds": 1e-4},
    ]
    for done in range(1, 4):
        say(kind="progress", phase="pull", done=done, total=3)
    for done in range(1, 65):
        say(kind="progress", phase="decode", done=done, total=64)
    text = "A\x1b[31m\x80" + "ok" * (scenario == "good")
    say(
        kind="finished",
        text=text,
        reference="A\x1b[31m\x80ok",
        kv_equal=ready["digest"] == "d",
        pulls=pulls,
        warm=pulls,
        runtime="fake",
    )


def main(scenario: str, name: str) -> None:
    job = json.loads(sys.stdin.readline())
    if scenario == "deaf":
        die_with_parent()
        say(kind="progress", phase=name, done=1, total=1)
        while True:
            signal.pause()
    if scenario != "idle":
        decode(scenario) if name == "decode" else prefill(scenario, job["port"])
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
