"""``aiodatadist demo --context-cache``: a prompt is read twice, and the second time its KV cache is there already.

With the embedded pool both runs are in this process, because the pool is. With any other pool each run is a separate process,
and what the first one saved is all that they share.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import anyio
from pydantic import ValidationError

from aiodatadist._cli.demo.command import worker_command
from aiodatadist._cli.demo.messages import ContextJob, ContextRun
from aiodatadist._cli.demo.prompt import load_prompt, shown
from aiodatadist._cli.kit.children import Command, environment, open_child
from aiodatadist._cli.kit.errors import CommandError, wrong_input
from aiodatadist._cli.kit.numbers import duration, quantity
from aiodatadist._cli.kit.screen import Screen, open_screen
from aiodatadist._cli.kit.text import cut, wrapped
from aiodatadist._context_caching.results import CcStatus

_PASSWORD = re.compile(r"([?&][^?&=]*password=)[^&]*", re.IGNORECASE)
"""An option that contains a password, with its value."""


@dataclass(frozen=True)
class ContextOptions:
    """The options of the context cache demo, as values."""

    url: str
    prompt: Path | None
    tokens: int
    seed: int
    json: bool
    device: int = 0


def run_context_demo(options: ContextOptions, command: Command = worker_command) -> int:
    """Run the demo, show it on stdout, and return the exit code.

    Raises:
        CommandError: if the input is wrong, the pool does not work, or Ctrl-C came.
    """
    if find_spec("numpy") is None:
        raise wrong_input("the demo's model needs numpy: pip install numpy")
    prompt = load_prompt(options.prompt)
    _check_length(len(prompt.text))
    job = ContextJob(
        url=options.url,
        prompt=prompt.text.decode("latin-1"),
        tokens=options.tokens,
        seed=options.seed,
        device=options.device,
    )
    with open_screen(sys.stdout, silent=options.json, lines=0) as screen:
        for line in wrapped(f"prompt: {prompt.describe()}", 8):
            screen.line(line)
        screen.line(f"pool: {public(options.url)}")
        try:
            first, second = anyio.run(_both, job, screen, command)
        except KeyboardInterrupt:
            raise CommandError(screen.interrupted(), exit_code=130) from None
    _show(first, second, screen)
    is_equal = first.text == second.text
    if options.json:
        runs = [run.model_dump(exclude={"error", "exit_code"}) for run in (first, second)]
        print(json.dumps({"pool": public(options.url), "runs": runs, "tokens_equal": is_equal}, indent=2))
    return 0 if is_equal and second.loaded_tokens else 1


def _check_length(tokens: int) -> None:
    """Check that there is a block to load. Raises CommandError if the prompt is too short."""
    os.environ.update(environment())  # before numpy is loaded
    from aiodatadist.testing.small_model import BLOCK  # noqa: PLC0415 - needs numpy

    if tokens <= BLOCK:
        raise wrong_input(
            f"the prompt has {tokens} bytes, each a token: must have at least {BLOCK + 1}, because whole blocks of "
            f"{BLOCK} tokens are saved and loaded, and the last token is always computed"
        )


async def _both(job: ContextJob, screen: Screen, command: Command) -> tuple[ContextRun, ContextRun]:
    screen.show("runs", 0, 2)
    if job.url.startswith("memory:"):
        from aiodatadist._cli.demo.context_worker import run_twice  # noqa: PLC0415 - needs numpy

        first, second = map(_checked, await run_twice(job))
        return first, second
    first = _checked(await _in_process(job, command))
    screen.show("runs", 1, 2)
    return first, _checked(await _in_process(job, command))


def _checked(run: ContextRun) -> ContextRun:
    if run.error:
        raise CommandError(run.error, exit_code=run.exit_code)
    return run


def public(url: str) -> str:
    """Return a URL without its passwords, even if they make it invalid. If in doubt, it shows less."""
    scheme, slashes, rest = url.partition("//")
    account, at, place = rest.rpartition("@")
    user, has_password, _ = account.partition(":")
    if has_password:
        if _PASSWORD.search(account):  # so this may be its "@", and no account's
            place = "***"
        url = f"{scheme}{slashes}{user}:***{at}{place}"
    return _PASSWORD.sub(r"\1***", url)


async def _in_process(job: ContextJob, command: Command) -> ContextRun:
    """Run once in a separate process, which ends with the run, or with this process."""
    async with (
        open_child("context", command("context"), env=environment()) as child,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(child.keep_last_words)
        await child.order(job)
        await child.close_orders()
        line = await child.line()
        code, words = await child.ended()
    try:
        return ContextRun.model_validate_json(line or b"")
    except ValidationError:
        last = " ".join(words.strip().splitlines()[-1:])
        raise CommandError(f"a run ended with exit code {code}: {last}") from None


def _show(first: ContextRun, second: ContextRun, screen: Screen) -> None:
    screen.line("the text continues (untrained weights: it is gibberish, but always the same):")
    for line in cut(shown(second.text), "  >>>"):
        screen.line(line)
    for name, run in (("first run", first), ("second run", second)):
        for left, right in _rows(run):
            for line in wrapped(f"{name:<12}{left:<10}{right}", 22):
                screen.line(line)
            name = ""  # noqa: PLW2901 - only on the first line
    for line in wrapped(_gain(first, second), 2):
        screen.line(line)
    screen.line(f"tokens equal: {'yes' if first.text == second.text else 'NO'}")


def _rows(run: ContextRun) -> Sequence[tuple[str, str]]:
    rows = [("computed", f"{run.computed_tokens} tokens in {duration(run.compute_seconds)}")]
    if run.loaded_tokens:
        what = f"{run.loaded_tokens} tokens, {quantity(run.loaded_bytes)} in {duration(run.load_seconds)}"
        rows.insert(0, ("loaded", what))
    if run.saved_tokens:
        what = f"{run.saved_tokens} tokens, {quantity(run.saved_bytes)} in {duration(run.save_seconds)}"
        rows.append(("saved", what))
    if run.not_saved:
        rows.append(("not saved", run.not_saved))
    return rows


def _gain(first: ContextRun, second: ContextRun) -> str:
    why = ", since the pool has no room" if CcStatus.REJECTED.value in first.not_saved else ""
    not_saved = f"; the first one did not save all{why} ({first.not_saved})" if first.not_saved else ""
    if not second.loaded_tokens:
        return f"the second run found nothing that it could load{not_saved}"
    if first.loaded_tokens:
        return (
            f"the first run found {first.loaded_tokens} tokens in the pool already, so there is nothing to compare with: "
            "choose another --seed"
        )
    before, after = first.load_seconds + first.compute_seconds, second.load_seconds + second.compute_seconds
    return (
        f"the second run did not compute {second.loaded_tokens} tokens again: its first token was there after "
        f"{duration(after)} instead of {duration(before)}{not_saved}"
    )
