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
    """A request for a filled cache for this case, under a unique model id, which lasts as long as the link."""

    kind: Literal["open"] = "open"
    model_id: int
    case: Case


class Clear(_Message):
    """A request to fill the cache with zeros."""

    kind: Literal["clear"] = "clear"


class Check(_Message):
    """A question: do the targets have the contents of the initiator's sources?"""

    kind: Literal["check"] = "check"


class Spent(_Message):
    """A question: how much CPU time has the owner used so far?"""

    kind: Literal["spent"] = "spent"


class Done(_Message):
    """The answer to a request that was carried out.

    Attributes:
        cpu_seconds: CPU time of the owner's process since its start, all threads.
        wrong: blocks with wrong contents, some of them by name.
    """

    kind: Literal["done"] = "done"
    cpu_seconds: float = 0.0
    wrong: list[str] = []


class Refused(_Message):
    """The answer to a request that could not be carried out, with the reason."""

    kind: Literal["refused"] = "refused"
    message: str


Question = Open | Clear | Check | Spent
Answer = Done | Refused
QUESTION: TypeAdapter[Question] = TypeAdapter(Annotated[Question, Field(discriminator="kind")])
ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])
