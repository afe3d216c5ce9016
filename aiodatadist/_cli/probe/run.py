"""A whole probe: all steps, one after the other, and the report."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

import aiodatadist
from aiodatadist._cli.probe import children
from aiodatadist._cli.probe.hide import Hider
from aiodatadist._cli.probe.meeting import Peer, meet
from aiodatadist._cli.probe.report import Header, Outcome, Report, StepReport
from aiodatadist._cli.probe.step import Step
from aiodatadist._cli.probe.steps import STEPS
from aiodatadist._native.runtime import FUNCTIONS, RuntimeName, load_runtime, npu_nodes
from aiodatadist.errors import RuntimeUnavailable


@dataclass(frozen=True)
class ProbeOptions:
    """The options of a probe, from the command line.

    Attributes:
        peer: address of the far end; None if it is the next device of this host.
        resource, far_resource: ``local_comm_res`` of the two devices, as text; generated if empty.
        rounds, mib: rounds and mebibytes of the long steps.
        only: numbers of the steps to run; empty for all.
        limit: seconds for each step; None for its own limit.
    """

    device: int
    peer: Peer | None = None
    resource: str = ""
    far_resource: str = ""
    rounds: int = 1000
    mib: int = 64
    only: frozenset[str] = frozenset()
    limit: float | None = None

    @property
    def order(self) -> dict[str, Any]:
        options = {"rounds": self.rounds, "mib": self.mib, "resource": self.resource}
        return {"runtime": choose_runtime(), "device": self.device, "options": options}


class NoSuchDevice(Exception):
    """The runtime has no such device."""


Done = Callable[[StepReport], None]


def choose_runtime() -> RuntimeName:
    """Choose the runtime as the library does, without initialising anything in this process.

    Raises:
        RuntimeUnavailable: if the vendor's libraries were asked for, or this machine has NPUs, and they do not load.
    """
    choice = os.environ.get("AIODATADIST_RUNTIME", "auto")
    if choice == "soft":
        return "soft"
    try:
        return load_runtime("ascend").name
    except RuntimeUnavailable:
        if choice == "ascend" or npu_nodes():
            raise
        return "soft"


@dataclass
class _Probe:
    options: ProbeOptions
    order: dict[str, Any]
    hider: Hider = field(default_factory=Hider)
    far_host: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    def run(self, step: Step) -> StepReport:
        if step.alone is not None:
            report = anyio.run(children.run_alone, step, self.order)
        elif self.options.peer is not None:
            report = self._with_peer(step, self.options.peer)
        else:
            report = self._beside(step)
        self.facts.update(report.outcome.facts)
        if step.soft_allows and report.ending == "finished" and report.outcome.verdict == "differs" and self._is_free:
            report = report.model_copy(update={"outcome": report.outcome.model_copy(update={"verdict": "allowed"})})
        return self._hidden(report)

    @property
    def _is_free(self) -> bool:
        """True if softnpu does the work, and was not told to be as strict as HCCL."""
        return self.order["runtime"] == "soft" and not os.environ.get("SOFTNPU_STRICT")

    def _beside(self, step: Step) -> StepReport:
        devices = int(self.facts.get("devices", 0))
        if devices < 2:
            return skipped(step, f"it needs two devices, and this host shows {devices}: see --peer")
        far = (self.options.device + 1) % devices
        return anyio.run(children.run_together, step, self.order, far, self.options.far_resource)

    def _with_peer(self, step: Step, peer: Peer) -> StepReport:
        try:
            link, self.far_host = meet(peer, step.limit)
        except OSError as error:
            return skipped(step, f"the far end cannot be reached: {error}")
        with link:
            return anyio.run(children.run_near, step, self.order, link)

    def _hidden(self, report: StepReport) -> StepReport:
        """Return the report with all addresses hidden, including those in the vendor's and the far end's messages."""
        text = self.hider.text
        calls = [call.model_copy(update={"words": text(call.words)}) for call in report.calls]
        found = report.outcome.model_copy(update={"found": text(report.outcome.found), "facts": {}})
        return report.model_copy(update={"calls": calls, "outcome": found, "said": text(report.said)})

    def check_device(self) -> None:
        """Check the device's number, once step 1 has reported how many devices there are."""
        devices = int(self.facts.get("devices", self.options.device + 1))
        if self.options.device >= devices:
            raise NoSuchDevice(f"device {self.options.device} does not exist: the runtime shows {devices}, from 0")

    def header(self) -> Header:
        facts = self.facts
        missing = facts.get("missing", "").split()
        hosts = [self.hider.this_host()]
        if self.far_host:
            hosts.append(self.hider.hashed(self.far_host))
        return Header(
            aiodatadist=aiodatadist.__version__,
            runtime=f"{self.order['runtime']}: {facts.get('libraries', 'unknown')}",
            acl=facts.get("acl", "unknown"),
            cann=facts.get("cann", "unknown"),
            driver=facts.get("driver", "unknown"),
            chip=facts.get("chip", "unknown"),
            device=self.options.device,
            link=facts.get("kind", "unknown"),
            functions=f"{len(FUNCTIONS) - len(missing)} of {len(FUNCTIONS)}",
            missing=missing,
            hosts=hosts,
            environment=self.hider.environment(),
        )


def skipped(step: Step, because: str) -> StepReport:
    return StepReport(
        step=step.number,
        title=step.title,
        expected=step.expected,
        decides=step.decides,
        outcome=Outcome(verdict="skipped", because=because),
        ending="not run",
    )


def run_probe(options: ProbeOptions, done: Done) -> Report:
    """Run all steps, which takes some minutes, and pass each report to ``done``.

    Raises:
        RuntimeUnavailable: if the libraries do not load.
        NoSuchDevice: if the runtime has no such device.
    """
    probe = _Probe(options, options.order)
    reports = []
    for step in STEPS:
        if options.only and step.number not in options.only | {"1"}:
            continue
        limited = step if options.limit is None else replace(step, limit=options.limit)
        report = probe.run(limited)
        reports.append(report)
        done(report)
        probe.check_device()
    return Report(header=probe.header(), steps=reports)
