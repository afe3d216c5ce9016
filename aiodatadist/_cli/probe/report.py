"""The report of a probe. :class:`Report` is its JSON. No I/O."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Verdict = Literal["as expected", "allowed", "differs", "skipped"]
Ending = Literal["finished", "killed at the limit", "crashed", "not run"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Call(_Model):
    """A call of the vendor's, or many equal ones.

    Attributes:
        function: the vendor's name.
        end: the end that called it, near or far.
        arguments: numbers and sizes; pointers, names and tables only by their type.
        code: returned code; None if it did not return, or returns no code.
        words: ``aclGetRecentErrMsg`` after a code other than 0.
        microseconds: duration; None if it did not return.
    """

    function: str
    end: Literal["near", "far"] = "near"
    arguments: str = ""
    code: int | None = None
    words: str = ""
    microseconds: int | None = None


class Outcome(_Model):
    """The findings of a step.

    Attributes:
        verdict: if the findings agree with the column ``expected``. ``allowed``: they do not, and softnpu is meant to
            allow that unless ``SOFTNPU_STRICT`` is set.
        found: the findings, in words.
        because: reason for skipping the step.
        holds: True if the prediction for this kind of link holds; one about RoCE only predicts success over HCCS. None
            if the step did not decide that.
        facts: facts for the header, from step 1.
    """

    verdict: Verdict
    found: str = ""
    because: str = ""
    holds: bool | None = None
    facts: dict[str, str] = {}


class StepReport(_Model):
    """The report of one step.

    Attributes:
        step: number of the step, followed by a letter if it has two children.
        decides: the prediction (B1 to B20 in docs/npu.md) that it decides; empty if none.
        ending: the way in which its child process ended; ``status`` is the exit code, or a signal if negative.
        said: end of the child's stderr if it did not finish.
    """

    step: str
    title: str
    expected: str
    decides: str
    outcome: Outcome
    ending: Ending
    status: int | None = None
    seconds: float = 0.0
    said: str = ""
    calls: list[Call] = []


class Header(_Model):
    """The place where a probe ran.

    Attributes:
        hosts: this host, and the far end's if it is another one, hashed with this report's salt.
        link: kind of link between the devices by HCCL's rule: HCCS, RoCE, or free if softnpu is not strict.
        functions: number of declared functions that were found; ``missing`` names the others.
        environment: variables HCCL_*, ASCEND_* and SOFTNPU_*, with hashed addresses.
    """

    aiodatadist: str
    runtime: str
    acl: str
    cann: str
    driver: str
    chip: str
    device: int
    link: str
    functions: str
    missing: list[str]
    hosts: list[str]
    environment: dict[str, str]


class Report(_Model):
    """The whole report."""

    version: Literal[1] = 1
    header: Header
    steps: list[StepReport]
