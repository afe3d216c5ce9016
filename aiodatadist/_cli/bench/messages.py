"""Messages of the two ends, as notifications: the initiator asks, the owner answers each question once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from aiodatadist._cli.bench.workload import Case


class _Message(BaseModel):
    # model_id: pydantic before 2.10 keeps names that begin with model_ for itself, and warns.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def payload(self) -> bytes:
        return self.model_dump_json().encode()


class Open(_Message):
    """Have a cache for this case, filled, under a model id that no other one has, for as long as the link."""

    kind: Literal["open"] = "open"
    model_id: int
    case: Case


class Clear(_Message):
    """Fill the cache with zeros."""

    kind: Literal["clear"] = "clear"


class Check(_Message):
    """Do the targets hold what the initiator's sources held?"""

    kind: Literal["check"] = "check"


class Spent(_Message):
    """A question: how much processor time has the owner needed until now?"""

    kind: Literal["spent"] = "spent"


class Done(_Message):
    """The answer to a question that could be done.

    Attributes:
        cpu_seconds: of the owner's process, all threads, since it began.
        wrong: blocks that do not hold what they should, some of them by name.
    """

    kind: Literal["done"] = "done"
    cpu_seconds: float = 0.0
    wrong: list[str] = []


class Refused(_Message):
    """The answer to a question that could not be done, with the reason."""

    kind: Literal["refused"] = "refused"
    message: str


Question = Open | Clear | Check | Spent
Answer = Done | Refused
QUESTION: TypeAdapter[Question] = TypeAdapter(Annotated[Question, Field(discriminator="kind")])
ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])
