"""Findings of the gate, one per declaration, and the report that people read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from . import declarations as d

if TYPE_CHECKING:
    from collections.abc import Iterator

_KINDS = {d.Function: "functions", d.Alias: "types", d.Enum: "types", d.Struct: "structs", d.Field: "fields"}


class Status(StrEnum):
    IDENTICAL = "identical"
    EQUIVALENT = "equivalent spelling"  # integer types of the same width and sign
    HIDDEN = "not in the headers"  # tagged so, and so it is: nothing to compare with
    LATER = "not yet there"  # absent, and tagged @since a later version than the headers'
    DIFFERENT = "different"
    MISSING = "missing"
    UNEXPECTED = "unexpected"  # tagged as absent, yet declared

    @property
    def is_failure(self) -> bool:
        return self in {Status.DIFFERENT, Status.MISSING, Status.UNEXPECTED}


@dataclass
class Finding:
    declaration: d.Declaration
    status: Status
    detail: str = ""

    @property
    def kind(self) -> str:
        return _KINDS.get(type(self.declaration), "constants")

    def __str__(self) -> str:
        return f"{self.kind.removesuffix('s')} {self.declaration.name}: {self.status}" + (
            f" ({self.detail})" if self.detail else ""
        )


@dataclass
class Report:
    findings: list[Finding]

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status.is_failure]

    def names(self, status: Status, kind: str = "functions") -> list[str]:
        return [f.declaration.name for f in self.findings if f.status is status and f.kind == kind]

    def count(self, kind: str) -> Counter[Status]:
        return Counter(finding.status for finding in self.findings if finding.kind == kind)

    def __str__(self) -> str:
        lines = [*map(str, self.failures)]
        lines += [str(f) for f in self.findings if f.status is Status.EQUIVALENT]
        for kind in ("functions", "types", "structs"):
            if hidden := self.names(Status.HIDDEN, kind):
                lines += [f"not checked, for the headers do not have them: {len(hidden)} {kind}: {', '.join(hidden)}"]
        functions = self.count("functions")
        checked = functions[Status.IDENTICAL] + functions[Status.EQUIVALENT]
        lines.append(f"{checked} of {functions.total()} functions are as the headers declare them")
        return "\n".join([*lines, *self._table()])

    def _table(self) -> Iterator[str]:
        counts = {kind: self.count(kind) for kind in dict.fromkeys([*_KINDS.values(), "constants"])}
        always = (Status.IDENTICAL, Status.EQUIVALENT, Status.HIDDEN)
        shown = [status for status in Status if status in always or any(count[status] for count in counts.values())]
        yield f"{'':10}" + "".join(f"{status:>{len(status) + 3}}" for status in shown)
        for kind, count in counts.items():
            yield f"{kind:10}" + "".join(f"{count[status]:>{len(status) + 3}}" for status in shown)
