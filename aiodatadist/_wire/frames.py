"""Messages as bytes: an 8-byte head (magic, version, length), then JSON, then its checksum as blanks, or a seal.

A connection with a key has sealed frames from the moment at which the key is known, and accepts no others. A frame whose
seal is wrong is not parsed. Over TLS a frame ends with its JSON, because TLS seals all bytes.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json

from aiodatadist._values.foreign import Unreadable, printable, read_foreign
from aiodatadist._wire.messages import (
    MAX_INDEXES,
    MAX_NOTE,
    MINOR,
    NEWER_FIELDS,
    PLAIN_PROTOCOL,
    PROTOCOL,
    SEALED_MINOR,
    AttachData,
    Hello,
    Hello1,
    Message,
    Welcome,
    parser,
)
from aiodatadist._wire.seals import TRAILER, ByTls, Opener, Sealer
from aiodatadist.errors import IncompatiblePeer, ProtocolError

MAGIC = b"KV"
VERSION = 1
SEALED_VERSION = 2
"""The version of a frame with a counter and a seal instead of a checksum."""
TLS_VERSION = 3
"""The version of a frame that TLS seals, with nothing behind its JSON."""
HEAD = struct.Struct(">2sBxI")
MARK = b"\n\r\n\r"
"""The mark between the JSON of a message and its CRC-32.

Both are blanks, which an end that does not know them skips; so every message has them, even the first. TCP's own
checksum misses one damage in some 65,000, and a changed digit is the number of another block.
"""
CHECKED_SINCE = 1
"""The minor version from which on every message must have a checksum, because the damage may be in the mark."""
_BLANKS = b" \t\n\r"
_FOUR_BLANKS = [bytes(_BLANKS[byte >> shift & 3] for shift in (6, 4, 2, 0)) for byte in range(256)]
"""Each byte as four blanks, two bits in each."""
MAX_BODY = 20 * MAX_INDEXES
"""The largest message in bytes: two full lists of nine-digit numbers. Checked before anything is allocated for it."""
SMALL_FRAME = 4096
"""The largest frame in bytes that is parsed in the call that receives it."""
MAX_KIND = 32
"""The longest message type, in characters."""
MAX_TEXT = (MAX_NOTE + 2) // 3 * 4
"""The longest text, in characters: that of a notification."""
MAX_NEWER = 16
"""The largest number of fields in one message that are ignored because a newer minor version may have added them."""


class Unknown(NamedTuple):
    """A message of a newer minor version, whose kind this end does not know. ``call`` is its number, or 0."""

    type: str
    call: int


def encode(message: Message, minor: int = MINOR, sealer: Sealer | ByTls | None = None) -> bytes:
    """Return one frame, for a peer of this minor version, without the fields that the peer does not know.

    Args:
        sealer: seals the frame; None on a connection without a key.

    Raises:
        ProtocolError: if the message is larger than a frame may be, or newer than the peer's version.
    """
    unknown: set[str] | None = None
    if isinstance(message, Hello):
        minor = message.minor
    if minor < MINOR:
        _check_minor(message, minor, "peer", PLAIN_PROTOCOL if sealer is None else PROTOCOL)
        unknown = {name for name, since in NEWER_FIELDS.get(type(message), {}).items() if since > minor}
    # The message's own serializer: the parser's looks for the type first, which takes several times as long as the rest.
    content = message.__pydantic_serializer__.to_json(message, exclude=unknown)
    nbytes = len(content) + TRAILER
    if nbytes > MAX_BODY:
        raise ProtocolError(f"a {message.type!r} message has {nbytes} bytes: the limit is {MAX_BODY}")
    return framed(content, sealer)


def framed(content: bytes, sealer: Sealer | ByTls | None) -> bytes:
    """Return a frame with this content, sealed or with a checksum."""
    if sealer is ByTls.SEALED:
        return HEAD.pack(MAGIC, TLS_VERSION, len(content)) + content
    if sealer is None:
        body = checked(content)
        return HEAD.pack(MAGIC, VERSION, len(body)) + body
    return sealer.sealed(HEAD.pack(MAGIC, SEALED_VERSION, len(content) + TRAILER) + content)


def checked(content: bytes) -> bytes:
    """Return the content with its checksum appended."""
    crc, blanks = zlib.crc32(content), _FOUR_BLANKS
    return content + MARK + blanks[crc >> 24] + blanks[crc >> 16 & 255] + blanks[crc >> 8 & 255] + blanks[crc & 255]


_CHECKSUM = len(checked(b""))


class Decoder:
    """A decoder: bytes in, messages out. It cannot be used after an error.

    Attributes:
        max_body: bytes that a message may have.
        minor: the peer's minor version, from its hello; None before that.
        opener: checks seals; None until :meth:`open_with`.
        protocol: the major version of this end, for errors.
    """

    def __init__(self, max_body: int = MAX_BODY, protocol: int = PLAIN_PROTOCOL) -> None:
        self.max_body = max_body
        self.protocol = protocol
        self.minor: int | None = None
        self.opener: Opener | ByTls | None = None
        self._version = VERSION
        self._buffer = bytearray()
        self._peeked = 0
        self._failure: ProtocolError | IncompatiblePeer | None = None

    def open_with(self, opener: Opener | ByTls) -> None:
        """Check seals with the key that is known from now on, or leave that to TLS. No other frames are accepted."""
        self.opener, self._version = opener, TLS_VERSION if opener is ByTls.SEALED else SEALED_VERSION

    @property
    def wanting(self) -> int:
        """Bytes to the end of the next message, or of its head. Reading no more than that takes nothing from behind it."""
        if len(self._buffer) < HEAD.size:
            return HEAD.size - len(self._buffer)
        *_, length = HEAD.unpack_from(self._buffer)
        return HEAD.size + int(length) - len(self._buffer)

    @property
    def is_within(self) -> bool:
        """True if a message has begun whose rest has not come."""
        return bool(self._buffer)

    def feed(self, data: bytes | memoryview) -> list[Message | Unknown]:
        """Return the messages that are complete with ``data``.

        Messages before an error are not lost: they are returned, and the next call raises the error.

        Raises:
            ProtocolError: if these bytes are not a message of this protocol.
            IncompatiblePeer: if they are a hello of another major version.
        """
        if self._failure is not None:
            raise self._failure
        self._buffer += data
        messages: list[Message | Unknown] = []
        try:
            while (frame := self._next()) is not None:
                message = self._opened(frame)
                if message is not None:
                    self.meet(message)
                    messages.append(message)
        except (ProtocolError, IncompatiblePeer) as error:
            if not messages:
                raise
            self._failure = error
        return messages

    def peek(self, data: bytes) -> Message | Unknown | None:
        """Return the message if ``data`` is exactly one small message, which is due, and no incomplete one came before.

        The message is not consumed: :meth:`feed` would return it, too, or raise what is wrong with it. If it need not be
        fed, call :meth:`consume`.
        """
        if self._buffer or self._failure is not None or not HEAD.size < len(data) <= SMALL_FRAME:
            return None
        if HEAD.unpack_from(data) != (MAGIC, self._version, len(data) - HEAD.size) or len(data) > self.max_body:
            return None
        opener = self.opener
        try:
            if opener is None:
                message = _parse(data[HEAD.size :], self.minor, self.protocol)
            elif opener is ByTls.SEALED:
                message = _content(data[HEAD.size :], self.minor, self.protocol)
            else:
                counter = opener.counter_of(data) if len(data) >= HEAD.size + TRAILER else None
                if counter is None or counter != opener.due:
                    return None
                self._peeked = counter
                message = _content(data[HEAD.size : -TRAILER], self.minor, self.protocol)
            if message is not None and self.minor is not None:
                _check_minor(message, self.minor, "sender", self.protocol)
        except (ProtocolError, IncompatiblePeer):
            return None
        return message

    def consume(self) -> None:
        """Note that the message that :meth:`peek` has just returned will not be fed."""
        if isinstance(self.opener, Opener):
            self.opener.accept(self._peeked)

    def meet(self, message: Message | Unknown) -> None:
        """Learn the peer's version from its hello, or that it has a message which no older version knows."""
        if isinstance(message, Hello):
            self.minor = message.minor
        elif isinstance(message, (Hello1, Welcome, AttachData)):
            self.minor = SEALED_MINOR

    def _opened(self, frame: bytes) -> Message | Unknown | None:
        """Return the message in a whole frame; None if it must be ignored. Nothing is parsed unless its seal is right."""
        opener = self.opener
        if opener is None:
            message = _parse(frame[HEAD.size :], self.minor, self.protocol)
        elif opener is ByTls.SEALED:
            message = _content(frame[HEAD.size :], self.minor, self.protocol)
        else:
            counter = opener.counter_of(frame) if len(frame) >= HEAD.size + TRAILER else None
            if counter is None:
                raise ProtocolError(
                    "a message has a wrong seal: its sender does not have the key, or it was changed or added on its way"
                )
            if not opener.accept(counter):
                return None
            message = _content(frame[HEAD.size : -TRAILER], self.minor, self.protocol)
        if message is not None and self.minor is not None:
            _check_minor(message, self.minor, "sender", self.protocol)
        return message

    def _next(self) -> bytes | None:
        """Return the next frame, with its head; None if it is not complete."""
        if len(self._buffer) < HEAD.size:
            if not MAGIC.startswith(bytes(self._buffer[: len(MAGIC)])):
                raise _foreign(bytes(self._buffer))
            return None
        magic, version, length = HEAD.unpack_from(self._buffer)
        if magic != MAGIC:
            raise _foreign(magic)
        if version != self._version:
            raise _of_another_kind(version, self._version)
        if length > self.max_body:
            raise ProtocolError(f"the peer announced a message of {length} bytes: the limit is {self.max_body}")
        end = HEAD.size + length
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[:end])
        del self._buffer[:end]
        return frame


def _of_another_kind(version: int, ours: int) -> ProtocolError:
    if (version, ours) == (VERSION, SEALED_VERSION):
        return ProtocolError("a message has no seal: its sender does not have the key, or it was added on its way")
    if (version, ours) == (SEALED_VERSION, VERSION):
        return ProtocolError("the peer sent a sealed message before there was a key for it")
    return ProtocolError(f"the peer's frames have version {version}, ours {ours}")


def _foreign(beginning: bytes) -> ProtocolError:
    return ProtocolError(
        f"the peer does not speak our protocol: it begins with {beginning!r}, not {MAGIC!r}",
        hint="check the address: another program listens there",
    )


def _check_minor(message: Message | Unknown, minor: int, end: str, major: int) -> None:
    """Raise ProtocolError if messages of this kind are newer than the protocol of this end of the connection."""
    if isinstance(message, Unknown) or message.since <= minor:
        return
    raise ProtocolError(
        f"{message.type!r} messages came with version {major}.{message.since}, the {end} has {major}.{minor}"
    )


def _parse(body: bytes, minor: int | None, protocol: int) -> Message | Unknown | None:
    """Return the message in a frame from a peer of this minor version; None if it is unknown and may be ignored.

    It takes some milliseconds and megabytes at most, whatever the frame contains.

    Raises:
        ProtocolError: if there is no message, or its checksum is wrong, or missing although the peer's version has
            them.
        IncompatiblePeer: if it is a hello of another major version.
    """
    is_checked = body[-_CHECKSUM:].startswith(MARK)
    if is_checked and body != checked(body[:-_CHECKSUM]):
        raise ProtocolError("a message from the peer was damaged in transit: its checksum is wrong")
    message = _content(body, minor, protocol)
    if isinstance(message, Hello):
        minor = message.minor
    is_cut_off = body[-1:].isspace()  # blanks after the JSON are the rest of a damaged mark: 4.0 sends none
    if not is_checked and (is_cut_off or (minor is not None and minor >= CHECKED_SINCE)):
        raise ProtocolError("a message from the peer was damaged in transit: it has no checksum")
    return message


def _content(body: bytes, minor: int | None, protocol: int) -> Message | Unknown | None:
    """Return the message in the part before the checksum, as :func:`_parse` does.

    If the peer's minor version is newer than this end's, unknown fields are ignored, and unknown messages are
    recognised.
    """
    try:
        return read_foreign(body, parser, limit_bytes=MAX_BODY, limit_chars=MAX_TEXT)
    except Unreadable as error:
        return _of_another_version(body, error, minor, protocol)


def _of_another_version(body: bytes, error: Unreadable, minor: int | None, protocol: int) -> Message | Unknown | None:
    """Return a message that is not of this version, but may be of another.

    Raises:
        ProtocolError: if it is not of a newer minor version either, or the peer has none. The message names both
            versions if the peer's is known.
        IncompatiblePeer: if it is a hello of another major version.
    """
    what = f"the peer sent a message that is not valid: {error}"
    complaint = ProtocolError(what if minor is None else f"{what} ({both_versions(protocol, protocol, minor)})")
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
        check_version(protocol, major, minor_said)
        raise ProtocolError(f"{what} ({both_versions(protocol, major, minor_said)})") from None
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


def check_version(protocol: int, major: object, minor: object) -> None:
    """Raise IncompatiblePeer if a hello with these versions is of another major version than this end's ``protocol``."""
    if _is_number(major) and major != protocol:
        raise IncompatiblePeer(f"protocol differs: {protocol}.{MINOR} here, {_version(major, minor)} at the peer")


def both_versions(protocol: int, major: object, minor: object) -> str:
    """Return this end's version and the peer's in words, whatever the peer's hello has in its place."""
    return f"protocol {protocol}.{MINOR} here, {_version(major, minor)} at the peer"


def _version(major: object, minor: object) -> str:
    if not _is_number(major):
        return "none"
    return f"{major}.{minor}" if _is_number(minor) else f"{major}"


def _is_number(said: object) -> bool:
    """Return True for a number that a hello may have. A longer one would be written out in an error."""
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
