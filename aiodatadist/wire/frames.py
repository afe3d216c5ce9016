"""Messages as bytes: an 8-byte head (magic, version, revision, length), then JSON."""

from __future__ import annotations

import struct

from pydantic import ValidationError
from pydantic_core import from_json

from aiodatadist.errors import ProtocolError
from aiodatadist.wire.messages import MAX_INDEXES, Message, parser
from aiodatadist.wire.reasons import as_ascii

MAGIC = b"KV"
VERSION = 1
REVISION = 1
"""What the sender knows beyond what every end of this version does. An end takes any, and says only what the other end's has:
0: nothing; 1: checksums (``Digest``, ``Digests``, and those of ``Pull`` and ``Pulled``)."""
HEAD = struct.Struct(">2sBBI")
MAX_BODY = 20 * MAX_INDEXES
"""Bytes of one message, at most: two full lists of nine digits. Checked before anything is allocated for it."""
SMALL_BODY = 1 << 14
"""Bytes of a message that is read without looking into it first: whatever is in it costs a few milliseconds at most."""
MAX_SIGNS = {b",": 2 * MAX_INDEXES + 1024, b'"': 256, b"[": 64, b"{": 64}
"""How often a larger message may have each. Its bulk is numbers or one long text: texts that could have any of these are in
small messages only. What is beyond would make up to half a million objects, or as many complaints of which one is told."""
MAX_KIND = 32
"""Characters of a message's type."""
MAX_COMPLAINT = 300
"""Characters of what is wrong with a message."""


def encode(message: Message) -> bytes:
    """One frame.

    Raises:
        ProtocolError: the message is larger than a frame may be.
    """
    body = parser.dump_json(message, exclude_defaults=False)
    if len(body) > MAX_BODY:
        raise ProtocolError(f"a {message.type!r} message of {len(body)} bytes: the limit is {MAX_BODY}")
    return HEAD.pack(MAGIC, VERSION, REVISION, len(body)) + body


class Decoder:
    """Bytes in, messages out. After an error it is good for nothing.

    Attributes:
        revision: of the end that the last message is from; None before the first.
    """

    def __init__(self, max_body: int = MAX_BODY) -> None:
        self.max_body = max_body
        self.revision: int | None = None
        self._buffer = bytearray()
        self._failure: ProtocolError | None = None

    @property
    def wanting(self) -> int:
        """Bytes to the end of the next message, or of its head: who reads no more than that takes nothing from behind it."""
        if len(self._buffer) < HEAD.size:
            return HEAD.size - len(self._buffer)
        *_, length = HEAD.unpack_from(self._buffer)
        return HEAD.size + int(length) - len(self._buffer)

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with ``data``. Those in front of an error are not lost: it is raised next time.

        Raises:
            ProtocolError: these bytes are no message of this protocol.
        """
        if self._failure is not None:
            raise self._failure
        self._buffer += data
        messages: list[Message] = []
        try:
            while (message := self._next()) is not None:
                messages.append(message)
        except ProtocolError as error:
            if not messages:
                raise
            self._failure = error
        return messages

    def _next(self) -> Message | None:
        if len(self._buffer) < HEAD.size:
            if not MAGIC.startswith(bytes(self._buffer[: len(MAGIC)])):
                raise ProtocolError(f"the peer does not speak our protocol: it begins with {bytes(self._buffer)!r}")
            return None
        magic, version, revision, length = HEAD.unpack_from(self._buffer)
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
        self.revision = revision
        return _parse(body)


def _parse(body: bytes) -> Message:
    """The message in a frame. None costs more than some milliseconds and megabytes, whatever is in it.

    Raises:
        ProtocolError: there is none.
    """
    try:
        if len(body) <= SMALL_BODY:
            return parser.validate_json(body)
        _check_signs(body)
        content = from_json(body)  # a complaint refers to the object, where JSON would be copied for each
        _check_kind(content)
        return parser.validate_python(content)
    except ValidationError as error:
        raise ProtocolError(f"the peer sent a message that is not valid: {_first(error)}") from None
    except ValueError as error:
        raise ProtocolError(f"the peer sent a message that is not valid: Invalid JSON: {error}") from None


def _check_kind(content: object) -> None:
    """What is no name of a kind would be written out in the complaint, however large it is."""
    kind = content.get("type") if isinstance(content, dict) else None
    if not isinstance(kind, str) or len(kind) > MAX_KIND:
        raise ProtocolError("the peer sent a message that is not valid: its type is no short text")


def _check_signs(body: bytes) -> None:
    for sign, limit in MAX_SIGNS.items():
        count = body.count(sign)
        if count > limit:
            raise ProtocolError(
                f"the peer sent a message of {len(body)} bytes with {count} times {sign.decode()!r}: the limit is {limit}"
            )


def _first(error: ValidationError) -> str:
    """What is wrong, in one short line: names and values in it are the peer's, and as long as it likes."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    text = ".".join(str(part) for part in first["loc"]) + ": " + first["msg"]
    return as_ascii(text if len(text) <= MAX_COMPLAINT else text[:MAX_COMPLAINT] + "...")
