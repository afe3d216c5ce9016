"""The control messages. Strict: an unknown field or a wrong type is an error, never a guess.

What a newer minor version may add, and what an older one makes of it, is in ``docs/architecture.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, TypeAdapter, model_validator

PROTOCOL = 4
"""The major version: raised when a message changes its meaning. Both ends have to have the same."""
MINOR = 2
"""Raised when a message or a field is added that an older end may do without. Ends of all minors talk.

1: checksums (``Pull.checksum``, ``Pulled.checksums``, ``Digest``, ``Digests``), priorities (``Pull.priority``), an owner's
limit of a pull (``Claimed.seconds``), and numbers by which a message is noticed that is lost, comes twice or late (of
``Note``, ``Taken``, ``Revoke``, ``Watch``, ``Landed``).
2: digests that the owner of kept blocks compares (``blocks_digest`` and ``prompt_digest`` of ``Claim``, ``Unclaim``), why
it refuses a claim (``Claimed.why``), and several requests or answers in one message (``Pull.also``, ``Pulled.also``).
"""

DIGESTS_SINCE = 2
"""The minor version that compares which blocks are kept, and of which prompt."""

TOGETHER_SINCE = 2
"""The minor version that reads several requests, and several answers, in one message."""
MAX_TOGETHER = 8
"""Requests, or answers, in one message. Eight requests of 256 KiB each hold the loop of their receiver for 0.5 ms. Twice as
many would spare it a few hundredths of what they cost."""

MAX_TENSORS = 4096
MAX_INDEXES = 16384
"""Blocks that one request names; a caller that wants more makes several."""
MAX_TAKERS = 4096
"""Peers that share kept blocks."""
MAX_NOTE = 64 << 10
"""Bytes of a notification."""

UInt32 = Annotated[int, Field(ge=0, lt=2**32)]
UInt63 = Annotated[int, Field(ge=0, lt=2**63)]
UInt64 = Annotated[int, Field(ge=0, lt=2**64)]
CacheId = Annotated[int, Field(ge=1, lt=2**63)]
CallId = Annotated[int, Field(ge=1, lt=2**63)]
"""Chosen by the end that asks; its answer has it, too."""
Text = Annotated[str, Field(max_length=512, pattern=r"^[\x20-\x7e]*$")]
"""Printable ASCII: it may end up in a log."""
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MAX_SECONDS = 864_000.0
"""The longest duration that is told to a peer."""
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
LeaseName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Digest16 = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
"""Sixteen bytes in hexadecimal, as ``values.digests`` makes them; empty: none."""
ChannelName = Annotated[str, Field(min_length=1, max_length=127, pattern=r"^[\x21-\x7e]+$")]
Status = Annotated[int, Field(ge=-1, lt=2**32)]
MAX_REASON = 2048
"""Characters in which a peer says why: ``reasons.reason_of`` writes them."""
Reason = Annotated[str, Field(max_length=MAX_REASON, pattern=r"^[\x20-\x7e]*$")]
LayerRange = Annotated[tuple[UInt32, UInt32], Strict(False)] | None
"""Half-open. A list in JSON, which is why the tuple, and nothing in it, is read leniently."""
Indexes = Annotated[list[UInt64], Field(max_length=MAX_INDEXES), FailFast()]
Checksums = Annotated[list[UInt32], Field(max_length=MAX_INDEXES), FailFast()]
"""CRC-32C of each block, over all its tensors in their order."""


class _Message(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )  # model_id is one of the fields

    since: ClassVar[int] = 0
    """The minor version that such messages came with."""


@dataclass(frozen=True, slots=True)
class Since:
    """The minor version that a field of a message came with, if that is not the message's. It has a default, and is not said
    to a peer of an older one."""

    minor: int


class EndpointInfo(_Message):
    """``transport.Endpoint`` on the wire. What a newer minor version adds stands behind the rest, and is kept for the
    proof."""

    model_config = ConfigDict(extra="allow")

    transport: Text
    runtime: Text
    host: Text
    server_id: Text
    device_id: Text
    device_ip: Text
    process: UInt32
    super_device_id: Text = ""
    super_pod_id: Text = ""
    device_port: Text = ""
    host_ip: Text = ""
    backup_device_ip: Text = ""


class Hello(_Message):
    """First from both ends. ``instance`` is new for every start of a cluster; ``nonce`` is fresh for every link.

    ``minor`` of the protocol comes with this message, so of whatever version its sender is, its fields are read, and those
    that a newer one adds, behind the rest, are kept for the proof.
    """

    model_config = ConfigDict(extra="allow")

    type: Literal["hello"] = "hello"
    protocol: UInt32 = PROTOCOL
    cluster_id: UInt64
    role: Literal[1, 2, 3]
    instance: Hex
    nonce: Hex
    one_sided: bool
    has_key: bool
    backend: Text = ""
    """``"hixl"``: a link belongs to its initiator; else to both ends."""
    heartbeat: Annotated[float, Field(gt=0, le=600)]
    """Seconds between two heartbeats of the sender's."""
    links: UInt63 = 0
    """How many links with the receiver this instance of the sender has had: one of them that the receiver still has is out of
    date, unless it was made since."""
    endpoint: EndpointInfo
    minor: UInt32 = 0


class Proof(_Message):
    """That its sender has the key: see ``auth``."""

    type: Literal["proof"] = "proof"
    mac: Hex


class Connect(_Message):
    """From the client: open a channel of this name now; it will wait this many seconds."""

    type: Literal["connect"] = "connect"
    channel: ChannelName
    timeout: Seconds


class Accept(_Message):
    """From the server: it opens the channel now."""

    type: Literal["accept"] = "accept"


class KeyName(_Message):
    """What the receiver's cache is called: a blocks cache's model, a request's or a prefix's slot, a cache id, or an address
    in one of its tensors, which the receiver looks up and does not follow."""

    kind: Literal["blocks", "request", "prefix", "id", "address"]
    id: UInt64
    model_id: UInt64


class CacheEntry(_Message):
    """One cache of the sender, as its peer may reach it.

    ``addresses`` are the sender's; the receiver only hands them back to the transport, which checks them against the
    regions that the sender registered for this link.
    """

    cache_id: CacheId
    blocks: bool
    placement: Literal[0, 1]
    data_type: UInt32
    pieces: Annotated[int, Field(ge=1, lt=2**63)]
    """Batch slots, or blocks, per tensor."""
    stride: Annotated[int, Field(ge=1, lt=2**63)]
    """Bytes of each."""
    addresses: Annotated[list[UInt64], Field(min_length=1, max_length=MAX_TENSORS), FailFast()]
    epoch: UInt32
    """A channel has to be at least this young at the sender's end to reach it."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        """So that code which computes with a peer's geometry need not think of overflow."""
        nbytes = self.pieces * self.stride
        if nbytes >= 2**63 or max(self.addresses) + nbytes > 2**64:
            raise ValueError(f"{self.pieces} pieces of {self.stride} bytes leave the address space")
        return self


class Ready(_Message):
    """The sender's half of the channel is open; it reaches what the sender had registered up to ``epoch``.

    ``heartbeat_token``: from the server: what a second connection of the client's has to say to carry this link's
    heartbeats. The client says ready when heartbeats come on it.
    """

    type: Literal["ready"] = "ready"
    epoch: UInt32
    heartbeat_token: Hex


class AttachHeartbeats(_Message):
    """The first and only message of a connection that carries heartbeats, one byte each, from then on.

    The receiver reads it, and not a byte more, before it decides who reads the rest.
    """

    type: Literal["attach_heartbeats"] = "attach_heartbeats"
    token: Hex


class Refuse(_Message):
    """No. The link ends here. ``kind``: the keys differ, or the two ends do not fit together: asking again is of no use."""

    type: Literal["refuse"] = "refuse"
    status: Status
    reason: Reason
    kind: Annotated[Literal["", "key", "unfit"], Since(1)] = ""


class Disconnect(_Message):
    """The sender uses the link no more; the receiver ends its transfers on it, answers ``bye`` and closes."""

    type: Literal["disconnect"] = "disconnect"
    reason: Text


class Bye(_Message):
    """The sender has no transfer on the link and will start none."""

    type: Literal["bye"] = "bye"


# ---- on a ready link ----


class Lookup(_Message):
    """Which of your caches is called this? The receiver answers ``found``."""

    type: Literal["lookup"] = "lookup"
    call: CallId
    name: KeyName


class Found(_Message):
    """The cache, and the batch slot that the name stands for; None: there is none. From now on the receiver holds it."""

    type: Literal["found"] = "found"
    call: CallId
    cache: CacheEntry | None
    slot: UInt32 = 0


class Grant(_Message):
    """Here is a cache of mine that a request of mine is about to name. The receiver holds it."""

    type: Literal["grant"] = "grant"
    cache: CacheEntry


class Revoke(_Message):
    """Forget this cache of mine: let transfers of yours end, after ``seconds`` stop them, then say ``revoked``. It is said
    again, under its number, where no answer comes."""

    type: Literal["revoke"] = "revoke"
    cache_id: CacheId
    seconds: Seconds
    number: Annotated[UInt63, Since(1)] = 0


class Revoked(_Message):
    """The sender holds this cache no more, and no transfer of its touches it."""

    type: Literal["revoked"] = "revoked"
    cache_id: CacheId
    number: Annotated[UInt63, Since(1)] = 0
    """Of the ``revoke``; 0: of the one that there is."""


OtherPull = Annotated[tuple[CallId, Indexes, Indexes], Strict(False)]
"""``call``, ``src_blocks`` and ``dst_blocks``. A list in JSON, as a layer range."""
OtherPulled = Annotated[
    tuple[CallId, UInt64, UInt64, Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]], Strict(False)
]
"""``call``, ``nbytes``, ``ranges``, ``queue_seconds`` and ``transfer_seconds``."""


class PartNumbers(BaseModel):
    """Part ``src[i]``, numbered through ``src_blocks``, goes to part ``dst[i]`` of ``dst_blocks``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    nbytes: Annotated[int, Field(ge=1, lt=2**63)]
    src: Indexes
    dst: Indexes


class Pull(_Message):
    """Write the source that ``name`` stands for into a cache of mine that you hold; the receiver answers ``pulled``.

    ``slot``: the source's batch slot where the name is an id. ``layers``: half-open, or None for all. With ``dst_blocks``
    the destination is blocks, else batch slot ``dst_slot``, ``nbytes`` of it, which begin at ``offsets`` in the source's slot
    and in the destination's; with offsets no key is consumed.
    """

    type: Literal["pull"] = "pull"
    call: CallId
    name: KeyName
    slot: UInt32
    target: CacheId
    src_layers: LayerRange
    dst_layers: LayerRange
    tensors_per_layer: Annotated[int, Field(ge=1, lt=2**32)]
    src_blocks: Indexes
    dst_blocks: Indexes
    dst_slot: UInt32
    nbytes: Annotated[int, Field(ge=0, lt=2**63)]
    offsets: Annotated[tuple[UInt63, UInt63], Strict(False)] | None = None
    parts: PartNumbers | None = None
    seconds: Seconds
    checksum: Annotated[bool, Since(1)] = False
    """The answer shall have checksums of what was read."""
    priority: Annotated[Literal[0, 1, 2], Since(1)] = 1
    """``TransferPriority``: NORMAL at a peer that knows of none."""
    also: Annotated[list[OtherPull], Field(max_length=MAX_TOGETHER - 1), FailFast(), Since(TOGETHER_SINCE)] = Field(
        default_factory=list
    )
    """Further requests, which differ from this one in these alone. Each is served and answered as if it came by itself. All
    together name no more blocks, with their parts, than one may name blocks."""

    @property
    def is_whole_blocks(self) -> bool:
        """Blocks of all tensors go to as many."""
        is_all = self.parts is None and self.src_layers is None and self.dst_layers is None
        return is_all and not self.dst_slot and len(self.src_blocks) > 0

    def count_blocks(self) -> int:
        """Return how many numbers of blocks, and of their parts, the requests of this message have, at both ends."""
        lists = (self.src_blocks, self.dst_blocks, *(blocks for _, *both in self.also for blocks in both))
        parts = 0 if self.parts is None else len(self.parts.src) + len(self.parts.dst)
        return sum(map(len, lists)) + parts * (1 + len(self.also))

    def each(self) -> Iterator[Pull]:
        """Yield the requests of this message, one by one."""
        if not self.also:
            yield self
            return
        yield self.model_copy(update={"also": []})
        for call, src, dst in self.also:
            yield self.model_copy(update={"call": call, "src_blocks": src, "dst_blocks": dst, "also": []})


class Stop(_Message):
    """Give up a call of mine. The receiver answers it all the same, once nothing can be written any more; it answers again
    where it did before, and does not begin where the call comes after this."""

    type: Literal["stop"] = "stop"
    call: CallId


class Pulled(_Message):
    """How a pull ended. Whatever the status, the sender writes no more. ``stopped``: because it was told to, or the pull
    never came. ``is_unknown``: it was not told of the destination, or does not hold it any more; nothing was written."""

    type: Literal["pulled"] = "pulled"
    call: CallId
    stopped: bool = False
    is_unknown: bool = False
    status: Status
    reason: Reason
    nbytes: UInt64 = 0
    ranges: UInt64 = 0
    queue_seconds: Annotated[float, Field(ge=0)] = 0.0
    transfer_seconds: Annotated[float, Field(ge=0)] = 0.0
    checksums: Annotated[Checksums, Since(1)] = Field(default_factory=list)
    """Of the source's blocks, parts or slot, in the order of the request; empty if that did not ask for them."""
    also: Annotated[list[OtherPulled], Field(max_length=MAX_TOGETHER - 1), FailFast(), Since(TOGETHER_SINCE)] = Field(
        default_factory=list
    )
    """How further pulls ended: as this one, but for these."""

    def each(self) -> Iterator[Pulled]:
        """Yield the answers of this message, one by one."""
        if not self.also:
            yield self
            return
        yield self.model_copy(update={"also": []})
        for call, nbytes, ranges, queued, seconds in self.also:
            figures = {"nbytes": nbytes, "ranges": ranges, "queue_seconds": queued, "transfer_seconds": seconds}
            yield self.model_copy(update={"call": call, "also": [], **figures})


class Digest(_Message):
    """What are the checksums of these pieces of a cache of yours that I hold? The receiver answers ``digests``.

    Piece ``i`` is ``nbytes`` long, the last one ``tail``, and begins ``offset + indexes[i] * step`` bytes behind the start of
    each of ``tensors`` tensors, from ``first_tensor`` on. The receiver adds that up, and sees to it that it is in the cache.
    """

    since = 1
    type: Literal["digest"] = "digest"
    call: CallId
    cache_id: CacheId
    first_tensor: UInt32
    tensors: Annotated[int, Field(ge=1, le=MAX_TENSORS)]
    offset: UInt63
    step: Annotated[int, Field(ge=1, lt=2**63)]
    nbytes: Annotated[int, Field(ge=1, lt=2**63)]
    tail: Annotated[int, Field(ge=1, lt=2**63)]
    indexes: Annotated[list[UInt64], Field(min_length=1, max_length=MAX_INDEXES), FailFast()]
    seconds: Seconds


class Digests(_Message):
    """The answer: as many as there are pieces; or why not, and none."""

    since = 1
    type: Literal["digests"] = "digests"
    call: CallId
    status: Status
    reason: Reason = ""
    checksums: Checksums = Field(default_factory=list)


class Claim(_Message):
    """The sender begins to pull blocks that the receiver keeps under this name, which takes it so long at most. The receiver
    answers ``claimed``; if it does not know the name it waits for ``patience`` seconds first. ``takers`` peers share the
    blocks, and all say so.

    ``blocks_digest`` is of all blocks of the lease as the sender was told them, however few of them it reads, and
    ``prompt_digest`` of its own prompt. The receiver compares them with the lease's."""

    type: Literal["claim"] = "claim"
    call: CallId
    lease: LeaseName
    seconds: Seconds
    patience: Annotated[float, Field(ge=0, le=MAX_SECONDS)]
    takers: Annotated[int, Field(ge=1, le=MAX_TAKERS)] = 1
    blocks_digest: Annotated[Digest16, Since(DIGESTS_SINCE)] = ""
    prompt_digest: Annotated[Digest16, Since(DIGESTS_SINCE)] = ""


class Claimed(_Message):
    """Whether the blocks are kept for the receiver, until it says ``unclaim``; for ``seconds`` at most, or, where that is 0,
    for as long as it asked. ``why``: the reason if they are not, and the claim itself was wrong."""

    type: Literal["claimed"] = "claimed"
    call: CallId
    kept: bool
    seconds: Annotated[float, Field(ge=0, le=MAX_SECONDS), Since(1)] = 0.0
    why: Annotated[Text, Since(DIGESTS_SINCE)] = ""


class Unclaim(_Message):
    """The sender's pull ended; ``call``: its claim, or 0 where it never pulled. After a failure it may try again. The digests
    are those of ``claim``: a lease ends only for who knows its blocks and its prompt."""

    type: Literal["unclaim"] = "unclaim"
    call: Annotated[int, Field(ge=0, lt=2**63)]
    lease: LeaseName
    end: Literal["taken", "released", "failed"]
    blocks_digest: Annotated[Digest16, Since(DIGESTS_SINCE)] = ""
    prompt_digest: Annotated[Digest16, Since(DIGESTS_SINCE)] = ""


class Note(_Message):
    """A notification; everything that was pushed before it is in place. ``payload`` is base64. ``number``: from 1; 0: the
    next one. It is said again under its number where the receiver may not have heard it; one that was heard is answered."""

    type: Literal["note"] = "note"
    payload: Annotated[str, Field(max_length=(MAX_NOTE + 2) // 3 * 4, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]
    number: Annotated[UInt63, Since(1)] = 0


class Taken(_Message):
    """The sender's user took one more notification of the receiver's; to an end of the same version it says how many by now,
    and how many the sender has heard, without a gap."""

    type: Literal["taken"] = "taken"
    count: Annotated[UInt63, Since(1)] = 0
    heard: Annotated[UInt63, Since(1)] = 0


class Watch(_Message):
    """Tell me from now on, or no more, which layers of yours have landed in this cache of mine. With a ``call`` the receiver
    answers ``pong``; the second time it tells again what it told since the first."""

    type: Literal["watch"] = "watch"
    cache_id: CacheId
    on: bool
    call: Annotated[UInt63, Since(1)] = 0


class Landed(_Message):
    """Layers ``first`` to ``stop`` of a cache of the receiver's hold what the sender's transfer put there. With a reason the
    transfer failed, and no more come. ``watch``: the call of the ``watch`` that it answers."""

    type: Literal["landed"] = "landed"
    cache_id: CacheId
    first: UInt32
    stop: UInt32
    status: Status = 0
    reason: Reason = ""
    watch: Annotated[UInt63, Since(1)] = 0


class Ping(_Message):
    """Say ``pong``."""

    type: Literal["ping"] = "ping"
    call: CallId


class Pong(_Message):
    type: Literal["pong"] = "pong"
    call: CallId


class Own(_Message):
    """The link belongs to the sender, too, from now on, or no more. A link that belongs to neither end is not used."""

    type: Literal["own"] = "own"
    call: CallId
    on: bool


class Owned(_Message):
    """The answer: whether the link belongs to the sender of this."""

    type: Literal["owned"] = "owned"
    call: CallId
    on: bool


class Renew(_Message):
    """From the client: open one more channel, which reaches what was registered meanwhile."""

    type: Literal["renew"] = "renew"
    channel: ChannelName
    seconds: Seconds


class Renewed(_Message):
    """The sender's half of a further channel is open, up to ``epoch``; or, with a ``reason``, it could not be opened."""

    type: Literal["renewed"] = "renewed"
    channel: ChannelName
    epoch: UInt32
    reason: Reason = ""


class Retire(_Message):
    """The sender has no transfer on this channel and will start none."""

    type: Literal["retire"] = "retire"
    channel: ChannelName


class Broken(_Message):
    """A transfer of the sender's was stopped half-way on this channel: neither end starts another one there, and both close
    it when those under way are over."""

    type: Literal["broken"] = "broken"
    channel: ChannelName


class Outdated(_Message):
    """From the server: renew the channel, it has to reach these epochs of mine and of yours; say ``pong`` when you tried."""

    type: Literal["outdated"] = "outdated"
    call: CallId
    mine: UInt32
    yours: UInt32


class Unsupported(_Message):
    """The sender does not know messages of this kind, which are of a newer minor version than its own: it did nothing, and
    the link goes on. ``call``: of the message, or 0 if it has none."""

    type: Literal["unsupported"] = "unsupported"
    kind: Annotated[str, Field(max_length=32, pattern=r"^[\x20-\x7e]*$")]
    call: Annotated[int, Field(ge=0, lt=2**63)] = 0


Message = (
    Hello | Proof | Connect | Accept | Ready | Refuse | Disconnect | Bye | AttachHeartbeats
    | Lookup | Found | Grant | Revoke | Revoked | Pull | Stop | Pulled | Note | Taken | Ping | Pong
    | Renew | Renewed | Retire | Broken | Outdated | Watch | Landed | Own | Owned
    | Claim | Claimed | Unclaim | Unsupported | Digest | Digests
)  # fmt: skip
parser: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def _newer_fields(kind: type[_Message]) -> dict[str, int]:
    """The minor versions that fields of these messages came with, where it was not the first."""
    fields = kind.model_fields.items()
    return {name: mark.minor for name, field in fields for mark in field.metadata if isinstance(mark, Since)}


NEWER_FIELDS: dict[type, dict[str, int]] = {kind: _newer_fields(kind) for kind in get_args(Message)}
"""Of each kind of message. Only a message's own fields, none of what it contains."""
