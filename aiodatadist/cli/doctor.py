"""``aiodatadist doctor``: what was found on this machine, and what each thing means for the user."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from aiodatadist.cli.findings import Finding, examine


def run_doctor(*, as_json: bool) -> int:
    """Print all findings; 1 if one of them is fatal, else 0."""
    findings = examine()
    healthy = all(finding.mark != "fail" for finding in findings)
    if as_json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print("\n".join(lines(findings)))
    return 0 if healthy else 1


def lines(findings: Sequence[Finding]) -> list[str]:
    """One line per finding, and the verdict."""
    name_width = max(len(finding.name) for finding in findings)
    value_width = min(28, max(len(finding.value) for finding in findings))
    rows = [f"{f.mark:<5}{f.name:<{name_width}}  {f.value:<{value_width}}  {f.meaning}" for f in findings]
    count = {mark: sum(finding.mark == mark for finding in findings) for mark in ("warn", "fail")}
    if count["fail"]:
        return [*rows, f"{count['fail']} fatal: aiodatadist does not work here until that is mended"]
    return [*rows, f"no fatal finding, {count['warn']} to know about"]
