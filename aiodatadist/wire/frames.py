"""Messages as bytes: an 8-byte head (magic, version, length), then JSON, and its checksum in blanks behind it."""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json

from aiodatadist.errors import IncompatiblePeer, ProtocolError
from aiodatadist.values.foreign import Unreadable, printable, read_foreign
from aiodatadist.wire.messages import MAX_INDEXES, MAX_NOTE, MINOR, NEWER_FIELDS, PROTOCOL, Hello, Message, parser

MAGIC = b"KV"
VERSION = 1
HEAD = struct.Struct(">2sBxI")
SEAL = b"\n\r\n\r"
"""Stands between the JSON of a message and its CRC-32. Both are blanks, which an end that knows nothing of them skips; so no
message is without, not even the first. TCP's own checksum misses one damage in some 65,000, and a digit that has changed is
the number of another block."""
SEALED_SINCE = 1
"""The minor version from which on every message has one: the damage may be in the mark."""
_BLANKS = b" \t\n\r"
_FOUR_BLANKS = [bytes(_BLANKS[byte >> shift & 3] for shift in (6, 4, 2, 0)) for byte in range(256)]
MAX_BODY = 20 * MAX_INDEXES
"""Bytes of one message, at most: two full lists of nine digits. Checked before anything is allocated for it."""
SMALL_FRAME = 4096
"""Bytes of one that is looked at in the call that brings it."""
MAX_KIND = 32
"""Characters of a message's type."""
MAX_TEXT = (MAX_NOTE + 2) // 3 * 4
"""Characters of one text: those of a notification."""
MAX_NEWER = 16
"""Fields of one message that are ignored because a newer minor version may have added them."""


class Unknown(NamedTuple):
    """A message of a newer minor version than this end's, which does not know its kind. ``call``: its number, or 0."""

    type: str
    call: int


def encode(message: Message, minor: int = MINOR) -> bytes:
    """One frame, for a peer of this minor version: fields that it does not know are left out. A hello has those of its own,
    for each peer, so that it is as it travelled in both ends' proofs.

    Raises:
        ProtocolError: the message is larger than a frame may be, or of a newer version than the peer.
    """
    unknown: set[str] | None = None
    if isinstance(message, Hello):
        minor = message.minor
    if minor < MINOR:
        _check_minor(message, minor, "peer")
        unknown = {name for name, since in NEWER_FIELDS.get(type(message), {}).items() if since > minor}
    # By its own serializer: the parser's looks for the type first, which takes several times as long as the rest.
    content = message.__pydantic_serializer__.to_json(message, exclude=unknown)
    body = sealed(content)
    if len(body) > MAX_BODY:
        raise ProtocolError(f"a {message.type!r} message of {len(body)} bytes: the limit is {MAX_BODY}")
    return HEAD.pack(MAGIC, VERSION, len(body)) + body


def sealed(content: bytes) -> bytes:
    """With its checksum behind it."""
    crc, blanks = zlib.crc32(content), _FOUR_BLANKS
    return content + SEAL + blanks[crc >> 24] + blanks[crc >> 16 & 255] + blanks[crc >> 8 & 255] + blanks[crc & 255]


_SEALED = len(sealed(b""))


class Decoder:
    """Bytes in, messages out. After an error it is good for nothing.

    Attributes:
        max_body: bytes that a message may have.
        minor: the peer's minor version, which its hello says; None before.
    """

    def __init__(self, max_body: int = MAX_BODY) -> None:
        self.max_body = max_body
        self.minor: int | None = None
        self._buffer = bytearray()
        self._failure: ProtocolError | IncompatiblePeer | None = None

    @property
    def wanting(self) -> int:
        """Bytes to the end of the next message, or of its head: who reads no more than that takes nothing from behind it."""
        if len(self._buffer) < HEAD.size:
            return HEAD.size - len(self._buffer)
        *_, length = HEAD.unpack_from(self._buffer)
        return HEAD.size + int(length) - len(self._buffer)

    def feed(self, data: bytes | memoryview) -> list[Message | Unknown]:
        """The messages that are complete with ``data``. Those in front of an error are not lost: it is raised next time.

        Raises:
            ProtocolError: these bytes are no message of this protocol.
            IncompatiblePeer: they are a hello of another major version.
        """
        if self._failure is not None:
            raise self._failure
        self._buffer += data
        messages: list[Message | Unknown] = []
        try:
            while (body := self._next()) is not None:
                message = _parse(body, self.minor)
                if message is not None:
                    if self.minor is not None:
                        _check_minor(message, self.minor, "sender")
                    self.meet(message)
                    messages.append(message)
        except (ProtocolError, IncompatiblePeer) as error:
            if not messages:
                raise
            self._failure = error
        return messages

    def peek(self, data: bytes) -> Message | Unknown | None:
        """The message, if ``data`` is a whole small one and nothing else, and nothing came before that is not complete. It is
        not taken: :meth:`feed` would give it, too, or say what is wrong with it."""
        if self._buffer or self._failure is not None or not HEAD.size < len(data) <= SMALL_FRAME:
            return None
        if HEAD.unpack_from(data) != (MAGIC, VERSION, len(data) - HEAD.size) or len(data) > self.max_body:
            return None
        try:
            message = _parse(data[HEAD.size :], self.minor)
            if message is not None and self.minor is not None:
                _check_minor(message, self.minor, "sender")
        except (ProtocolError, IncompatiblePeer):
            return None
        return message

    def meet(self, message: Message | Unknown) -> None:
        """If the peer said who it is, its version is known from here on."""
        if isinstance(message, Hello):
            self.minor = message.minor

    def _next(self) -> bytes | None:
        if len(self._buffer) < HEAD.size:
            if not MAGIC.startswith(bytes(self._buffer[: len(MAGIC)])):
                raise ProtocolError(f"the peer does not speak our protocol: it begins with {bytes(self._buffer)!r}")
            return None
        magic, version, length = HEAD.unpack_from(self._buffer)
        if magic != MAGIC:
            raise ProtocolError(f"the peer does not speak our protocol: it begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise ProtocolError(f"the peer's frames have version {version}, ours {VERSION}")
        if length > self.max_body:
            raise ProtocolError(f"the peer announced a message of {length} bytes: the limit is {self.max_body}")
        end = HEAD.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEAD.size : end])
        del self._buffer[:end]
        return body


def _check_minor(message: Message | Unknown, minor: int, end: str) -> None:
    """Raises ProtocolError: messages of this kind are newer than the protocol of this end of the connection."""
    if isinstance(message, Unknown) or message.since <= minor:
        return
    raise ProtocolError(
        f"{message.type!r} messages came with version {PROTOCOL}.{message.since}, the {end} has {PROTOCOL}.{minor}"
    )


def _parse(body: bytes, minor: int | None) -> Message | Unknown | None:
    """The message in a frame of a peer of this minor version; None: one that is not known here, and may be ignored. It costs
    some milliseconds and megabytes at most, whatever is in it.

    Raises:
        ProtocolError: there is none, or its checksum is wrong, or missing where the peer's version has them.
        IncompatiblePeer: it is a hello of another major version.
    """
    is_sealed = body[-_SEALED:].startswith(SEAL)
    if is_sealed and body != sealed(body[:-_SEALED]):
        raise ProtocolError("a message of the peer's was damaged on its way: its checksum is wrong")
    message = _content(body, minor)
    if isinstance(message, Hello):
        minor = message.minor
    is_cut_off = body[-1:].isspace()  # blanks behind the JSON are what is left of a damaged mark: 4.0 says none
    if not is_sealed and (is_cut_off or (minor is not None and minor >= SEALED_SINCE)):
        raise ProtocolError("a message of the peer's was damaged on its way: it has no checksum")
    return message


def _content(body: bytes, minor: int | None) -> Message | Unknown | None:
    """As :func:`_parse`, of what is before the checksum. If the peer's minor version is newer than this end's, fields and
    messages that are not known here are ignored, or told apart."""
    try:
        return read_foreign(body, parser, limit_bytes=MAX_BODY, limit_chars=MAX_TEXT)
    except Unreadable as error:
        return _of_another_version(body, error, minor)


def _of_another_version(body: bytes, error: Unreadable, minor: int | None) -> Message | Unknown | None:
    """What is no message of this version may be one of another.

    Raises:
        ProtocolError: it is none of a newer minor version either, or the peer has none. The message names both versions
            if the peer's is known.
        IncompatiblePeer: it is a hello of another major version.
    """
    what = f"the peer sent a message that is not valid: {error}"
    complaint = ProtocolError(what if minor is None else f"{what} ({both_versions(PROTOCOL, minor)})")
    if error.error is None:  # it is larger than any message
        raise complaint from None
    try:
        content = from_json(body)
    except ValueError:
        raise complaint from None
    if not isinstance(content, dict):
        raise complaint from None
    if content.get("type") == "hello":
        major, minor_said = content.get("protocol"), content.get("minor")
        check_version(major, minor_said)
        raise ProtocolError(f"{what} ({both_versions(major, minor_said)})") from None
    is_newer = minor is not None and minor > MINOR
    found = error.error
    problems = found.errors(include_url=False, include_context=False, include_input=False) if is_newer else []
    kinds = {problem["type"] for problem in problems}
    kind = content.get("type")
    if kinds == {"union_tag_invalid"} and isinstance(kind, str) and len(kind) <= MAX_KIND:
        return _unknown(kind, content)
    if kinds != {"extra_forbidden"} or len(problems) > MAX_NEWER:
        raise complaint from None
    for problem in problems:
        _drop(content, problem["loc"][1:])
    try:
        return parser.validate_python(content)
    except ValidationError:
        raise complaint from None


def check_version(major: object, minor: object) -> None:
    """Raises IncompatiblePeer: a hello with these is of another major version."""
    if _is_number(major) and major != PROTOCOL:
        raise IncompatiblePeer(f"protocol differs: {PROTOCOL}.{MINOR} here, {_version(major, minor)} at the peer")


def both_versions(major: object, minor: object) -> str:
    """This end's version and what a peer's hello has in place of its own, in words."""
    return f"protocol {PROTOCOL}.{MINOR} here, {_version(major, minor)} at the peer"


def _version(major: object, minor: object) -> str:
    if not _is_number(major):
        return "none"
    return f"{major}.{minor}" if _is_number(minor) else f"{major}"


def _is_number(said: object) -> bool:
    """Return True for a number that a hello may have: what is longer would be written out in a complaint."""
    return isinstance(said, int) and not isinstance(said, bool) and 0 <= said < 2**32


def _unknown(kind: str, content: dict[str, Any]) -> Unknown | None:
    if content.get("optional") is True:
        return None
    call = content.get("call")
    return Unknown(printable(kind, MAX_KIND), call if isinstance(call, int) and 0 < call < 2**63 else 0)


def _drop(content: Any, path: tuple[int | str, ...]) -> None:
    for step in path[:-1]:
        content = content[step]
    del content[path[-1]]
