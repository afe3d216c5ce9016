"""``aiodatadist demo``: one model, two processes, and the KV cache that travels between them.

This is the parent. It reads the prompt, starts a prefill and a decode process, passes their messages on as a router
would, and shows what they report. The decode process proves that the result is right: see ``decode.py``.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from aiodatadist._cli.demo import timeline
from aiodatadist._cli.demo.figures import figures_of, layered_table, table, v1_table, warm_of
from aiodatadist._cli.demo.messages import (
    REPORT,
    Failed,
    FarJob,
    Finished,
    Job,
    Met,
    Prefilled,
    Progress,
    Receiving,
    TransportChoice,
)
from aiodatadist._cli.demo.prompt import Prompt, load_prompt, shown
from aiodatadist._cli.kit.children import Child, Command, environment, module_command, open_child
from aiodatadist._cli.kit.errors import CommandError, wrong_input
from aiodatadist._cli.kit.place import Place
from aiodatadist._cli.kit.screen import Screen, open_screen
from aiodatadist._cli.kit.text import cut, wrapped

_BLAME = 0.3
"""Seconds for which one child's error waits for the death of the other child, which would explain it."""


class WorkerError(CommandError):
    """A worker ended before its work was done.

    Attributes:
        is_root_cause: True if the death of this worker explains the other's error.
    """

    def __init__(self, message: str, *, exit_code: int = 1, is_root_cause: bool = False) -> None:
        super().__init__(message, exit_code=exit_code)
        self.is_root_cause = is_root_cause

    @classmethod
    def reported(cls, child: Child, failed: Failed) -> WorkerError:
        """Return the worker's own last words as one line. Wrong input needs no other explanation."""
        message = " ".join(failed.message.split())
        if failed.exit_code == 2:
            return cls(message, exit_code=2, is_root_cause=True)
        return cls(f"{child} failed: {message}", exit_code=failed.exit_code)

    @classmethod
    async def of(cls, child: Child) -> WorkerError:
        """Wait for the end of a worker that should have continued, and return how it ended."""
        code, last_words = await child.ended()
        if code < 0:
            name = signal.Signals(-code).name
            return cls(f"{child} was killed by {name}; the demo ends", is_root_cause=True)
        words = "".join(f"\n  {line}" for line in last_words.splitlines())
        return cls(f"{child} ended unexpectedly with exit code {code}{words}")


End: TypeAlias = Finished | WorkerError | BrokenPipeError


@dataclass(frozen=True)
class DemoOptions:
    """The options of the demo, as values."""

    prompt: Path | None
    tokens: int
    port: int
    seed: int
    json: bool
    layered: bool = False
    v1: bool = False
    plot: Path | None = None
    trace: Path | None = None
    prefill_at: Place = field(default_factory=Place)
    decode_at: Place = field(default_factory=partial(Place, device=1))
    transport: TransportChoice = "auto"
    listen: str | None = None
    peer: tuple[str, int] | None = None
    key_file: Path | None = None

    @property
    def is_far(self) -> bool:
        """True if only one half of the demo is on this machine."""
        return self.listen is not None or self.peer is not None


def worker_command(name: str) -> Sequence[str]:
    """Return the command line of a real worker."""
    return module_command("demo", "--worker", name)


def run_demo(options: DemoOptions, command: Command = worker_command) -> int:
    """Run the demo, show it on stdout, and return the exit code.

    Raises:
        CommandError: if the input is wrong, the port is in use, a child died, or Ctrl-C came.
    """
    if find_spec("numpy") is None:
        raise wrong_input("the demo's model needs numpy: pip install numpy")
    if (options.plot or options.trace) and not options.layered:
        raise wrong_input("--plot and --trace draw the layers' timeline: they need --layered")
    if options.v1 and options.layered:
        raise wrong_input("--v1 and --layered are two demos: choose one")
    if options.plot:
        timeline.check_plot()
    prompt = None if options.peer is not None else load_prompt(options.prompt)
    job = None if prompt is None else _job(options, prompt)
    with open_screen(sys.stdout, silent=options.json) as screen:
        if prompt is not None:
            for line in wrapped(f"prompt: {prompt.describe()}", 8):
                screen.line(line)
        try:
            finished = anyio.run(_conduct, options, job, screen, command)
        except KeyboardInterrupt:
            raise CommandError(screen.interrupted(), exit_code=130) from None
    _show(job, finished, screen)
    if options.trace:
        timeline.write_trace(finished.layers, options.trace)
    if options.plot:
        timeline.write_plot(finished.layers, options.plot)
    if options.json:
        print(json.dumps(_summary(prompt, job, finished), indent=2))
    return 0 if finished.kv_equal and finished.text == finished.reference else 1


def _job(options: DemoOptions, prompt: Prompt) -> Job:
    return Job(
        prompt=prompt.text.decode("latin-1"),
        tokens=options.tokens,
        seed=options.seed,
        port=options.port,
        layered=options.layered,
        v1=options.v1,
        transport=options.transport,
        prefill_at=options.prefill_at,
        decode_at=options.decode_at,
    )


async def _conduct(options: DemoOptions, job: Job | None, screen: Screen, command: Command) -> Finished:
    if not options.is_far:
        assert job is not None
        return await conduct(job, screen, command)
    far = FarJob(
        listen=options.listen or "",
        peer=options.peer,
        key_file=str(options.key_file or ""),
        transport=options.transport,
        place=options.prefill_at,
        job=job,
    )
    return await conduct_far(far, screen, command)


async def conduct_far(far: FarJob, screen: Screen, command: Command) -> Finished:
    """Run the half of the demo that is on this machine; it has ended when this returns or raises.

    Raises:
        WorkerError: if it died or gave up.
        BrokenPipeError: if the screen is no longer read.
    """
    name = "decode" if far.job is None else "prefill"
    async with open_child(name, command(f"{name}-far"), env=environment()) as child:
        end: Finished | WorkerError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child.keep_last_words)
            await child.order(far)
            end = await _far_end(child, screen)
            tasks.cancel_scope.cancel()
        if isinstance(end, WorkerError):
            raise end
        assert end is not None
        return end


async def _far_end(child: Child, screen: Screen) -> Finished | WorkerError:
    """Show a worker's reports until it has finished, failed or died."""
    async for report in child.reports(REPORT):
        match report:
            case Progress():
                screen.show(report.phase, report.done, report.total)
            case Met():
                for line in wrapped(report.words, 2):
                    screen.line(line)
            case Finished():
                return report
            case Failed():
                return WorkerError.reported(child, report)
    return await WorkerError.of(child)


async def conduct(job: Job, screen: Screen, command: Command) -> Finished:
    """Run both workers to the end of the job; both have ended when this returns or raises.

    Raises:
        WorkerError: if a worker died or gave up; of two, the one that explains the other.
        BrokenPipeError: if the screen is no longer read.
    """
    kind = "-v1" if job.v1 else ""
    async with (
        open_child("prefill", command(f"prefill{kind}"), env=environment()) as prefill,
        open_child("decode", command(f"decode{kind}"), env=environment()) as decode,
    ):
        screen.line(f"processes: prefill {prefill.pid}, decode {decode.pid}")
        end = await _end_of(job, screen, prefill, decode)
        if isinstance(end, Exception):
            raise end
        return end


async def _end_of(job: Job, screen: Screen, prefill: Child, decode: Child) -> End:
    """Send both workers the job, pass their messages on, and wait for the outcome."""
    send, ends = anyio.create_memory_object_stream[End](2)
    async with send, ends, anyio.create_task_group() as tasks:
        for child in (prefill, decode):
            tasks.start_soon(child.keep_last_words)
            tasks.start_soon(_follow, child, prefill, decode, screen, send)
            await child.order(job)
        end = await ends.receive()
        with anyio.move_on_after(_BLAME):
            while isinstance(end, WorkerError) and not end.is_root_cause:
                other = await ends.receive()
                if isinstance(other, WorkerError) and other.is_root_cause:
                    end = other
        tasks.cancel_scope.cancel()
    return end


async def _follow(
    child: Child, prefill: Child, decode: Child, screen: Screen, ends: MemoryObjectSendStream[End]
) -> None:
    """Read one child's reports until it has finished, failed or died, or the demo is over."""
    async for report in child.reports(REPORT):
        match report:
            case Progress():
                try:
                    screen.show(report.phase, report.done, report.total)
                except BrokenPipeError as error:
                    await ends.send(error)
                    return
            case Prefilled():
                await decode.order(report)
            case Receiving():
                await prefill.order(report)
            case Finished():
                await ends.send(report)
                return
            case Failed():
                await ends.send(WorkerError.reported(child, report))
                return
    await ends.send(await WorkerError.of(child))


def _show(job: Job | None, finished: Finished, screen: Screen) -> None:
    """Show the text, the table and the verdict. Without a job, the prompt is not known here."""
    screen.line("the text continues (untrained weights: it is gibberish, but always the same):")
    read = () if job is None else cut(shown(job.prompt[-40:]), "  ...")
    for line in (*read, *cut(shown(finished.text), "  >>>")):
        screen.line(line)
    if finished.layers:
        screen.line("layers: # computed by prefill, > on the way into decode's cache;")
        screen.line("  when each was ready, and how much later it was in decode")
        for line in timeline.lines(finished.layers):
            screen.line(f"  {line}")
    rows: list[tuple[str, str]] = []
    if finished.warm:
        rows = table(figures_of(finished.pulls), warm_of(finished.warm), finished.runtime)
    if finished.layers:
        rows = layered_table(finished.pulls[0], len(finished.layers), finished.runtime)
    if job is not None and job.v1:
        rows = v1_table(finished.pulls[0], finished.runtime)
    for line in (line for left, right in rows for line in wrapped(f"{left:<16}{right}", 16)):
        screen.line(line)
    screen.line(f"KV bytes equal: {_yes(finished.kv_equal)}")
    screen.line(f"tokens equal: {_yes(finished.text == finished.reference)}")


def _summary(prompt: Prompt | None, job: Job | None, finished: Finished) -> dict[str, object]:
    """Return the same as JSON-safe values."""
    read = {} if prompt is None else {"prompt": prompt.name, "prompt_bytes": len(prompt.text)}
    seed = {} if job is None else {"seed": job.seed}
    return {
        **read,
        **seed,
        "text": finished.text,
        "tokens_equal": finished.text == finished.reference,
        "kv_equal": finished.kv_equal,
        "runtime": finished.runtime,
        "layers": [layer.model_dump() for layer in finished.layers],
        **asdict(figures_of(finished.pulls)),
        **(asdict(warm_of(finished.warm)) if finished.warm else {}),
    }


def _yes(truth: bool) -> str:
    return "yes" if truth else "NO"
