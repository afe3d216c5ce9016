"""Programs that are forked with everything imported are to themselves, and to this process, as programs that were started."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import children
from tests.children import ROOT

STARTERS = pytest.mark.parametrize("start", [subprocess.run, children.run], ids=["started", "forked"])
Start = Callable[..., "subprocess.CompletedProcess[str]"]

LOOKS = """
import asyncio, json, logging, os, resource, signal, sys, threading
import aiodatadist
print(json.dumps({
    "argv": sys.argv,
    "name": __name__,
    "path": sys.path,
    "flags": repr(sys.flags),
    "cwd": os.getcwd(),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "group": os.getpgid(0) - (os.getpid() if os.getpgid(0) == os.getpid() else 0),
    "session": os.getsid(0) - (os.getpid() if os.getsid(0) == os.getpid() else 0),
    "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
    "signals": {each.name: repr(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "descriptors": sorted(int(entry) for entry in os.listdir("/proc/self/fd")),
    "handlers": [repr(logger.handlers) for logger in (logging.getLogger(), logging.getLogger("aiodatadist"))],
    "hooks": repr([sys.excepthook, sys.unraisablehook]),
    "threads": threading.active_count(),
    "loop": repr(asyncio._get_running_loop()),
    "softnpu": "softnpu" in open("/proc/self/maps").read(),
    "uvloop": "uvloop" in sys.modules,
    "input": sys.stdin.read(),
    "streams": [(each.encoding, each.errors, each.line_buffering) for each in (sys.stdin, sys.stdout, sys.stderr)],
}))
"""


def looks(start: Start, *arguments: str, **options: Any) -> dict[str, Any]:
    command = [sys.executable, *arguments, "one", "two words"]
    done = start(command, input="given", capture_output=True, text=True, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("text", {}),
        ("module", {"start_new_session": True}),
        ("script", {"process_group": 0}),
    ],
    ids=str,
)
def test_a_forked_program_finds_what_a_started_one_finds(how: str, options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text(LOOKS)
    command = {"text": ["-c", LOOKS], "module": ["-m", "looks"], "script": [str(tmp_path / "looks.py")]}[how]
    options |= {"cwd": tmp_path, "env": {**os.environ, "GIVEN": "to it"}}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    try:
        started, forked = (looks(start, *command, **options) for start in (subprocess.run, children.run))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert forked == started
    assert forked["parent"] == os.getpid()
    assert not forked["softnpu"]
    assert not forked["uvloop"]


def test_nothing_is_started_anew_for_it() -> None:
    loaded = "import sys; print('aiodatadist._link.link' in sys.modules)"
    assert children.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "True\n"
    for options in (["-X", "dev"], ["-S"], ["-I"]):
        done = children.run([sys.executable, *options, "-c", loaded], capture_output=True, text=True)
        assert done.stdout == "False\n", "an interpreter with other options must be started"
    for variable in ("PYTHONHASHSEED", "LD_PRELOAD"):
        environment = {**os.environ, variable: "0" if variable.startswith("PYTHON") else ""}
        done = children.run([sys.executable, "-c", loaded], capture_output=True, text=True, env=environment)
        assert done.stdout == "False\n", "so has one that reads something else when it starts"


ENDS = {
    "the end": ("pass", 0),
    "exit": ("import sys; sys.exit(7)", 7),
    "words": ("raise SystemExit('what went wrong')", 1),
    "exception": ("1 / 0", 1),
    "interrupt": ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "at exit": ("import atexit; atexit.register(print, 'at exit'); print('before', end=' ')", 0),
    "threads": ("import threading; threading.Timer(0, print, ['a thread']).start()", 0),
    "warning": ("import warnings; warnings.warn('a warning')", 0),
}


@pytest.mark.parametrize("program", ENDS)
def test_it_ends_as_a_started_one_ends(program: str) -> None:
    text, status = ENDS[program]
    command = [sys.executable, "-c", text]
    started, forked = (
        start(command, capture_output=True, text=True, check=False) for start in (subprocess.run, children.run)
    )
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.returncode == status
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


@STARTERS
@pytest.mark.parametrize(
    ("options", "text", "words"),
    [
        (["-W", "error"], "import warnings; warnings.warn('a')", "UserWarning: a"),
        (
            ["-W", "error"],
            "import asyncio\nasync def f(): pass\nf()",
            "RuntimeWarning: coroutine 'f' was never awaited",
        ),
        (["-W", "always::ResourceWarning"], "open('/dev/null')", "ResourceWarning: unclosed file"),
        ([], "open('/dev/null')", ""),
    ],
)
def test_warnings_are_what_its_options_say(start: Start, options: list[str], text: str, words: str) -> None:
    done = start([sys.executable, *options, "-c", text], capture_output=True, text=True, check=False)
    assert words in done.stderr
    assert bool(words) == bool(done.stderr)


def test_it_is_a_child_that_can_be_signalled_and_waited_for() -> None:
    command = [sys.executable, "-c", "print('runs', flush=True); input()"]
    with children.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, 0)


@pytest.mark.parametrize("options", [{"start_new_session": True}, {"process_group": 0}], ids=str)
def test_its_group_can_be_signalled_as_soon_as_it_has_been_started(options: dict[str, Any]) -> None:
    """A signal sent before the group exists reaches no process, and its sender waits for an end that does not come."""
    command = [sys.executable, "-c", "input()"]
    with children.Popen(command, stdin=subprocess.PIPE, forks=True, **options) as process:
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


@STARTERS
def test_it_has_the_descriptors_that_it_is_given_under_their_numbers(start: Start) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        text = f"import socket; socket.socket(fileno={theirs.fileno()}).send(b'from it')"
        assert start([sys.executable, "-c", text], pass_fds=[theirs.fileno()]).returncode == 0
        assert ours.recv(10) == b"from it"


@STARTERS
def test_its_orphans_are_none_of_ours(start: Start) -> None:
    """pytest's process is the one that inherits them for no longer than a fork takes."""
    orphan = "import os, time\nreading, writing = os.pipe()\nif os.fork():\n    os.read(reading, 1)\n    os._exit(0)\n"
    orphan += "parent = os.getppid()\nos.write(writing, b'1')\nwhile os.getppid() == parent:\n    time.sleep(0.01)\n"
    orphan += "print(os.getppid(), flush=True)"
    done = start([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True)
    assert int(done.stdout) != os.getpid()


def test_what_it_draws_by_lot_differs() -> None:
    command = [sys.executable, "-c", "import random, numpy, uuid; print(random.random(), uuid.uuid4())"]
    assert len({children.run(command, capture_output=True, text=True).stdout for _ in range(2)}) == 2


@pytest.mark.usefixtures("no_leaks")
def test_a_failed_check_raises_and_a_time_limit_kills() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        children.run([sys.executable, "-c", "1 / 0"], check=True, stderr=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        children.run([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, timeout=0)


@pytest.mark.usefixtures("no_leaks")
async def test_a_coroutine_talks_to_it_and_waits_for_it() -> None:
    command = [sys.executable, "-c", "print('hears ' + input(), flush=True); input()"]
    process = await children.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"this\n")
    assert await process.stdout.readline() == b"hears this\n"
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    assert process.returncode == -signal.SIGKILL
    assert await process.stdout.read() == b""
    with pytest.raises(ProcessLookupError):
        process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_a_coroutine_reads_all_of_both_its_streams() -> None:
    text = "import sys; sys.stderr.write('e' * 300_000); sys.stdout.write('o' * 300_000); sys.exit(5)"
    process = await children.create_subprocess_exec(
        sys.executable, "-c", text, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert await process.communicate() == (b"o" * 300_000, b"e" * 300_000)
    assert process.returncode == 5


STARTS = """
import asyncio, os, subprocess, sys
command = [sys.executable, "-c", "import os, sys; print('aiodatadist._link.link' in sys.modules, os.getppid(), input())"]
print(subprocess.run(command, capture_output=True, text=True, input="one").stdout, end="")
async def main():
    process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, start_new_session=True)
    print((await process.communicate(b"other"))[0].decode(), end="")
    return process.returncode
print(asyncio.run(main()), os.getpid(), subprocess.run(["echo", "-n"]).returncode)
"""


@pytest.mark.parametrize("forks", [False, True])
def test_what_it_starts_is_forked_as_well_if_it_is_told(forks: bool) -> None:
    done = children.run([sys.executable, "-W", "error", "-c", STARTS], capture_output=True, text=True, forks=forks)
    lines = [line.split() for line in done.stdout.splitlines()]
    pid = lines[-1][1]
    assert lines == [[str(forks), pid, "one"], [str(forks), pid, "other"], ["0", pid, "0"]], done.stderr
    assert done.stderr == ""


def test_nothing_is_left_of_what_forks_for_it() -> None:
    with children.Popen(
        [sys.executable, "-c", "print(); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, forks=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        server = os.pidfd_open(int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()))
        process.kill()
    try:
        assert select.select([server], [], [], 30)[0], "it outlived its program"
    finally:
        os.close(server)


def test_it_starts_in_the_root_unless_told() -> None:
    done = children.run(
        [sys.executable, "-c", "import os; print(os.getcwd())"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == f"{ROOT}\n"


@STARTERS
def test_its_objects_are_destroyed_at_its_end(start: Start) -> None:
    """End like an interpreter: threads are waited for, then what is registered runs, then the program's variables go."""
    text = """
import atexit, threading
class Kept:
    def __del__(self):
        print("destroyed", flush=True)
kept = Kept()
atexit.register(print, "registered")
threading.Timer(0.01, print, ["a thread"]).start()
raise SystemExit({})
"""
    for code, status in (("256 + 3", 3), ("-1", 255), ("None", 0), ("True", 1)):
        done = start([sys.executable, "-c", text.format(code)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (status, "a thread\nregistered\ndestroyed\n", "")


@STARTERS
def test_a_thread_that_is_not_waited_for_ends_silently(start: Start) -> None:
    """The program drops its variables while the interpreter can still run their finalizers."""
    text = """
import threading, time
def used(): pass
def run():
    while True:
        used()
        time.sleep(0.001)
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.1)
kept = Slow()
threading.Thread(target=run, daemon=True).start()
"""
    done = start([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@STARTERS
def test_what_it_cannot_write_is_said(start: Start) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:  # noqa: PTH123 - a number
        done = start(
            [sys.executable, "-c", "import sys; sys.stdout = open(1, 'w'); print('lost')"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 120
    assert "BrokenPipeError" in done.stderr
