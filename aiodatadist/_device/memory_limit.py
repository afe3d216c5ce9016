"""The container's memory limit: the kernel kills a process that uses more, without a message.

A pool is mapped when it is opened and gets its pages when they are first written to, which may be hours later. So the
limit is compared with what is asked for, not with what is in use.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from aiodatadist.errors import OutOfMemory

logger = logging.getLogger(__name__)

OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
UNLIMITED: Final = 1 << 62
"""The value from which a limit means "no limit": the older hierarchy says that with a number near 2^63."""
IN_USE: Final = frozenset({"anon", "shmem", "total_rss", "total_shmem"})
"""Lines of ``memory.stat``, in either hierarchy, with bytes that the kernel cannot recover by dropping a page cache."""


class MemoryLimit(NamedTuple):
    """A limit, the bytes in use by all processes that share it, and the file with the limit."""

    limit: int
    used: int
    file: str


def memory_limit() -> MemoryLimit | None:
    """Return the smallest limit of the control groups that this process is in; None if there is none."""
    limits = [found for file in _files() if (found := _number(file)) is not None]
    if not limits:
        return None
    limit, file = min(limits)
    return MemoryLimit(limit, _in_use(file.with_name("memory.stat")), str(file))


def check_memory_limit(nbytes: int, others: int) -> None:
    """Compare an allocation of host memory with the limit, and warn if other memory in use leaves no room for it.

    Args:
        nbytes: bytes of this allocation.
        others: bytes of earlier allocations, which may not have their pages yet.

    Raises:
        OutOfMemory: if they exceed the limit together.
    """
    if (found := memory_limit()) is None:
        return
    total = nbytes + others
    if total > found.limit:
        raise OutOfMemory(
            f"{nbytes} bytes asked for, {total} bytes in all: more than the memory limit of this container, "
            f"{found.limit} bytes ({found.file}); the kernel would kill the process when they are used"
        )
    if nbytes + found.used > found.limit:
        logger.warning(
            "%d bytes asked for, and %d bytes are in use: together more than the memory limit of this container, %d bytes "
            "(%s); the kernel may kill the process when they are used",
            nbytes,
            found.used,
            found.limit,
            found.file,
        )


def _files() -> Iterator[Path]:
    """Yield the files with limits, from this process's groups up to their roots."""
    for line in _text(OWN_GROUPS).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            root, name = GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.strip("/")
        yield from (folder / name for folder in (group, *group.parents) if folder.is_relative_to(root))


def _number(file: Path) -> tuple[int, Path] | None:
    text = _text(file).strip()
    return (int(text), file) if text.isdecimal() and int(text) < UNLIMITED else None


def _in_use(stat: Path) -> int:
    rows = (line.split() for line in _text(stat).splitlines())
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in IN_USE and row[1].isdecimal())


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:  # no such group here: another mount, or no permission
        return ""
