"""The control messages. Strict: an unknown field or a wrong type is an error, never a guess."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

PROTOCOL = 1
"""Raised when a message changes its meaning; both ends have to have the same."""

MAX_TENSORS = 4096
MAX_KEYS = 4096
MAX_CACHES = 16384

UInt32 = Annotated[int, Field(ge=0, lt=2**32)]
UInt64 = Annotated[int, Field(ge=0, lt=2**64)]
Int64 = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(max_length=512, pattern=r"^[\x20-\x7e]*$")]
"""Printable ASCII: it may end up in a log."""
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EndpointInfo(_Message):
    """``transport.Endpoint`` on the wire."""

    transport: Text
    runtime: Text
    host: Text
    server_id: Text
    device_id: Text
    device_ip: Text
    process: UInt32
    super_device_id: Text = ""
    super_pod_id: Text = ""


class Hello(_Message):
    """First from both ends. ``instance`` is new for every start of a cluster; ``nonce`` is fresh for every link."""

    type: Literal["hello"] = "hello"
    protocol: UInt32 = PROTOCOL
    cluster_id: UInt64
    role: Literal[1, 2, 3]
    instance: Hex
    nonce: Hex
    one_sided: bool
    has_key: bool
    endpoint: EndpointInfo


class Proof(_Message):
    """That its sender has the key: see ``auth``."""

    type: Literal["proof"] = "proof"
    mac: Hex


class Connect(_Message):
    """From the client: open a channel of this name now; it will wait this many seconds."""

    type: Literal["connect"] = "connect"
    channel: Annotated[str, Field(min_length=1, max_length=127, pattern=r"^[\x21-\x7e]+$")]
    timeout: Annotated[float, Field(gt=0, le=86400)]


class Accept(_Message):
    """From the server: it opens the channel now."""

    type: Literal["accept"] = "accept"


class SlotKey(_Message):
    """A key bound to a batch slot: a request's, or a prefix's."""

    kind: Literal["request", "prefix"]
    id: UInt64
    model_id: UInt64
    batch_index: UInt32


class CacheEntry(_Message):
    """One cache of the sender, as its peer may name it.

    ``addresses`` are the sender's; the receiver only hands them back to the transport, which checks them against the
    regions that the sender registered for this link.
    """

    cache_id: Int64
    blocks: bool
    placement: Literal[0, 1]
    data_type: UInt32
    pieces: Annotated[int, Field(ge=1, lt=2**63)]
    """Batch slots, or blocks, per tensor."""
    stride: Annotated[int, Field(ge=1, lt=2**63)]
    """Bytes of each."""
    addresses: Annotated[list[UInt64], Field(min_length=1, max_length=MAX_TENSORS)]
    model_id: UInt64 | None = None
    """A blocks cache's key."""
    keys: Annotated[list[SlotKey], Field(max_length=MAX_KEYS)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        """So that nobody who computes with a peer's geometry has to think of overflow, or of slots that are not there."""
        nbytes = self.pieces * self.stride
        if nbytes >= 2**63 or max(self.addresses) + nbytes > 2**64:
            raise ValueError(f"{self.pieces} pieces of {self.stride} bytes leave the address space")
        for key in self.keys:
            if key.batch_index >= self.pieces:
                raise ValueError(f"a key for slot {key.batch_index}: the cache has {self.pieces}")
        return self


class Ready(_Message):
    """The sender's half of the channel is open; these caches can be reached through it."""

    type: Literal["ready"] = "ready"
    caches: Annotated[list[CacheEntry], Field(max_length=MAX_CACHES)]


class Refuse(_Message):
    """No. The link ends here."""

    type: Literal["refuse"] = "refuse"
    status: Annotated[int, Field(ge=-1, lt=2**32)]
    reason: Annotated[str, Field(max_length=2048, pattern=r"^[\x20-\x7e]*$")]


class Disconnect(_Message):
    """The sender uses the link no more; the receiver ends its transfers on it, answers ``bye`` and closes."""

    type: Literal["disconnect"] = "disconnect"
    reason: Text


class Bye(_Message):
    """The sender has no transfer on the link and will start none."""

    type: Literal["bye"] = "bye"


Message = Hello | Proof | Connect | Accept | Ready | Refuse | Disconnect | Bye
parser: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])
