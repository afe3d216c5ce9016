"""The C half of a stream: a ring on a device, or whatever has the same calls; and its limits."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiodatadist._native.library import Handle, ffi, ring
from aiodatadist._native.runtime import Runtime, acl_error


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The limits with which a stream drives its device.

    Attributes:
        depth: programs handed to C at a time; more wait in Python. A quarter of them is for work that is not background
            work, half of that for critical work.
        is_serial: True if a program is handed to C only when the one before it of the same priority has ended.
        window: bytes given to the device between two looks at the cancel flag, or 192 ranges if they have fewer bytes.
            Two windows are under way at a time. 8 MiB is about 1 ms at memory speed. Background work on a serial stream
            has a quarter of that, because all urgent work waits for it.
        background: seconds that such a smaller window may take: a slow link has smaller ones, but at least an eighth of
            the quarter.
        inline: programs up to this number of bytes run in the submitting call if the stream is idle: waking another
            core, and being woken, costs about 100 us, as much as copying a MiB does. 0 on an NPU, where a call's cost
            is not known.
        inline_seconds: programs that are expected to take longer do not: by their ranges, and by what earlier ones took.
        patience: seconds from a cancellation to the abort. Two windows take about 2 ms at memory speed, 5 ms at 25
            Gbit/s.
        abort: seconds that the abort may take: at least 15 ms on an NPU, and a minute at most.
        grace: seconds that the device has to let go after an abort.
    """

    depth: int = 128
    is_serial: bool = False
    window: int = 8 << 20
    background: float = 150e-6
    inline: int = 8 << 20
    inline_seconds: float = 450e-6
    patience: float = 0.03
    abort: float = 60.0
    grace: float = 1.0

    @property
    def quiesce(self) -> float:
        """Seconds from a cancellation or a time limit until it is decided if bytes can still land."""
        return self.patience + self.abort + 4 * self.grace  # C takes up to three times the grace after the rest


@dataclass(frozen=True, slots=True)
class RingCalls:
    """The calls of one kind of ring. ``native/ring.h`` has their parameters and meaning, under these names."""

    submit_as: Callable[..., Any]
    cancel: Callable[..., Any]
    watch: Callable[..., Any]
    overdue: Callable[..., Any]
    reap: Callable[..., Any]
    fd: Callable[..., Any]
    close: Callable[..., Any]
    free: Callable[..., Any]


DEVICE_RING = RingCalls(
    ring.ring_submit_as, ring.ring_cancel, ring.ring_watch, ring.ring_overdue, ring.ring_reap, ring.ring_fd, ring.ring_close,
    ring.ring_free,
)  # fmt: skip
"""The calls of a ring that gives its programs to a stream of a device."""


def open_device_ring(runtime: Runtime, context: Handle, limits: StreamLimits) -> Handle:
    """Return a new ring on a device. Raises LLMException if there is no memory, descriptor or stream for it."""
    options = ffi.new("ring_options *")
    options.depth = limits.depth
    options.serial = limits.is_serial
    options.background_bytes = limits.window // 4 if limits.is_serial else 0
    options.background_us = round(1e6 * limits.background)
    options.window_bytes = limits.window
    options.inline_bytes = limits.inline if runtime.is_soft else 0
    options.inline_us = round(1e6 * limits.inline_seconds)
    options.grace_ms = max(1, round(limits.grace * 1000))
    options.patience_ms = max(1, round(limits.patience * 1000))
    options.abort_ms = max(1, round(limits.abort * 1000))
    out = ffi.new("ring **")
    runtime.recent_words()  # discarded: the words of an earlier call explain nothing here
    if code := ring.ring_open(runtime.ring_driver, context, options, out):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        words = f"a stream takes memory and a file descriptor, and RLIMIT_NOFILE is {limit}"
        raise acl_error("ring_open", code, runtime.recent_words() or words)
    return out[0]
