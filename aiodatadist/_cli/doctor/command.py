"""``aiodatadist doctor``: the findings on this machine, and what each means for the user."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import anyio

from aiodatadist._cli.doctor.finding import Finding
from aiodatadist._cli.doctor.findings import examine
from aiodatadist._cli.doctor.peer import Peer, peer_findings, serve
from aiodatadist._cli.doctor.pools import pool_findings
from aiodatadist._cli.kit.options import is_stdout, write_report
from aiodatadist._cli.kit.text import wrapped


def run_doctor(as_json: Path | None, pool: str | None = None, peer: Peer | None = None) -> int:
    """Print all findings, and return 1 if one of them is fatal, else 0.

    With the URL of a pool there are findings about it, too, and with a peer about the way to it. They are also written to the
    file ``as_json``; ``-`` is stdout.

    Raises:
        CommandError: if the file cannot be written.
    """
    findings = [*examine(), *([] if pool is None else pool_findings(pool))]
    is_here = any(finding.mark == "fail" for finding in findings)
    findings += [] if peer is None else peer_findings(peer)
    healthy = all(finding.mark != "fail" for finding in findings)
    report = json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2)
    if not is_stdout(as_json):
        print("\n".join(lines(findings, "here" if is_here or peer is None else f"with {peer}")))
    write_report("--json", as_json, report)
    return 0 if healthy else 1


def run_serve(host: str, port: int, key_file: Path | None) -> int:
    """Serve other machines' ``doctor --peer`` until Ctrl-C.

    Raises:
        CommandError: if the address or the key cannot be used.
    """
    anyio.run(serve, host, port, key_file)
    return 0


def lines(findings: Sequence[Finding], where: str = "here") -> list[str]:
    """Return one line per finding, wrapped at 80 columns, and the verdict, which says where something is fatal."""
    width = max(len(finding.name) for finding in findings)
    rows = [
        row for f in findings for row in wrapped(f"{f.mark:<5}{f.name:<{width}}  {f.value}: {f.meaning}", width + 7)
    ]
    count = {mark: sum(finding.mark == mark for finding in findings) for mark in ("warn", "fail")}
    if count["fail"]:
        return [*rows, f"{count['fail']} fatal: aiodatadist does not work {where} until that is fixed"]
    return [*rows, f"no fatal finding, {count['warn']} to know about"]
