"""The control messages. Strict: an unknown field or a wrong type is an error, never a guess.

``docs/architecture.md`` says what a newer minor version may add, and what an older one makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, TypeAdapter, model_validator

from aiodatadist._config.trust import MAX_KEYS
from aiodatadist._values.lease_ticket import MAX_TAKERS
from aiodatadist._values.peer_budget import MAX_STREAMS

PROTOCOL = 5
"""The major version, raised when a message changes its meaning. Both ends must have the same.

Version 5 proves both ends first, and seals everything that follows: see ``key_proof`` and ``seals``.
"""
PLAIN_PROTOCOL = 4
"""The major version that two ends without a key speak. Its messages are those of ``PROTOCOL``, without proof and seals."""
MINOR = 2
"""The minor version, raised for each new message or field that an older end can do without. Ends of all minors can talk.

1: checksums (``Pull.checksum``, ``Pulled.checksums``, ``Digest``, ``Digests``), priorities (``Pull.priority``), an
owner's limit of a pull (``Claimed.seconds``), and numbers that reveal a message that is lost, repeated or late (in
``Note``, ``Taken``, ``Revoke``, ``Watch``, ``Landed``).
2: digests that the owner of kept blocks compares (``blocks_digest`` and ``prompt_digest`` in ``Claim``, ``Unclaim``),
the reason why it refuses a claim (``Claimed.why``), several requests or answers in one message (``Pull.also``,
``Pulled.also``), the size of the layers that landed (``Landed.tensors``), and what a peer may do with a cache
(``Found.access``, ``Grant.access``).
"""

SEALED_MINOR = 2
"""The first minor version whose messages can be sealed. Until it knows the peer's, an end with a key refuses in this one."""
DIGESTS_SINCE = 2
"""The minor version that compares kept blocks and their prompt."""

ACCESS_SINCE = 2
"""The minor version that says if a cache may be read (1), written (2), or both."""

TOGETHER_SINCE = 2
"""The minor version that reads several requests, and several answers, in one message."""
MAX_TOGETHER = 8
"""Requests, or answers, in one message.

Eight requests of 256 KiB each hold the loop of their receiver for 0.5 ms. Twice that number would save only a few
hundredths of their cost.
"""

MAX_TENSORS = 4096
"""Tensors of one cache."""
MAX_INDEXES = 16384
"""Blocks that one request names; a caller that wants more makes several."""
MAX_NOTE = 64 << 10
"""The largest notification, in bytes."""

UInt32 = Annotated[int, Field(ge=0, lt=2**32)]
UInt63 = Annotated[int, Field(ge=0, lt=2**63)]
UInt64 = Annotated[int, Field(ge=0, lt=2**64)]
CacheId = Annotated[int, Field(ge=1, lt=2**63)]
CallId = Annotated[int, Field(ge=1, lt=2**63)]
"""A number chosen by the end that asks; the answer has it, too."""
Text = Annotated[str, Field(max_length=512, pattern=r"^[\x20-\x7e]*$")]
"""Printable ASCII, because it may end up in a log."""
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MAX_SECONDS = 864_000.0
"""The longest duration in a message."""
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
LeaseName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Digest16 = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
"""Sixteen bytes in hexadecimal, as ``values.digests`` makes them; empty if there is none."""
ChannelName = Annotated[str, Field(min_length=1, max_length=127, pattern=r"^[\x21-\x7e]+$")]
Status = Annotated[int, Field(ge=-1, lt=2**32)]
MAX_REASON = 2048
"""The longest reason of a peer's, in characters, as ``reasons.reason_of`` writes it."""
Reason = Annotated[str, Field(max_length=MAX_REASON, pattern=r"^[\x20-\x7e]*$")]
LayerRange = Annotated[tuple[UInt32, UInt32], Strict(False)] | None
"""A half-open range. It is a list in JSON, so the tuple, and nothing in it, is read leniently."""
Indexes = Annotated[list[UInt64], Field(max_length=MAX_INDEXES), FailFast()]
Checksums = Annotated[list[UInt32], Field(max_length=MAX_INDEXES), FailFast()]
"""The CRC-32C of each block, over all its tensors in their order."""


class _Message(BaseModel):
    # no protected namespaces, because model_id is one of the fields
    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    since: ClassVar[int] = 0
    """The minor version that introduced such messages."""

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Return a message of values that the caller has checked, without validating them: a third of the time."""
        message, put = cls.__new__(cls), object.__setattr__
        put(message, "__dict__", {**_defaults(cls), **values})
        put(message, "__pydantic_fields_set__", set(values))
        put(message, "__pydantic_extra__", None)
        put(message, "__pydantic_private__", None)
        return message


@cache
def _defaults(kind: type[_Message]) -> dict[str, Any]:
    """Return the fields of a kind of message that have a default, with it."""
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in kind.model_fields.items()
        if not field.is_required()
    }


@dataclass(frozen=True, slots=True)
class Since:
    """The minor version that introduced a field of a message, if it is newer than the message.

    The field has a default, and is not sent to a peer of an older version.
    """

    minor: int


class EndpointInfo(_Message):
    """The ``transport.Endpoint`` of the sender. Fields of a newer minor version come last, and are kept for the proof."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

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
    streams: Annotated[int, Field(ge=0, le=MAX_STREAMS)] = 0
    meeting: Text = ""


KeyLabel = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
"""The name of a key: one of a file of keys, or of a link whose heartbeats are to begin."""
MAX_PROTOCOLS = 8
"""Major versions that a client offers."""


class Hello1(_Message):
    """The first message of a client that has a key. It does not say who the client is.

    ``opens`` is what the connection is for. The key of heartbeats is their link's, and has the link's name.
    """

    type: Literal["hello1"] = "hello1"
    protocols: Annotated[list[UInt32], Field(min_length=1, max_length=MAX_PROTOCOLS), FailFast()]
    """The major versions that the client speaks."""
    nonce: Hex
    key_names: Annotated[list[KeyLabel], Field(min_length=1, max_length=MAX_KEYS), FailFast()]
    """Names of the client's keys, the preferred one first."""
    opens: Literal["link", "heartbeats"] = "link"


class Welcome(_Message):
    """The server's answer to ``hello1``. It does not say who the server is, only that it has the key of this name."""

    type: Literal["welcome"] = "welcome"
    protocol: UInt32
    nonce: Hex
    key_name: KeyLabel
    confirmation: Hex


class Hello(_Message):
    """The message in which each end says who it is.

    ``instance`` is new for every start of a cluster, ``nonce`` for every link.

    This message announces the ``minor`` version, so its fields are read whatever version its sender has. Fields of a
    newer version come last, and are kept for the proof.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    type: Literal["hello"] = "hello"
    protocol: UInt32 = PROTOCOL
    cluster_id: UInt64
    role: Literal[1, 2, 3]
    instance: Hex
    nonce: Hex
    one_sided: bool
    has_key: bool
    backend: Text = ""
    """The backend: with ``"hixl"``, a link belongs to its initiator, otherwise to both ends."""
    heartbeat: Annotated[float, Field(ge=0.01, le=600)]
    """Seconds between two heartbeats of the sender's, its ``heartbeat_interval``. Nanoseconds would keep a thread busy."""
    links: UInt63 = 0
    """The number of links with the receiver that this instance of the sender has had.

    A link with a lower number that the receiver still has is out of date.
    """
    endpoint: EndpointInfo
    minor: UInt32 = 0


class Connect(_Message):
    """A request of the client's to open a channel of this name now. The client waits this number of seconds."""

    type: Literal["connect"] = "connect"
    channel: ChannelName
    timeout: Seconds


class Accept(_Message):
    """The server's answer: it opens the channel now."""

    type: Literal["accept"] = "accept"


class KeyName(_Message):
    """The name of one of the receiver's caches.

    It is the model of a blocks cache, the slot of a request or prefix, a cache id, or an address in one of the cache's
    tensors. The receiver looks an address up, and does not follow it.
    """

    kind: Literal["blocks", "request", "prefix", "id", "address"]
    id: UInt64
    model_id: UInt64


MayDo = Annotated[int, Field(ge=0, le=3)]
"""The uses that the receiver may make of a cache of the sender's: the sum of 1, read, and 2, write."""


class CacheEntry(_Message):
    """A cache of the sender's, as its peer may reach it.

    ``addresses`` are the sender's. The receiver only hands them back to the transport, which checks them against the
    regions that the sender registered for this link.
    """

    cache_id: CacheId
    blocks: bool
    placement: Literal[0, 1]
    data_type: UInt32
    pieces: Annotated[int, Field(ge=1, lt=2**63)]
    """The number of batch slots, or blocks, in each tensor."""
    stride: Annotated[int, Field(ge=1, lt=2**63)]
    """Bytes of each piece."""
    addresses: Annotated[list[UInt64], Field(min_length=1, max_length=MAX_TENSORS), FailFast()]
    epoch: UInt32
    """A channel must be at least this young at the sender's end to reach the cache."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        """Refuse an impossible geometry, so that code which computes with it cannot overflow."""
        nbytes = self.pieces * self.stride
        if nbytes >= 2**63 or max(self.addresses) + nbytes > 2**64:
            raise ValueError(f"{self.pieces} pieces of {self.stride} bytes leave the address space")
        return self


class Ready(_Message):
    """The sender's half of the channel is open, and reaches what the sender had registered up to ``epoch``.

    Without a key, ``heartbeat_token`` comes from the server: the client's second connection must send it to carry this
    link's heartbeats. With a key it is empty, because that connection proves the link's own key. The client sends its
    ready when heartbeats come on that connection.
    """

    type: Literal["ready"] = "ready"
    epoch: UInt32
    heartbeat_token: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""


class AttachHeartbeats(_Message):
    """The first and only message of a connection without a key that then carries heartbeats, one byte each.

    The receiver reads it, and not a byte more, before it decides who reads the rest.
    """

    type: Literal["attach_heartbeats"] = "attach_heartbeats"
    token: Hex


class AttachData(_Message):
    """The first message of a connection that then carries bytes of one channel, and the server's answer to it.

    ``channel`` is a hash of the channel's key, which is in no message. The receiver reads this message, and not a byte more.
    See ``data_proof``.
    """

    since: ClassVar[int] = 2

    type: Literal["attach_data"] = "attach_data"
    channel: Hex
    index: Annotated[int, Field(ge=0, lt=MAX_STREAMS)]
    """The number of the connection among those of the channel."""
    plain: bool = False
    """True if the sender lets the bytes travel without seals. They do if both ends say so."""
    nonce: Hex
    proof: Hex


class Refuse(_Message):
    """A refusal, which ends the link.

    With a ``kind``, the keys differ, or the two ends do not fit together: asking again cannot help.
    """

    type: Literal["refuse"] = "refuse"
    status: Status
    reason: Reason
    kind: Annotated[Literal["", "key", "unfit"], Since(1)] = ""


class Disconnect(_Message):
    """A notice that the sender no longer uses the link.

    The receiver ends its transfers on it, answers ``bye`` and closes.
    """

    type: Literal["disconnect"] = "disconnect"
    reason: Text


class Bye(_Message):
    """A promise that the sender has no transfer on the link and will start none."""

    type: Literal["bye"] = "bye"


# ---- on a ready link ----


class Lookup(_Message):
    """A question: which of the receiver's caches has this name? The receiver answers ``found``."""

    type: Literal["lookup"] = "lookup"
    call: CallId
    name: KeyName


class Found(_Message):
    """The cache, and the batch slot that the name stands for; None if there is none. The receiver holds it from now on."""

    type: Literal["found"] = "found"
    call: CallId
    cache: CacheEntry | None
    slot: UInt32 = 0
    access: Annotated[MayDo, Since(ACCESS_SINCE)] = 3


class Grant(_Message):
    """A cache of the sender's that one of its requests is about to name. The receiver holds it."""

    type: Literal["grant"] = "grant"
    cache: CacheEntry
    access: Annotated[MayDo, Since(ACCESS_SINCE)] = 3


class Revoke(_Message):
    """A request to forget this cache of the sender's.

    The receiver lets its transfers end, stops them after ``seconds``, and then sends ``revoked``. Without an answer,
    the message is repeated under its number.
    """

    type: Literal["revoke"] = "revoke"
    cache_id: CacheId
    seconds: Seconds
    number: Annotated[UInt63, Since(1)] = 0


class Revoked(_Message):
    """The sender no longer holds this cache, and none of its transfers touches it."""

    type: Literal["revoked"] = "revoked"
    cache_id: CacheId
    number: Annotated[UInt63, Since(1)] = 0
    """The number of the ``revoke``; 0 for the only one."""


OtherPull = Annotated[tuple[CallId, Indexes, Indexes], Strict(False)]
"""The fields ``call``, ``src_blocks`` and ``dst_blocks``. A list in JSON, as for a layer range."""
OtherPulled = Annotated[
    tuple[CallId, UInt64, UInt64, Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]], Strict(False)
]
"""The fields ``call``, ``nbytes``, ``ranges``, ``queue_seconds`` and ``transfer_seconds``."""


class PartNumbers(BaseModel):
    """Numbers of parts: part ``src[i]``, counted through ``src_blocks``, goes to part ``dst[i]`` of ``dst_blocks``."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    nbytes: Annotated[int, Field(ge=1, lt=2**63)]
    src: Indexes
    dst: Indexes


class Pull(_Message):
    """A request to write the source that ``name`` stands for into a cache of the sender's that the receiver holds.

    The receiver answers ``pulled``. ``slot`` is the source's batch slot if the name is an id. ``layers`` are half-open;
    None means all. With ``dst_blocks`` the destination is blocks. Otherwise it is ``nbytes`` of batch slot
    ``dst_slot``, which begin at ``offsets`` in the source's slot and in the destination's; with offsets no key is
    consumed.
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
    """True if the answer must have checksums of what was read."""
    priority: Annotated[Literal[0, 1, 2], Since(1)] = 1
    """The ``TransferPriority``; NORMAL for a peer that does not know priorities."""
    also: Annotated[list[OtherPull], Field(max_length=MAX_TOGETHER - 1), FailFast(), Since(TOGETHER_SINCE)] = Field(
        default_factory=list
    )
    """Further requests, which differ from this one only in these fields.

    Each is served and answered like a separate one. All together name at most the number of blocks, and parts, that one
    may name.
    """

    @property
    def is_whole_blocks(self) -> bool:
        """True if whole blocks go to the same number of blocks."""
        return self.parts is None and not self.dst_slot and len(self.src_blocks) > 0

    @property
    def layers(self) -> tuple[LayerRange, LayerRange, int] | None:
        """The layers at either end, and the tensors in each; None if they are all."""
        if self.src_layers is None and self.dst_layers is None:
            return None
        return self.src_layers, self.dst_layers, self.tensors_per_layer

    def count_blocks(self) -> int:
        """Return the number of block and part numbers in the requests of this message, at both ends."""
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
    """A request to give up a call of the sender's.

    The receiver answers the call all the same, once nothing can be written any longer. It answers again if it did so
    before, and does not begin if the call comes after this.
    """

    type: Literal["stop"] = "stop"
    call: CallId


class Pulled(_Message):
    """The end of a pull. Whatever the status, the sender writes no more.

    ``stopped``: it was told to stop, or the pull never came. ``is_unknown``: it was not told of the destination, or no
    longer holds it; nothing was written.
    """

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
    """The checksums of the source's blocks, parts or slot, in the request's order; empty if it did not ask for them."""
    also: Annotated[list[OtherPulled], Field(max_length=MAX_TOGETHER - 1), FailFast(), Since(TOGETHER_SINCE)] = Field(
        default_factory=list
    )
    """The ends of further pulls, which differ from this one only in these fields."""

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
    """A question: what are the checksums of these pieces of a cache of the receiver's? The receiver answers ``digests``.

    Piece ``i`` is ``nbytes`` long, the last one ``tail``. It begins ``offset + indexes[i] * step`` bytes after the
    start of each of ``tensors`` tensors, from ``first_tensor`` on. The receiver checks that the sum is inside the
    cache, which the sender holds.
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
    """The answer: one checksum for each piece; or the reason for having none."""

    since = 1
    type: Literal["digests"] = "digests"
    call: CallId
    status: Status
    reason: Reason = ""
    checksums: Checksums = Field(default_factory=list)


class Claim(_Message):
    """A request to begin a pull of blocks that the receiver keeps under this name, for at most ``seconds``.

    The receiver answers ``claimed``; if it does not know the name, it waits for ``patience`` seconds first. ``takers``
    peers share the blocks, and all send the same number.

    ``blocks_digest`` is of all blocks of the lease as the sender was told them, even if it reads only a few.
    ``prompt_digest`` is of the sender's own prompt. The receiver compares them with the lease's.
    """

    type: Literal["claim"] = "claim"
    call: CallId
    lease: LeaseName
    seconds: Seconds
    patience: Annotated[float, Field(ge=0, le=MAX_SECONDS)]
    takers: Annotated[int, Field(ge=1, le=MAX_TAKERS)] = 1
    blocks_digest: Annotated[Digest16, Since(DIGESTS_SINCE)] = ""
    prompt_digest: Annotated[Digest16, Since(DIGESTS_SINCE)] = ""


class Claimed(_Message):
    """The answer: if the blocks are kept for the receiver, until it sends ``unclaim``.

    They are kept for ``seconds`` at most; if that is 0, for the time of the claim. If they are not kept because the
    claim itself was wrong, ``why`` is the reason.
    """

    type: Literal["claimed"] = "claimed"
    call: CallId
    kept: bool
    seconds: Annotated[float, Field(ge=0, le=MAX_SECONDS), Since(1)] = 0.0
    why: Annotated[Text, Since(DIGESTS_SINCE)] = ""


class Unclaim(_Message):
    """The end of the sender's pull. ``call`` is its claim, or 0 if it never pulled. After a failure it may try again.

    The digests are those of ``claim``: a lease ends only for a peer that knows its blocks and its prompt.
    """

    type: Literal["unclaim"] = "unclaim"
    call: Annotated[int, Field(ge=0, lt=2**63)]
    lease: LeaseName
    end: Literal["taken", "released", "failed"]
    blocks_digest: Annotated[Digest16, Since(DIGESTS_SINCE)] = ""
    prompt_digest: Annotated[Digest16, Since(DIGESTS_SINCE)] = ""


class Note(_Message):
    """A notification; everything that was pushed before it is in place. ``payload`` is base64.

    ``number`` counts from 1; 0 means the next one. A notification is repeated under its number if the receiver may not
    have heard it; one that was heard is answered.
    """

    type: Literal["note"] = "note"
    payload: Annotated[str, Field(max_length=(MAX_NOTE + 2) // 3 * 4, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]
    number: Annotated[UInt63, Since(1)] = 0


class Taken(_Message):
    """The sender's user has taken another notification of the receiver's.

    To an end of the same version it tells how many were taken so far, and how many the sender has heard without a gap.
    """

    type: Literal["taken"] = "taken"
    count: Annotated[UInt63, Since(1)] = 0
    heard: Annotated[UInt63, Since(1)] = 0


class Watch(_Message):
    """A request to report which of the receiver's layers have landed in this cache of the sender's, or to stop reporting.

    With a ``call`` the receiver answers ``pong``; the second time it repeats what it has reported since the first.
    """

    type: Literal["watch"] = "watch"
    cache_id: CacheId
    on: bool
    call: Annotated[UInt63, Since(1)] = 0


class Landed(_Message):
    """Layers ``first`` to ``stop`` of a cache of the receiver's hold what the sender's transfer put there.

    With a reason, the transfer failed, and no more layers come. ``watch`` is the call of the ``watch`` that it answers.
    ``tensors`` is the number of tensors in each of these layers, because the receiver may count in others. It is 0 if the
    sender does not say: then the layers count as the receiver's.
    """

    type: Literal["landed"] = "landed"
    cache_id: CacheId
    first: UInt32
    stop: UInt32
    status: Status = 0
    reason: Reason = ""
    watch: Annotated[UInt63, Since(1)] = 0
    tensors: Annotated[int, Field(ge=0, le=MAX_TENSORS), Since(2)] = 0


class Ping(_Message):
    """A question whether the receiver is there. The receiver answers ``pong``."""

    type: Literal["ping"] = "ping"
    call: CallId


class Pong(_Message):
    type: Literal["pong"] = "pong"
    call: CallId


class Own(_Message):
    """The link belongs to the sender, too, from now on, or no longer. A link that belongs to neither end is not used."""

    type: Literal["own"] = "own"
    call: CallId
    on: bool


class Owned(_Message):
    """The answer: whether the link belongs to the sender of this message."""

    type: Literal["owned"] = "owned"
    call: CallId
    on: bool


class Renew(_Message):
    """A request of the client's for one more channel, which reaches what was registered in the meantime."""

    type: Literal["renew"] = "renew"
    channel: ChannelName
    seconds: Seconds


class Renewed(_Message):
    """The sender's half of a further channel is open, up to ``epoch``; with a ``reason``, it could not be opened."""

    type: Literal["renewed"] = "renewed"
    channel: ChannelName
    epoch: UInt32
    reason: Reason = ""


class Retire(_Message):
    """A promise that the sender has no transfer on this channel and will start none."""

    type: Literal["retire"] = "retire"
    channel: ChannelName


class Broken(_Message):
    """A report that one of the sender's transfers was stopped half-way on this channel.

    Neither end starts another transfer there, and both close the channel when those under way have ended.
    """

    type: Literal["broken"] = "broken"
    channel: ChannelName


class Outdated(_Message):
    """A request of the server's to renew the channel so that it reaches these epochs of both ends.

    The client sends ``pong`` when it has tried.
    """

    type: Literal["outdated"] = "outdated"
    call: CallId
    mine: UInt32
    yours: UInt32


class Unsupported(_Message):
    """The sender does not know messages of this kind, which are of a newer minor version than its own.

    It did nothing, and the link continues. ``call`` is that of the message, or 0 if it has none.
    """

    type: Literal["unsupported"] = "unsupported"
    kind: Annotated[str, Field(max_length=32, pattern=r"^[\x20-\x7e]*$")]
    call: Annotated[int, Field(ge=0, lt=2**63)] = 0


Message = (
    Hello1 | Welcome | Hello | Connect | Accept | Ready | Refuse | Disconnect | Bye | AttachHeartbeats | AttachData
    | Lookup | Found | Grant | Revoke | Revoked | Pull | Stop | Pulled | Note | Taken | Ping | Pong
    | Renew | Renewed | Retire | Broken | Outdated | Watch | Landed | Own | Owned
    | Claim | Claimed | Unclaim | Unsupported | Digest | Digests
)  # fmt: skip
parser: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def _newer_fields(kind: type[_Message]) -> dict[str, int]:
    """Return the minor versions that introduced fields of these messages, unless it was the first."""
    fields = kind.model_fields.items()
    return {name: mark.minor for name, field in fields for mark in field.metadata if isinstance(mark, Since)}


NEWER_FIELDS: dict[type, dict[str, int]] = {kind: _newer_fields(kind) for kind in get_args(Message)}
"""The newer fields of each kind of message: only a message's own fields, not those of what it contains."""
