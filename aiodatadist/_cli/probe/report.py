"""The report of a probe: its JSON is :class:`Report`. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Verdict = Literal["as expected", "differs", "skipped"]
Ending = Literal["finished", "killed at the limit", "crashed", "not run"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Call(_Model):
    """A call of the vendor's, or many equal ones.

    Attributes:
        function: the vendor's name.
        end: who called: the end that does the work, or the far end.
        arguments: numbers and sizes; pointers, names and tables are only named as such.
        code: what it returned; None: it did not return, or returns no code.
        words: ``aclGetRecentErrMsg`` after a code that is not 0.
        microseconds: that it took; None: it did not return.
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
        verdict: whether that is what the column ``expected`` says.
        found: what was found, in words.
        because: why it was skipped.
        holds: whether it is what the prediction says of this kind of link: one that is about RoCE alone says of HCCS that
            all is well there. None: the step did not tell.
        facts: for the header, of step 1.
    """

    verdict: Verdict
    found: str = ""
    because: str = ""
    holds: bool | None = None
    facts: dict[str, str] = {}


class StepReport(_Model):
    """The report of one step.

    Attributes:
        step: its number; a letter follows where a step has two children.
        decides: the prediction (B1 to B20 in docs/npu.md) that it decides; empty: none.
        ending: how its child process ended, and ``status`` with which exit code, or by which signal if negative.
        said: the last words of the child on stderr where it did not finish.
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
        hosts: this host, and the far end's if it is another one: hashed, with a salt of this report's.
        link: over what the two devices are linked by HCCL's rule: HCCS, RoCE, or free where softnpu is not strict.
        functions: found of those declared; ``missing`` names the others.
        environment: variables HCCL_*, ASCEND_* and of softnpu; addresses in them are hashed.
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
    """The whole."""

    version: Literal[1] = 1
    header: Header
    steps: list[StepReport]
