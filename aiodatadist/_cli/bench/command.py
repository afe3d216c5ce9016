"""The roles: an owner that serves, an initiator that measures, and both."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import anyio
from pydantic import ValidationError

from aiodatadist import LLMDataDist, LLMException
from aiodatadist._cli.bench.compare import comparison
from aiodatadist._cli.bench.ends import Address, open_child_owner, open_initiator, open_owner, say_listening
from aiodatadist._cli.bench.figures import Row
from aiodatadist._cli.bench.initiator import RemoteOwner, measure
from aiodatadist._cli.bench.lateness import idle_late_us
from aiodatadist._cli.bench.machine import Machine, Ran
from aiodatadist._cli.bench.options import BenchOptions, BenchRole
from aiodatadist._cli.bench.plot import check_plot, draw
from aiodatadist._cli.bench.report import BenchReport, lines
from aiodatadist._cli.bench.sizes import size_text
from aiodatadist._cli.bench.workload import Case
from aiodatadist._cli.kit.errors import CommandError, wrong_input
from aiodatadist._cli.kit.options import check_target, is_stdout, write_report
from aiodatadist._cli.kit.pipes import die_with_parent, until_stdin_closes
from aiodatadist._cli.kit.screen import open_screen

INTERRUPTED = "interrupted"
"""The failure in a report if Ctrl-C came before the last row."""


def run_bench(options: BenchOptions) -> int:
    """Run a benchmark, and return the exit code: 0, or 1 if bytes were in the wrong place.

    Raises:
        CommandError: if an option is wrong, the ends did not find each other, a transfer failed, or Ctrl-C came
    after the first rows.
    """
    cases = options.cases()
    old = _old_report(options)
    _check_targets(options)
    try:
        with asyncio.Runner(loop_factory=_loop_factory(options)) as runner:
            if options.role is BenchRole.PREFILL:
                runner.run(_serve(options))
                return 0
            report = runner.run(measure_cases(options, cases))
    except (LLMException, ExceptionGroup) as error:
        raise _one_line(error) from error
    _show(options, report, old)
    done = len(report.rows) // options.rows_of_a_case
    if report.failure == INTERRUPTED:
        raise CommandError(f"{INTERRUPTED} after {done} of {len(cases)} cases", exit_code=130)
    if report.failure is not None:
        raise CommandError(f"case {done + 1} of {len(cases)} failed: {report.failure}")
    return 1 if any(row.wrong for row in report.rows) else 0


def _check_targets(options: BenchOptions) -> None:
    """Check that the run's output files can be written. Raises CommandError if one cannot."""
    check_target("--json", options.json)
    if options.plot is not None:
        check_plot(options.plot)
        check_target("--plot", options.plot)


def _one_line(error: Exception) -> CommandError:
    """Return the error for the end of a command.

    Raises:
        Exception: the error itself, if it is a bug in the library.
    """
    cause = error
    while isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, LLMException):
        return CommandError(str(cause))
    if isinstance(cause, CommandError):
        return cause
    raise error


def _loop_factory(options: BenchOptions) -> Callable[[], asyncio.AbstractEventLoop]:
    if options.loop == "asyncio":
        return asyncio.new_event_loop
    try:
        import uvloop  # noqa: PLC0415 - an extra
    except ImportError:
        raise wrong_input("--loop uvloop: uvloop is not installed: pip install uvloop") from None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(options: BenchOptions) -> None:
    """Serve initiators until Ctrl-C, or until stdin closes."""
    async with open_owner(options) as address:
        say_listening(address)
        if not options.until_stdin_closes:
            await anyio.sleep_forever()
        die_with_parent()
        await until_stdin_closes()


async def measure_cases(options: BenchOptions, cases: list[Case]) -> BenchReport:
    """Return a report with all rows; or with those before a failure or Ctrl-C, and the reason.

    Raises:
        CancelledError: if there is no row yet.
    """
    started, machine = datetime.now(UTC).astimezone(), await Machine.here()
    rows: list[Row] = []
    failure = idle = None
    try:
        async with AsyncExitStack() as stack:
            address = await _owner(options, stack)
            datadist, owner = await stack.enter_async_context(open_initiator(options, address))
            ran, idle = Ran.of(datadist), await idle_late_us()
            try:
                await _rows(datadist, owner, options, cases, rows)
            except (LLMException, CommandError, ExceptionGroup) as error:
                failure = str(_one_line(error))
            finally:
                ran = ran.model_copy(update={"transport": owner.way or ran.transport})
    except asyncio.CancelledError:
        if not rows:
            raise
        _go_on()
        failure = INTERRUPTED
    return BenchReport(
        started=started,
        machine=machine,
        ran=ran,
        lengths=options.lengths,
        rows=rows,
        idle_late_p99_us=idle,
        failure=failure,
    )


def _go_on() -> None:
    """Undo the cancellation of this task, so that it ends normally: its caller gets the rows instead of the error."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


async def _rows(
    datadist: LLMDataDist, owner: RemoteOwner, options: BenchOptions, cases: list[Case], into: list[Row]
) -> None:
    total = len(cases)
    with open_screen(sys.stderr, lines=total) as screen:
        for done, case in enumerate(cases):
            words = f"{case.op.value} {case.memory.value} {size_text(case.block)}"
            screen.show("", done, total, words)
            rows = await measure(datadist, owner, case, options.lengths, options.against, options.checksum)
            into += rows
            screen.show("", done + 1, total, f"{words} {speeds(rows)}")


def speeds(rows: list[Row]) -> str:
    """Return the speed of each program that was measured, this package's first."""
    first, *others = [f"{row.gigabytes_per_second.median:.2f} GB/s" for row in rows]
    return ", ".join([first, *(f"{row.by} {speed}" for row, speed in zip(rows[1:], others, strict=True))])


async def _owner(options: BenchOptions, stack: AsyncExitStack) -> Address:
    if options.role is BenchRole.DECODE:
        assert options.peer is not None
        return options.peer
    open_it = open_owner if options.transport == "loopback" else open_child_owner
    return await stack.enter_async_context(open_it(options))


def _old_report(options: BenchOptions) -> BenchReport | None:
    if options.compare is None:
        return None
    try:
        return BenchReport.model_validate_json(options.compare.read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong_input(f"--compare: cannot read {options.compare}: {error.strerror or error}") from None
    except (UnicodeDecodeError, ValidationError):
        raise wrong_input(f"--compare: {options.compare} is not a report of this command: --json writes one") from None


def _show(options: BenchOptions, report: BenchReport, old: BenchReport | None) -> None:
    """Print the table, then write the files. In this order the results are not lost if a file cannot be written.

    Raises:
        CommandError: if a file cannot be written.
    """
    text, is_for_machines = report.model_dump_json(indent=1), is_stdout(options.json)
    columns = shutil.get_terminal_size().columns
    print(text if is_for_machines else "\n".join(lines(report, columns)))
    if old is not None and report.rows:
        print("\n" + "\n".join(comparison(old, report, columns)), file=sys.stderr if is_for_machines else sys.stdout)
    if not is_for_machines:
        write_report("--json", options.json, text)
    try:
        if options.plot is not None and report.rows:
            draw(report, options.plot)
    except OSError as error:
        raise CommandError(f"{error.filename or 'a file'} cannot be written: {error.strerror or error}") from error
