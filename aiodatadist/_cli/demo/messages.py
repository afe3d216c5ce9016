"""Messages of the demo's processes: one JSON object per line, on the workers' stdin and stdout.

The parent plays the role of the router in a serving cluster: it passes the prompt to prefill, and prefill's description
of its blocks to decode. No byte of the KV cache passes through it.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from aiodatadist._cli.kit.pipes import Message
from aiodatadist._cli.kit.place import Place

Bytes = Annotated[str, Field(pattern=r"^[\x00-\xff]*$")]
"""Bytes as a string, one character each (latin-1)."""

Phase = Literal["prefill", "reference", "pull", "decode"]

MAX_TOKENS = 1024
MAX_PROMPT = 4096
"""The largest number of tokens to write, and of bytes to read. Another machine may send a job, too."""
TransportChoice = Literal["auto", "hccl", "tcp"]


class Job(Message):
    """The job, from the parent to both workers, once. If decode is on another machine, prefill sends it the job."""

    kind: Literal["job"] = "job"
    prompt: Annotated[Bytes, Field(min_length=1, max_length=MAX_PROMPT)]
    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    port: int = 0
    layered: bool = False
    v1: bool = False
    transport: TransportChoice = "auto"
    prefill_at: Place = Place()
    decode_at: Place = Place(device=1)


class LayerTimes(Message):
    """The times of one layer of a layered transfer, in seconds of the clock that all processes of this machine share."""

    layer: int
    began: float
    ready: float
    landed: float


class Receiving(Message):
    """A message from decode to prefill, through the parent: decode's address, and its blocks for the prompt."""

    kind: Literal["receiving"] = "receiving"
    port: int
    blocks: list[int]


class Prefilled(Message):
    """A message from prefill to decode, through the parent: the prompt's KV cache is complete and may be pulled."""

    kind: Literal["prefilled"] = "prefilled"
    port: int
    blocks: list[int]
    digest: str
    first_token: int
    seconds: float
    layers: list[LayerTimes] = Field(default_factory=list)
    bytes: int = 0
    ranges: int = 0
    transfer_seconds: float = 0.0


class Progress(Message):
    """A report from a worker to the parent: the progress of a phase, whose steps have any size."""

    kind: Literal["progress"] = "progress"
    phase: Phase
    done: int
    total: int


class Pull(Message):
    """The seconds of one ``pull_blocks``, and of a plain copy of the same ranges right after it."""

    blocks: int
    ranges: int
    bytes: int
    seconds: float
    memcpy_seconds: float


class Finished(Message):
    """The report from decode to the parent with everything that is shown."""

    kind: Literal["finished"] = "finished"
    text: Bytes
    reference: Bytes
    kv_equal: bool
    pulls: list[Pull]
    warm: list[Pull] = Field(default_factory=list)
    runtime: str
    layers: list[LayerTimes] = Field(default_factory=list)


class FarJob(Message):
    """The job of a worker whose other half is on another machine, from its parent.

    Attributes:
        listen: the address on which prefill waits for decode; empty for decode.
        peer: where prefill listens; None for prefill.
        key_file: the file with the secret of both ends; empty if ``AIODATADIST_TRUST`` names their keys.
        job: the job, which prefill knows and decode is told by prefill.
    """

    kind: Literal["far"] = "far"
    listen: str = ""
    peer: tuple[str, int] | None = None
    key_file: str = ""
    transport: TransportChoice = "auto"
    place: Place = Place()
    job: Job | None = None


class Met(Message):
    """A report from a worker to its parent, for the screen: where it waits for the other machine, or how it has met it."""

    kind: Literal["met"] = "met"
    words: str


class Failed(Message):
    """The last report from a worker to the parent: the reason why it cannot continue."""

    kind: Literal["failed"] = "failed"
    message: str
    exit_code: int = 1


Order: TypeAlias = Job | Prefilled | Receiving | FarJob
Report: TypeAlias = Prefilled | Receiving | Progress | Finished | Failed | Met
Word: TypeAlias = Job | Prefilled | Receiving | Finished | Failed
"""The messages of the two halves to each other, through their parent, or from one machine to the other."""

ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])
WORD: TypeAdapter[Word] = TypeAdapter(Annotated[Word, Field(discriminator="kind")])
REPORT: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


# ---- the context cache's demo ----


class ContextJob(Message):
    """The job, from the parent to a worker, once."""

    url: str
    prompt: Bytes
    tokens: int
    seed: int
    device: int = 0


class ContextRun(Message):
    """The report from a worker to the parent, as JSON on its stdout: the result of one run.

    Times are seconds, counts are tokens of the prompt.

    Attributes:
        not_saved: number of blocks that were not saved, and the reason; empty if all were.
        error, exit_code: why the run failed, and the exit code of the command. All other fields are then meaningless.
    """

    text: Bytes = ""
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    computed_tokens: int = 0
    compute_seconds: float = 0.0
    saved_tokens: int = 0
    not_saved: str = ""
    saved_bytes: int = 0
    save_seconds: float = 0.0
    error: str = ""
    exit_code: int = 1
