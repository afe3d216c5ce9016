"""The values of HIXL's calls: ranges of memory, operations and notifications. Those that are no constants may be changed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum, IntEnum
from operator import attrgetter, index
from typing import Any, Final

from aiodatadist._values.descriptors import Placement
from aiodatadist.errors import ParamInvalid

_UINT64: Final = 1 << 64
MAX_NOTE: Final = 1024
"""The most bytes of a notification's name, and of its message."""


class Exported(IntEnum):
    """The base of enumerations whose members are equal to their numbers, as those that HIXL exports are."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class MemType(Exported):
    """The kind of memory of a range."""

    MEM_DEVICE = 0
    MEM_HOST = 1

    @property
    def placement(self) -> Placement:
        """The same as the rest of this library calls it."""
        return Placement.DEVICE if self is MemType.MEM_DEVICE else Placement.HOST


class TransferOp(Exported):
    """The direction of a transfer, as its caller sees it."""

    READ = 0
    """The peer's memory is read into this end's."""
    WRITE = 1
    """This end's memory is written into the peer's."""


class TransferStatus(Enum):
    """The state of a transfer that was started."""

    WAITING = 0
    COMPLETED = 1
    TIMEOUT = 2
    """Reserved: nothing has it."""
    FAILED = 3

    def __int__(self) -> int:
        return self.value


class AsyncConnectStatus(Exported):
    """The state of a connection that was asked for without waiting."""

    NOT_CONNECT = 0
    CONNECT_PENDING = 1
    CONNECTING = 2
    CONNECTED = 3
    CONNECT_FAILED = 4
    DISCONNECT_PENDING = 5
    DISCONNECTING = 6


def unsigned(value: Any, name: str, limit: int = _UINT64) -> int:
    """Return a whole number below a limit. Raises TypeError if the value is none, as HIXL does."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}: must be an int") from None
    if not 0 <= number < limit:
        raise TypeError(f"{name} is {number}: must be at least 0, and below {limit}")
    return number


def _number(name: str) -> property:
    """Return an attribute that holds an unsigned number of 64 bits."""
    slot = f"_{name}"

    def put(instance: Any, value: Any) -> None:
        setattr(instance, slot, unsigned(value, name))

    return property(attrgetter(slot), put)


class MemDesc:
    """A range of memory.

    Attributes:
        addr: its address.
        len: its number of bytes.

    Raises:
        TypeError: if a number is not an unsigned one of 64 bits.
    """

    __slots__ = ("_addr", "_len")

    addr: property = _number("addr")
    len: property = _number("len")

    def __init__(self, addr: int, len: int) -> None:  # noqa: A002 - HIXL's name
        self._addr = unsigned(addr, "addr")
        self._len = unsigned(len, "len")

    def __repr__(self) -> str:
        return f"MemDesc(addr={self._addr:#x}, len={self._len})"


class TransferOpDesc:
    """A range to be moved.

    Attributes:
        local_addr: its address here.
        remote_addr: its address at the peer.
        len: its number of bytes.

    Raises:
        TypeError: if a number is not an unsigned one of 64 bits.
    """

    __slots__ = ("_len", "_local_addr", "_remote_addr")

    local_addr: property = _number("local_addr")
    remote_addr: property = _number("remote_addr")
    len: property = _number("len")

    def __init__(self, local_addr: int, remote_addr: int, len: int) -> None:  # noqa: A002 - HIXL's name
        self._local_addr = unsigned(local_addr, "local_addr")
        self._remote_addr = unsigned(remote_addr, "remote_addr")
        self._len = unsigned(len, "len")

    def __repr__(self) -> str:
        return f"TransferOpDesc(local_addr={self._local_addr:#x}, remote_addr={self._remote_addr:#x}, len={self._len})"


class NotifyDesc:
    """A notification.

    Attributes:
        name: a text of at most 1024 bytes.
        notify_msg: another one.

    Raises:
        TypeError: if one is no text.
    """

    __slots__ = ("_name", "_notify_msg")

    def __init__(self, name: str, notify_msg: str) -> None:
        self.name = name
        self.notify_msg = notify_msg

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        self._name = _text(value, "name")

    @property
    def notify_msg(self) -> str:
        return self._notify_msg

    @notify_msg.setter
    def notify_msg(self, value: str) -> None:
        self._notify_msg = _text(value, "notify_msg")

    def __repr__(self) -> str:
        return f"NotifyDesc({self._name!r}, {self._notify_msg!r})"


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}: must be a text")
    return value


def columns(op_descs: Sequence[TransferOpDesc]) -> tuple[array[int], array[int], array[int]]:
    """Return local addresses, remote addresses and lengths of a call's ranges.

    Raises:
        TypeError: if an element is no :class:`TransferOpDesc`.
        ParamInvalid: if there is none, or one has no bytes, or an address is 0.
    """
    if not isinstance(op_descs, (list, tuple)):
        raise TypeError(f"op_descs is of type {type(op_descs).__name__}: must be a list of TransferOpDesc")
    if not op_descs:
        raise ParamInvalid("op_descs is empty: must name a range at least")
    try:
        local = array("Q", [desc._local_addr for desc in op_descs])
        remote = array("Q", [desc._remote_addr for desc in op_descs])
        lengths = array("Q", [desc._len for desc in op_descs])
    except AttributeError:
        at = next(i for i, desc in enumerate(op_descs) if not isinstance(desc, TransferOpDesc))
        raise TypeError(f"op_descs[{at}] is {op_descs[at]!r}: must be a TransferOpDesc") from None
    for numbers, name, rule in (
        (local, "local_addr", "an address"),
        (remote, "remote_addr", "an address"),
        (lengths, "len", "at least 1"),
    ):
        if 0 in numbers:
            raise ParamInvalid(f"op_descs[{numbers.index(0)}].{name} is 0: must be {rule}")
    return local, remote, lengths


def note_payload(note: NotifyDesc) -> bytes:
    """Return a notification as it travels: the length of its name in two bytes, the name, the message.

    Raises:
        TypeError: if it is no :class:`NotifyDesc`.
        ParamInvalid: if its name or message is too long.
    """
    if not isinstance(note, NotifyDesc):
        raise TypeError(f"notify is {note!r}: must be a NotifyDesc")
    parts = [note.name.encode("utf-8", "surrogateescape"), note.notify_msg.encode("utf-8", "surrogateescape")]
    for part, name in zip(parts, ("name", "notify_msg"), strict=True):
        if len(part) > MAX_NOTE:
            raise ParamInvalid(f"{name} has {len(part)} bytes: the limit is {MAX_NOTE}")
    return len(parts[0]).to_bytes(2, "big") + parts[0] + parts[1]


def is_note(payload: bytes) -> bool:
    """Return True if these bytes are those of a notification."""
    count = int.from_bytes(payload[:2], "big")
    return count <= MAX_NOTE and 0 <= len(payload) - 2 - count <= MAX_NOTE


def note_of(payload: bytes) -> NotifyDesc:
    """Return the notification that came. Its bytes must be those of one."""
    count = int.from_bytes(payload[:2], "big")
    name, message = payload[2 : 2 + count], payload[2 + count :]
    return NotifyDesc(name.decode("utf-8", "surrogateescape"), message.decode("utf-8", "surrogateescape"))
