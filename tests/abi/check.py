"""Compare what we declare with a set of vendor headers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from . import CannotCheck, compiler
from . import declarations as d
from .findings import Finding, Report, Status
from .unit import Line, is_hidden, write_unit

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from .vendor_headers import HeaderSet

_COMPARED = re.compile(r"abi::(?:type|value)<(.*)>::equals<(.*)> line_\d+")
_RANK = (Status.IDENTICAL, Status.EQUIVALENT, Status.DIFFERENT, Status.MISSING)  # a worse one is not taken back


def check(sources: Iterable[Path], headers: HeaderSet, vendor_version: d.Version | None = None) -> Report:
    """Compare what these files declare with the vendor's headers.

    Without ``vendor_version`` the headers are taken for the newest: ``@since`` excuses nothing.
    """
    declared = d.read_declarations(*sources)
    internal = headers.has_one_sided
    findings = {
        item: Finding(item, Status.UNEXPECTED if is_hidden(item, has_internal=internal) else Status.IDENTICAL)
        for item in declared
    }
    unit = write_unit(headers.names, declared, has_internal=internal)
    errors = compiler.errors(headers, unit.text)
    if unit.end not in [error.line for error in errors]:
        raise CannotCheck("g++ did not reach the end of the generated unit")
    for error in errors:
        if error.line == unit.end:
            continue
        if error.line not in unit.origin:
            raise CannotCheck(f"the generated unit does not compile, line {error.line}: {error.message}")
        declaration, line = unit.origin[error.line]
        _judge(findings[declaration], line, error.message)
    for finding in findings.values():
        _compare_parameter_names(finding, headers)
        _excuse_later(finding, vendor_version)
    return Report(list(findings.values()))


def _judge(finding: Finding, line: Line, message: str) -> None:
    """Turn one error on one line into the finding of its declaration; the first explanation is kept."""
    if line.failing_means is Status.HIDDEN:
        finding.status = Status.HIDDEN
        return
    finding.status = max(finding.status, line.failing_means, key=_RANK.index)
    finding.detail = finding.detail or _explain(line, message)


def _explain(line: Line, message: str) -> str:
    compared = _COMPARED.search(message)
    if compared is None:
        return message.partition("; did you mean")[0]
    theirs, ours = compared.groups()
    return f"{line.about}: the headers have {theirs}, we declare {ours}"


def _compare_parameter_names(finding: Finding, headers: HeaderSet) -> None:
    """Compare the names of parameters. Types do not show that two handles, both ``void *``, changed places."""
    function = finding.declaration
    if not isinstance(function, d.Function) or finding.status not in {Status.IDENTICAL, Status.EQUIVALENT}:
        return
    theirs = compiler.parameter_names(headers).get(function.name)
    if theirs != function.parameters:
        finding.status = Status.DIFFERENT
        known = "unreadable names" if theirs is None else f"({', '.join(theirs)})"
        finding.detail = f"parameters: the headers have {known}, we declare ({', '.join(function.parameters)})"


def _excuse_later(finding: Finding, vendor_version: d.Version | None) -> None:
    since = finding.declaration.tags.since
    if finding.status is Status.MISSING and since and vendor_version and since > vendor_version:
        finding.status = Status.LATER
