"""``GlobalResourceConfig``: a JSON object with flat keys, each checked, with its effect or the reason why it has none."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from aiodatadist.errors import ParamInvalid

PROTOCOLS: Final = frozenset(
    {"roce:device", "hccs:device", "ub_ctp:device", "ub_rtp:device", "uboe:device", "roce:host", "ub_ctp:host"}
)
MAX_FILE: Final = 1 << 20
_TIB: Final = 1024


class ResourceFile(NamedTuple):
    """A file whose text stands for an option."""

    path: str

    def read_text(self) -> str:
        """Return its text. Raises ParamInvalid if it cannot be read as a file of 1 byte to 1 MiB, or is a symlink."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ParamInvalid(f"local_comm_res_path is {self.path!r}: it cannot be read: {error.strerror}") from None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or not 1 <= found.st_size <= MAX_FILE:
                raise ParamInvalid(f"local_comm_res_path is {self.path!r}: must be a file of 1 to {MAX_FILE} bytes")
            return os.read(fd, MAX_FILE).decode()
        except UnicodeDecodeError:
            raise ParamInvalid(f"local_comm_res_path is {self.path!r}: must be text in UTF-8") from None
        finally:
            os.close(fd)


@dataclass(slots=True)
class Resources:
    """The parsed ``GlobalResourceConfig``.

    Attributes:
        connect_threads: the number of connections that are made without waiting, at a time.
        connect_queue: the number of those that wait.
        protocols: the protocols that may be used; empty if all may.
        max_channels: the number of connections at which idle ones are closed; 0 if there is no limit.
        high_mark, low_mark: the numbers of connections above which idle ones are closed, and down to which.
        local_comm_res_path: a file that stands for ``LocalCommRes``; None if there is none.
        remarks: a line for each key that was given and changes nothing here, with the reason.
    """

    connect_threads: int = 2
    connect_queue: int = 128
    protocols: tuple[str, ...] = ()
    max_channels: int = 0
    high_mark: int = 0
    low_mark: int = 0
    local_comm_res_path: ResourceFile | None = None
    remarks: list[str] = field(default_factory=list)


def _whole(lowest: int, highest: int) -> Callable[[str, Any], int]:
    def read(key: str, value: Any) -> int:
        number = value
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 12:
            number = int(value)
        if not isinstance(number, int) or isinstance(number, bool) or not lowest <= number <= highest:
            raise ParamInvalid(f"{key} is {value!r}: must be a whole number in [{lowest}, {highest}]")
        return number

    return read


def _share(key: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise ParamInvalid(f"{key} is {value!r}: must be a number above 0 and below 1")
    return number


def _flag(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false", "1", "0"):
        return value in ("true", "1")
    raise ParamInvalid(f"{key} is {value!r}: must be true or false")


def _protocols(key: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(name, str) and name in PROTOCOLS for name in names)
    ):
        raise ParamInvalid(f"{key} is {value!r}: must be one or a list of {', '.join(sorted(PROTOCOLS))}")
    return tuple(names)


def _path(key: str, value: Any) -> ResourceFile:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ParamInvalid(f"{key} is {value!r}: must be the path of a file")
    return ResourceFile(value)


_POOL, _COMM, _FABRIC = "channel_pool.", "comm_resource_config.", "fabric_memory."
_READERS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "connect_pool.thread_num": _whole(1, 64),
    "connect_pool.task_queue_capacity": _whole(1, 65535),
    f"{_COMM}protocol_desc": _protocols,
    f"{_COMM}listen_port": _whole(1, 65535),
    f"{_COMM}qos": _whole(0, 7),
    f"{_COMM}max_active_channels": _whole(1, 2**31 - 1),
    f"{_POOL}max_channel": _whole(1, 512),
    f"{_POOL}high_waterline": _share,
    f"{_POOL}low_waterline": _share,
    f"{_FABRIC}max_capacity": _whole(1, _TIB),
    f"{_FABRIC}start_address": _whole(0, _TIB),
    f"{_FABRIC}task_stream_num": _whole(1, 8),
    f"{_FABRIC}enable_aicpu_unfold": _flag,
    "local_comm_res_path": _path,
}

WITHOUT_EFFECT: Final = {
    f"{_COMM}listen_port": "the port of a card is HCCL's: it chooses one",
    f"{_COMM}qos": "communicators have rdma_service_level instead",
    f"{_COMM}max_active_channels": "a link takes one channel, and opens no more streams than it uses",
    f"{_COMM}protocol_desc": "the protocol of a link is HCCL's choice, from HCCL_INTRA_ROCE_ENABLE and the machine",
    f"{_FABRIC}max_capacity": "there is no fabric memory here",
    f"{_FABRIC}start_address": "there is no fabric memory here",
    f"{_FABRIC}task_stream_num": "there is no fabric memory here",
    f"{_FABRIC}enable_aicpu_unfold": "there is no fabric memory here",
}
"""The keys that are checked and kept but change nothing, with the reason for each."""


def read_resources(value: Any, name: str) -> Resources:
    """Return what the object says. Keys that HIXL does not know are ignored, as it does, and remarked upon.

    Raises:
        ParamInvalid: if it is no object, or a value breaks its rule.
    """
    if not isinstance(value, Mapping):
        raise ParamInvalid(f"{name} is {value!r}: must be a JSON object")
    read = {key: _READERS[key](f"{name}: {key}", each) for key, each in value.items() if key in _READERS}
    found = Resources(
        read.get("connect_pool.thread_num", 2),
        read.get("connect_pool.task_queue_capacity", 128),
        read.get(f"{_COMM}protocol_desc", ()),
        local_comm_res_path=read.get("local_comm_res_path"),
    )
    _read_pool(found, read, name)
    found.remarks = [f"{name}: {key} has no effect: {WITHOUT_EFFECT[key]}" for key in read if key in WITHOUT_EFFECT]
    found.remarks += [f"{name}: {key!r} has no effect: HIXL has no such key" for key in value if key not in _READERS]
    return found


def _read_pool(found: Resources, read: Mapping[str, Any], name: str) -> None:
    """Read the pool of connections: how many there may be, and when idle ones are closed."""
    marks = [read.get(f"{_POOL}{mark}_waterline") for mark in ("high", "low")]
    if not any(key.startswith(_POOL) for key in read):
        return
    if (marks[0] is None) != (marks[1] is None):
        raise ParamInvalid(f"{name}: channel_pool.high_waterline and low_waterline must be given together")
    most = read.get(f"{_POOL}max_channel", 512)
    found.max_channels = found.high_mark = found.low_mark = most
    if marks[0] is not None and marks[1] is not None:
        if marks[1] >= marks[0]:
            raise ParamInvalid(
                f"{name}: channel_pool.low_waterline is {marks[1]}: must be below {marks[0]}, high_waterline"
            )
        found.high_mark, found.low_mark = (max(1, int(most * mark)) for mark in marks)
