"""``aiodatadist doctor --device N`` and ``--serve``: from the arguments to the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiodatadist._cli.kit.errors import CommandError, wrong_input
from aiodatadist._cli.kit.options import address, is_stdout, read_option, write_report
from aiodatadist._cli.probe.meeting import Peer, key_for
from aiodatadist._cli.probe.report import Report, StepReport
from aiodatadist._cli.probe.run import NoSuchDevice, ProbeOptions, run_probe
from aiodatadist._cli.probe.serve import serve
from aiodatadist._cli.probe.steps import STEPS
from aiodatadist._cli.probe.text import header_lines, step_lines, verdict_line
from aiodatadist.errors import LLMException


@dataclass(frozen=True)
class ProbeArguments:
    """The arguments as given. ``json`` is None, ``-`` (the report alone, on stdout), or a file for it."""

    device: int
    peer: str | None
    serve: str | None
    json: Path | None
    rounds: int
    mib: int
    steps: tuple[str, ...]
    limit: float | None
    resource: Path | None
    peer_resource: Path | None


def run_probe_command(arguments: ProbeArguments) -> int:
    """Run a probe; return 0 if everything is as expected, 1 if something differs.

    Raises:
        CommandError: if an argument is wrong, or the libraries do not load.
    """
    options = _options(arguments)
    try:
        if arguments.serve is not None:
            host, port = address("--serve", arguments.serve, "127.0.0.1")
            serve(host, port, options.order, _say)
        report = run_probe(options, _quiet if is_stdout(arguments.json) else _print_step)
    except NoSuchDevice as error:
        raise wrong_input(str(error)) from error
    except LLMException as error:
        raise CommandError(str(error)) from error
    except PermissionError as error:
        raise wrong_input(str(error)) from error
    _finish(report, arguments.json)
    return int(any(step.outcome.verdict == "differs" for step in report.steps))


def _options(arguments: ProbeArguments) -> ProbeOptions:
    unknown = set(arguments.steps) - {step.number for step in STEPS}
    if unknown:
        numbers = ", ".join(step.number for step in STEPS)
        raise wrong_input(f"--step {sorted(unknown)[0]}: must be one of {numbers}")
    return ProbeOptions(
        device=arguments.device,
        peer=_peer(arguments.peer),
        resource=_text("--local-comm-res", arguments.resource),
        far_resource=_text("--peer-local-comm-res", arguments.peer_resource),
        rounds=arguments.rounds,
        mib=arguments.mib,
        only=frozenset(arguments.steps),
        limit=arguments.limit,
    )


def _peer(text: str | None) -> Peer | None:
    if text is None:
        return None
    peer = Peer(*address("--peer", text))
    try:
        key_for(peer.host)
    except OSError as error:
        raise wrong_input(f"--peer {text}: {error}") from error
    return peer


def _text(option: str, file: Path | None) -> str:
    return "" if file is None else read_option(option, file)


def _finish(report: Report, json: Path | None) -> None:
    if not is_stdout(json):
        print("\n".join(header_lines(report.header)))
        print(verdict_line(report))
    write_report("--json", json, report.model_dump_json(indent=2))


def _print_step(step: StepReport) -> None:
    print("\n".join(step_lines(step)), flush=True)


def _quiet(step: StepReport) -> None:
    pass


def _say(text: str) -> None:
    print(text, flush=True)
