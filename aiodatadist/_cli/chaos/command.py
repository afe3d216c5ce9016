"""``aiodatadist chaos``."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from aiodatadist._cli.chaos.linked_run import LinkedRun
from aiodatadist._cli.chaos.messages import SideSettings
from aiodatadist._cli.chaos.owner import OwnerSide
from aiodatadist._cli.chaos.pooled_run import PooledRun, engine
from aiodatadist._cli.chaos.profiles import Door, Profile
from aiodatadist._cli.chaos.program import FAULTS
from aiodatadist._cli.chaos.puller import Puller
from aiodatadist._cli.chaos.report import as_json, lines, summary
from aiodatadist._cli.chaos.run import Length, Result, Run
from aiodatadist._cli.chaos.saver import Saver
from aiodatadist._cli.chaos.side import Side
from aiodatadist._cli.kit.errors import CommandError
from aiodatadist._cli.kit.options import is_stdout, write_report
from aiodatadist._cli.kit.pipes import die_with_parent
from aiodatadist._cli.kit.screen import Screen, open_screen

REPORTED = 4
"""Plain lines about a profile while it runs."""


@dataclass(frozen=True)
class ChaosOptions:
    """The options of a chaos run, as values.

    Attributes:
        seconds: seconds for all profiles together.
        loop: event loop for all of them; None for each profile's own.
    """

    seconds: float
    seed: int
    profiles: Sequence[Profile]
    faults: Sequence[str]
    json: Path | None
    loop: str | None = None

    @property
    def replay(self) -> str:
        names = ",".join(profile.name for profile in self.profiles)
        faults = "" if len(self.faults) == len(FAULTS) else f" --faults {','.join(self.faults)}"
        chosen = (
            (name, getattr(self.profiles[0], name), getattr(Profile, name)) for name in ("load", "clusters", "gib")
        )
        more = "".join(f" --{name} {value}" for name, value, usual in chosen if value != usual)
        more += "" if self.loop is None else f" --loop {self.loop}"
        return f"aiodatadist chaos --seconds {self.seconds:g} --profile {names}{faults}{more} --seed {self.seed}"


def run_chaos(options: ChaosOptions) -> int:
    """Run all profiles, and return the exit code: 0 if no rule was broken."""
    quiet = is_stdout(options.json)
    if not quiet:
        print(f"seed {options.seed}; the same again: {options.replay}\n", flush=True)
    results: list[Result] = []
    is_interrupted = False
    try:
        anyio.run(_run_all, options, not quiet, results)
    except KeyboardInterrupt:
        if not any(result.looks for result in results):  # the processes are not even linked
            raise
        is_interrupted = True
    report = {"seed": options.seed, "replay": options.replay, **as_json(results)}
    write_report("--json", options.json, json.dumps(report, indent=1))
    broken = sum(result.broken for result in results)
    if not quiet:
        print(
            "\n".join(
                [*summary(results), f"{broken} violations; seed {options.seed}; the same again: {options.replay}"]
            )
        )
    if is_interrupted:
        done = sum(not result.is_interrupted for result in results)
        raise CommandError(f"interrupted after {done} of {len(options.profiles)} profiles", exit_code=130)
    return 1 if broken else 0


async def _run_all(options: ChaosOptions, is_told: bool, results: list[Result]) -> None:
    """Add the result of each profile when the profile starts, so that an interrupt does not lose what was found."""
    for done, profile in enumerate(options.profiles):
        logs = Path(tempfile.mkdtemp(prefix=f"aiodatadist-chaos-{profile.name}-"))
        length = Length(options.seed, options.seconds / len(options.profiles), options.faults)
        try:
            with open_screen(sys.stderr, lines=REPORTED) as screen:
                screen.show(profile.name, 0.0, length.seconds, "starting its processes")
                await _run_one(profile, length, logs, results, screen)
        except anyio.get_cancelled_exc_class():
            for result in results[done:]:  # also if its processes were just ending: it was not judged
                result.is_interrupted = True
            raise
        finally:
            _end_profile(results[done:], logs, is_told)


def _end_profile(results: list[Result], logs: Path, is_told: bool) -> None:
    """Tell the result of a profile, if there is one, and remove its logs unless they explain a violation."""
    is_broken = any(result.broken for result in results)
    if not is_broken:
        shutil.rmtree(logs)
    for result in results:
        if is_told and (result.looks or is_broken):
            columns = shutil.get_terminal_size((80, 24)).columns
            print("\n".join(lines(result, columns)), flush=True)
            print(f"what the processes logged is in {logs}\n" if is_broken else "", flush=True)


async def _run_one(profile: Profile, length: Length, logs: Path, results: list[Result], screen: Screen) -> None:
    if profile.door != "context":
        await _shown(LinkedRun(profile, length, logs), length, results, screen)
        return
    async with AsyncExitStack() as stack:  # servers start and end in a thread: that waits
        opened = engine(profile.engine)
        url, victims = await anyio.to_thread.run_sync(opened.__enter__)
        stack.push_async_callback(anyio.to_thread.run_sync, opened.__exit__, None, None, None)
        await _shown(PooledRun(profile, length, logs, url, victims), length, results, screen)


async def _shown(run: Run, length: Length, results: list[Result], screen: Screen) -> None:
    results.append(run.result)
    run.looked = partial(_show_progress, screen, run.result, length.seconds)
    await run.run()


def _show_progress(screen: Screen, result: Result, total: float, seconds: float) -> None:
    words = f"{result.tally.good:,} operations, {result.broken} violations"
    screen.show(result.profile, seconds, total, words)


def sides_of(door: Door) -> dict[str, type[Side]]:
    """Return the processes of a run, by name."""
    if door == "context":
        return {"saver-1": Saver, "saver-2": Saver}
    return {"owner": OwnerSide, "puller": Puller}


def run_side(text: str) -> int:
    """Run one process of a run until the command ends it."""
    die_with_parent()
    settings = SideSettings.model_validate_json(text)
    profile = settings.profile
    side = sides_of(profile.door)[settings.name](settings)
    uvloop = profile.loop == "uvloop"
    anyio.run(side.run, backend_options={"use_uvloop": uvloop})
    return 0
