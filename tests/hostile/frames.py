"""Frames as large and as unkind as they may be, and what each costs: run as a program it prints those that cost too much.

Every kind of message has each of its fields, one at a time, replaced by each hostile value; besides, fields that are unknown,
there twice, or missing. Each frame is read in a child of its own, so that its memory is its own.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

from aiodatadist._values.foreign import MAX_SIGNS, SMALL
from aiodatadist._wire.frames import HEAD, MAGIC, MAX_BODY, VERSION, Decoder, encode
from aiodatadist._wire.messages import Bye, Message
from aiodatadist.errors import ProtocolError
from tests.unit.wire.examples import EACH

MILLISECONDS, MIB = float(os.environ.get("AIODATADIST_FRAME_MILLISECONDS", "10")), 10.0
"""What a frame may cost; more where other processes have the core, its caches and its frequency as well."""
SPARE = 600
"""Bytes for the rest of a message, around its hostile part."""
TRIES = 4
"""The least of so many counts: a neighbour on the same core makes any of them longer."""

Maker = Callable[[int], bytes]
Fields = Callable[[Message], list[str]]
"""Which fields of a message are replaced."""


def repeated(element: bytes) -> Maker:
    return lambda room: b"[" + b",".join([element] * (room // (len(element) + 1))) + b"]"


def as_many_as_are_let_in(element: bytes) -> Maker:
    """Make lists that are just within the limits of what is looked for first."""

    def make(room: int) -> bytes:
        counts = [room // (len(element) + 1), MAX_SIGNS[b","] - 64]
        counts += [(limit - 40) // element.count(sign) for sign, limit in MAX_SIGNS.items() if sign in element]
        return b"[" + b",".join([element] * min(counts)) + b"]"

    return make


VALUES: dict[str, Maker] = {
    **{f"list of {name}": repeated(each) for name, each in {
        "empty texts": b'""', "lists": b"[]", "objects": b"{}", "zeros": b"0", "nulls": b"null", "minus one": b"-1",
        "yes": b"true", "large numbers": b"18446744073709551615", "forty digits": b"9" * 40, "4300 digits": b"9" * 4300,
        "floats": b"1.7976931348623157e308",
    }.items()},
    **{f"permitted list of {name}": as_many_as_are_let_in(each) for name, each in {
        "empty texts": b'""', "lists": b"[]", "objects": b"{}", "zeros": b"0", "nulls": b"null",
        "large numbers": b"18446744", "nine digits": b"999999999",
    }.items()},
    "deep lists": lambda room: b"[" * room,
    "deep objects": lambda room: b'{"":' * (room // 5),
    "closed deep lists": lambda room: b"[" * 60 + b"]" * 60,
    "a huge number": lambda room: b"9" * room,
    "a huge fraction": lambda room: b"0." + b"1" * (room - 2),
    "a huge exponent": lambda room: b"1e" + b"9" * (room - 2),
    "a long text": lambda room: b'"' + b"x" * (room - 2) + b'"',
    "base64": lambda room: b'"' + b"A" * (room // 4 * 4 - 4) + b'"',
    "escapes": lambda room: b'"' + b"\\u0000" * (room // 6 - 1) + b'"',
    "no UTF-8": lambda room: b'"' + b"\xff" * (room - 2) + b'"',
    "spaces": lambda room: b" " * room,
    "unknown fields": lambda room: b"{" + b",".join(b'"%x":0' % i for i in range(room // 10)) + b"}",
    "the same field": lambda room: b"{" + b",".join([b'"":0'] * (room // 5 - 1)) + b"}",
}  # fmt: skip


FEW = ("list of empty texts", "permitted list of large numbers", "unknown fields")


def members(message: dict[str, Any], without: str = "") -> list[bytes]:
    return [
        json.dumps(name).encode() + b":" + json.dumps(value).encode()
        for name, value in message.items()
        if name != without
    ]


def with_field(others: list[bytes], field: str, make: Maker, room: int) -> bytes:
    return b"{" + b",".join([*others, json.dumps(field).encode() + b":" + make(room)]) + b"}"


def with_more(others: list[bytes], make: Maker, room: int) -> bytes:
    return b"{" + b",".join([*others, make(room)]) + b"}"


def more(kind: str) -> dict[str, Maker]:
    """Return makers of content that a message of this kind does not have."""
    again = b'"type":"%s"' % kind.encode()
    return {
        "unknown fields": lambda room: b",".join(b'"%x":0' % i for i in range(room // 10)),
        "permitted unknown fields": lambda room: b",".join(b'"%x":0' % i for i in range(min(110, room // 10))),
        "its type again and again": lambda room: b",".join([again] * (room // (len(again) + 1))),
        "an endless name": lambda room: b'"' + b"x" * (room - 10) + b'":0',
    }


def every_field(message: Message) -> list[str]:
    return list(type(message).model_fields)


def one_of_each_type(message: Message) -> list[str]:
    """Return the first of its fields of each JSON type: reading one costs what reading the others does."""
    properties = type(message).model_json_schema()["properties"]
    types = {str(sorted(re.findall(r"'type': '(\w+)'", str(properties[name])))): name for name in reversed(properties)}
    return list(types.values())


def bodies(room: int, kinds: Container[str], fields: Fields) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield names of frames, and functions that make their bodies, of about ``room`` bytes each.

    Chosen fields of chosen kinds get every value. Other kinds get one of three values in turn for their last field, and one
    as an unknown field: what is done before the kind is known, and with unknown fields, is the same for all kinds. With every
    field of the chosen kinds, other kinds get all of that, too.
    """
    for shape, make in VALUES.items():
        yield f"{shape} for a message", partial(make, room - 8)
    for number, example in enumerate(EACH):
        message, kind, left = json.loads(example.model_dump_json()), example.type, room - SPARE
        is_chosen = kind in kinds
        is_whole = is_chosen or fields is every_field
        for shape in VALUES if is_chosen else FEW if is_whole else FEW[number % len(FEW) :][:1]:
            for field in fields(example) if is_chosen else ["type", list(message)[-1]][not is_whole :]:
                yield (
                    f"{kind} with {shape} for {field}",
                    partial(with_field, members(message, field), field, VALUES[shape], left),
                )
        for what, extra in more(kind).items() if is_whole else []:
            yield f"{kind} with {what}", partial(with_more, members(message), extra, left)
        for shape in FEW if is_whole else FEW[-1:]:
            yield (
                f"{kind} with nothing but {shape}",
                partial(with_field, members({"type": kind}), "more", VALUES[shape], left),
            )


def peak() -> float:
    """Return the largest memory in use since the last reset, in MiB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def cost(body: bytes) -> tuple[float, float]:
    """Return the CPU milliseconds and MiB that reading a body costs. It is a message or a ProtocolError."""
    frame = HEAD.pack(MAGIC, VERSION, len(body)) + body
    used, least = 0.0, float("inf")
    for attempt in range(TRIES):
        decoder = Decoder()
        if not attempt:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            used = peak()
        start = process_time()
        try:
            decoder.feed(frame)
        except ProtocolError as error:
            str(error)
        least = min(least, (process_time() - start) * 1e3)
        if not attempt:
            used = peak() - used
        if least < MILLISECONDS / 2:
            break
    return least, used


def in_a_child(name: str, make: Callable[[], bytes]) -> str:
    """Decode a frame in a forked child and return what is too much about it."""
    back, out = os.pipe()
    child = os.fork()
    if not child:
        try:
            body = make()
            milliseconds, used = cost(body) if len(body) <= MAX_BODY else (0.0, 0.0)
            words = (
                f"{name}: {milliseconds:.1f} ms, {used:.1f} MiB" if milliseconds > MILLISECONDS or used > MIB else ""
            )
        except BaseException as error:
            words = f"{name}: {error!r}"
        os.write(out, words.encode())
        os._exit(0)
    os.close(out)
    with open(back, "rb") as answer:  # noqa: PTH123 - a descriptor
        words = answer.read().decode()
    os.waitpid(child, 0)
    return words


def main(room: int, kinds: Container[str], fields: Fields) -> None:
    Decoder().feed(encode(Bye()))
    gc.freeze()  # a collection in a child would copy every page with an object of this process
    tried = 0
    for name, make in bodies(room, kinds, fields):
        tried += 1
        if words := in_a_child(name, make):
            print(words, flush=True)
    print(f"{tried} frames of {room} bytes")


if __name__ == "__main__":
    _, size, which, *named = sys.argv
    main(
        {"large": MAX_BODY, "small": SMALL}[size],
        named or [example.type for example in EACH],
        {"each": one_of_each_type, "all": every_field}[which],
    )
