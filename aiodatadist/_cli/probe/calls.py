"""Calls of the vendor's functions.

Each is reported to the parent before and after, so a call that hangs is the last one reported.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from aiodatadist._cli.probe.report import Call
from aiodatadist._native.library import ffi

if TYPE_CHECKING:
    from aiodatadist._native.runtime import Runtime


class UnexpectedCode(Exception):
    """A call that must succeed for a step to continue did not return 0."""

    def __init__(self, call: Call) -> None:
        super().__init__(f"{call.function} returned {call.code}" + (f": {call.words}" if call.words else ""))


class Tell:
    """A sender of JSON lines to the parent, from any thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._turn = threading.Lock()

    def __call__(self, **line: Any) -> None:
        data = json.dumps(line).encode() + b"\n"
        with self._turn:
            while data:
                data = data[os.write(self._fd, data) :]


class Calls:
    """The functions of a runtime, whose calls are reported."""

    def __init__(self, runtime: Runtime, tell: Tell) -> None:
        self.runtime = runtime
        self._tell = tell
        self._number = 0
        self._turn = threading.Lock()

    def raw(self, function: str) -> Any:
        """Return the function itself, for calls that are not reported one by one: see :meth:`sum_up`."""
        return getattr(self.runtime.acl if function.startswith("acl") else self.runtime.hccl, function)

    def timed(self, function: str, *arguments: Any, note: str = "") -> Call:
        """Call it, whatever it returns. ``note`` is reported instead of arguments that say little."""
        with self._turn:
            self._number += 1
            number = self._number
        call = Call(function=function, arguments=note or ", ".join(map(_shown, arguments)))
        self._tell(begin=number, call=call.model_dump())
        began = time.perf_counter_ns()
        code = self.raw(function)(*arguments)
        call.microseconds = (time.perf_counter_ns() - began) // 1000
        call.code = code if isinstance(code, int) else None
        if call.code:
            call.words = self.runtime.recent_words()
        self._tell(end=number, call=call.model_dump())
        return call

    def code(self, function: str, *arguments: Any, note: str = "") -> int:
        return self.timed(function, *arguments, note=note).code or 0

    def ok(self, function: str, *arguments: Any, note: str = "") -> Call:
        """Call the function.

        Raises:
            UnexpectedCode: if it did not return 0.
        """
        call = self.timed(function, *arguments, note=note)
        if call.code:
            raise UnexpectedCode(call)
        return call

    def sum_up(self, function: str, times: int, codes: dict[int, int], microseconds: int) -> None:
        """Report many equal calls at once. ``codes`` has the number of times that each code was returned."""
        said = ", ".join(f"{code} {count} times" for code, count in sorted(codes.items()))
        last = max(codes, default=0)
        call = Call(function=function, arguments=f"{times} calls: {said}", code=last, microseconds=microseconds)
        self._tell(end=0, call=call.model_dump())


def _shown(value: Any) -> str:
    """Return an argument as a report may show it: a number as it is, anything else only by its type."""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, bytes):
        return f"text of {len(value)} bytes"
    return "NULL" if value == ffi.NULL else "pointer"
