"""A readable report: one line per finding, wrapped at 80 columns."""

from __future__ import annotations

from collections import Counter

from aiodatadist._cli.kit.text import wrapped
from aiodatadist._cli.probe.report import Header, Report, StepReport

INDENT = 7
MARKS = {"as expected": "ok", "allowed": "soft", "differs": "diff", "skipped": "skip"}


def header_lines(header: Header) -> list[str]:
    rows = [
        f"aiodatadist {header.aiodatadist} on {header.runtime}, device {header.device}, linked over {header.link}",
        f"chip {header.chip}, CANN {header.cann}, driver {header.driver}, acl API {header.acl}, "
        f"{header.functions} functions",
        "environment: "
        + (", ".join(f"{name}={value}" for name, value in header.environment.items()) or "none of HCCL's"),
    ]
    return [line for row in rows for line in wrapped(row, INDENT)]


def step_lines(report: StepReport) -> list[str]:
    """Return the findings, and what was expected if that differs."""
    found = report.outcome
    text = f"{MARKS[found.verdict]:<5}{report.step:<3} {report.title}: "
    text += found.found or f"skipped because {found.because}"
    if found.verdict in {"differs", "allowed"}:
        text += f" (expected: {report.expected})"
    return wrapped(text + decided(report), INDENT + 2)


def decided(report: StepReport) -> str:
    if not report.decides:
        return ""
    if report.outcome.holds is None:
        return f" [{report.decides} stays open]"
    return f" [{'as' if report.outcome.holds else 'not as'} {report.decides} predicts]"


def verdict_line(report: Report) -> str:
    count = Counter(step.outcome.verdict for step in report.steps)
    allowed = f"{count['allowed']} as only free softnpu allows, " if count["allowed"] else ""
    return f"{count['as expected']} as expected, {allowed}{count['differs']} differ, {count['skipped']} skipped"
