"""The one reader of input from outside: what it refuses, in how few words, and how little that costs whatever it is given.

Costs are counted: bytes that Python holds at most, values that were looked at, errors that were made.
"""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, TypeAdapter

from aiodatadist._values import foreign
from aiodatadist._values.foreign import (
    MAX_DEPTH,
    MAX_NAMES,
    MAX_VALUES,
    SMALL,
    Unreadable,
    printable,
    read_foreign,
    shown,
)

LIMIT_BYTES, LIMIT_CHARS = 256 << 10, 256
MIB = 10.0
LINE = re.compile(r"[\x20-\x7e]{1,300}")


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    host: Annotated[str, Field(max_length=16)]
    port: Annotated[int, Field(ge=1, le=65535)] = 1
    seconds: float = 1.0
    numbers: Annotated[tuple[int, ...], Strict(False), Field(max_length=1 << 16), FailFast()] = ()


class Near(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["near"]
    inner: Place | None = None


class Far(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["far"]


EITHER: TypeAdapter[Near | Far] = TypeAdapter(Annotated[Near | Far, Field(discriminator="kind")])


def read(data: object, model: Any = Place) -> Any:
    return read_foreign(data, model, limit_bytes=LIMIT_BYTES, limit_chars=LIMIT_CHARS)


def refused(data: object, model: Any = Place) -> Unreadable:
    with pytest.raises(Unreadable) as caught:
        read(data, model)
    assert LINE.fullmatch(str(caught.value)), str(caught.value)
    return caught.value


# ---- what is well-formed ----


@pytest.mark.parametrize("padding", [0, SMALL], ids=["small", "large"])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_json_and_objects_are_read_alike(kind: Callable[[bytes], Any], padding: int) -> None:
    content = {"host": "a", "port": 7, "seconds": 0.5, "numbers": [1, 2, 3]}
    expected = Place(host="a", port=7, seconds=0.5, numbers=(1, 2, 3))
    assert read(kind(json.dumps(content).encode() + b" " * padding)) == expected
    assert read(content) == expected
    assert read(expected.model_dump()) == expected


def test_a_union_is_told_apart_by_its_kind() -> None:
    for data in (b'{"kind":"near"}', {"kind": "near"}, b'{"kind":"near"}' + b" " * SMALL):
        assert read(data, EITHER) == Near(kind="near")


def test_the_largest_list_of_numbers_is_read() -> None:
    numbers = [*range(10_000, 50_000)]
    assert read({"host": "a", "numbers": numbers}).numbers == tuple(numbers)
    assert read(json.dumps({"host": "a", "numbers": numbers}, separators=(",", ":")).encode()).numbers == tuple(numbers)


def test_of_a_name_that_is_there_twice_the_last_value_counts() -> None:
    for padding in (b"", b" " * SMALL):
        assert read(b'{"host":"a","host":"b"}' + padding).host == "b"


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
CONTENT = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(CONTENT)
def test_whatever_json_has_is_read_or_refused_in_a_line(content: Any) -> None:
    for data in (content, json.dumps(content).encode()):
        refused(data)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_json_are_refused_in_a_line(data: bytes) -> None:
    refused(data)
    refused(data + b" " * SMALL)


# ---- what is a bomb ----


JSON: dict[str, Callable[[], bytes]] = {
    "deep lists": lambda: b"[" * LIMIT_BYTES,
    "deep objects": lambda: b'{"":' * (LIMIT_BYTES // 4),
    "deep lists that end": lambda: b"[" * 1000 + b"]" * 1000 + b" " * SMALL,
    "a huge number": lambda: b'{"host":' + b"9" * 200_000 + b"}",
    "numbers as long as Python reads them": lambda: b'{"numbers":[' + b",".join([b"9" * 4300] * 60) + b"]}",
    "a huge exponent": lambda: b'{"seconds":1e' + b"9" * 200_000 + b"}",
    "unknown names beyond the size": lambda: b"{" + b",".join(b'"%x":0' % i for i in range(100_000)) + b"}",
    "unknown names": lambda: b"{" + b",".join(b'"%x":0' % i for i in range(20_000)) + b"}",
    "few unknown names": lambda: b"{" + b",".join(b'"%x":0' % i for i in range(1000)) + b"}",
    "the same name": lambda: b"{" + b",".join([b'"host":""'] * 25_000) + b"}",
    "a giant text": lambda: b'{"host":"' + b"x" * 250_000 + b'"}',
    "a giant name": lambda: b'{"' + b"x" * 250_000 + b'":0}',
    "escapes": lambda: b'{"host":"' + b"\\u0001" * 40_000 + b'"}',
    "quotes in a text": lambda: b'{"host":"' + b'\\"' * 100_000 + b'"}',
    "empty texts": lambda: b'{"numbers":[' + b",".join([b'""'] * 80_000) + b"]}",
    "empty lists": lambda: b'{"numbers":[' + b",".join([b"[]"] * 80_000) + b"]}",
    "empty objects": lambda: b'{"numbers":[' + b",".join([b"{}"] * 80_000) + b"]}",
    "wrong numbers": lambda: b'{"numbers":[' + b",".join([b"0.5"] * 60_000) + b"]}",
    "nulls": lambda: b"[" + b",".join([b"null"] * 50_000) + b"]",
    "no UTF-8": lambda: b'{"host":"' + b"\xff" * 250_000 + b'"}',
    "no UTF-8 in a name": lambda: b'{"\xc3\x28":0}',
    "a lone surrogate": lambda: b'{"host":"\\ud800"}',
    "NaN": lambda: b'{"host":"a","seconds":NaN}',
    "NaN behind a scan": lambda: b'{"host":"a","seconds":NaN}' + b" " * SMALL,
    "infinity": lambda: b'{"host":"a","seconds":-Infinity}',
    "blanks": lambda: b" " * LIMIT_BYTES,
    "nothing": lambda: b"",
    "a byte more than the limit": lambda: b'{"host":"a"}' + b" " * LIMIT_BYTES,
}


def deep() -> Any:
    inner: Any = []
    for _ in range(100_000):
        inner = [inner]
    return inner


def endless() -> Any:
    inner: list[Any] = []
    inner.append(inner)
    return inner


OBJECTS: dict[str, Callable[[], Any]] = {
    "deep lists": deep,
    "a list in itself": endless,
    "a hundred thousand names": lambda: {str(i): 0 for i in range(100_000)},
    "names that are no texts": lambda: {1: 2},
    "a giant text": lambda: {"host": "x" * 10_000_000},
    "a giant name": lambda: {"x" * 10_000_000: 0},
    "a giant number": lambda: {"host": "a", "port": 1 << 10_000_000},
    "giant numbers": lambda: {"host": "a", "numbers": [1 << 100_000] * 1000},
    "a million numbers": lambda: {"host": "a", "numbers": [7] * 1_000_000},
    "a million texts": lambda: {"host": "a", "numbers": [""] * 1_000_000},
    "many texts": lambda: {"host": "a", "numbers": [""] * 60_000},
    "numbers and a text": lambda: {"host": "a", "numbers": [7] * 60_000 + [""]},
    "NaN": lambda: {"host": "a", "seconds": float("nan")},
    "infinity": lambda: {"host": "a", "seconds": float("-inf")},
    "a set": lambda: {"host": "a", "numbers": {1}},
    "bytes": lambda: {"host": b"a"},
    "control characters": lambda: {"host": "\x1b[2J\r\nWARNING all is well\u202e"},
    "a name with control characters": lambda: {"\x1b[2J\r\n": 1},
    "nothing": lambda: None,
}


def cost_of(call: Callable[[], object]) -> float:
    """Return the most MiB of Python's memory that the call takes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("model", [Place, EITHER], ids=["model", "union"])
@pytest.mark.parametrize("name", JSON)
def test_a_bomb_of_json_costs_little(name: str, model: Any) -> None:
    data, errors = JSON[name](), []
    assert cost_of(lambda: errors.append(refused(data, model))) < MIB
    assert errors[0].error is None or errors[0].error.error_count() <= MAX_NAMES + 8


@pytest.mark.parametrize("name", OBJECTS)
def test_a_bomb_of_objects_costs_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, errors, looked = OBJECTS[name](), [], 0
    look = foreign.Scan.look

    def counted(self: Any, value: object) -> Any:
        nonlocal looked
        looked += 1
        return look(self, value)

    monkeypatch.setattr(foreign.Scan, "look", counted)
    assert cost_of(lambda: errors.append(refused(data))) < 1
    assert looked <= MAX_VALUES + 1
    assert errors[0].error is None or errors[0].error.error_count() <= len(Place.model_fields)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"host": "x" * 257}, "it has a text of 257 characters: the limit is 256"),
        ({"host": "x" * 17}, "host is 'xxxxxxxxxxxxxxxxx': String should have at most 16 characters"),
        ({"host": "a", "port": "\n"}, r"port is '\n': Input should be a valid integer"),
        ({"host": "a", "numbers": [1, "1"]}, "numbers.1 is '1': Input should be a valid integer"),
        ({"port": 1}, "host: Field required"),
        ({str(i): 0 for i in range(65)}, "it has an object of 65 names: the limit is 64"),
        ([0] * 200_000, "it has more than 262144 bytes"),
        ({"host": {1}}, "it has a set: JSON has no such value"),
        (b"[" * 262145, "it has 262145 bytes: the limit is 262144"),
        (b"[" * 2049 + b" " * SMALL, "it has 18433 bytes with 2049 times '[': the limit is 2048"),
    ],
)
def test_a_refusal_says_what_the_limit_is(data: object, words: str) -> None:
    assert str(refused(data)) == words


def test_what_is_deeper_than_the_limit_is_refused() -> None:
    class Whatever(BaseModel):
        inner: object

    deep: Any = None
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert read({"inner": deep}, Whatever) is not None
    assert (
        str(refused({"inner": [deep]}, Whatever))
        == f"it has lists or objects nested too deeply: the limit is {MAX_DEPTH}"
    )


def test_a_kind_that_is_no_short_text_is_not_written_out() -> None:
    for kind in ([1] * 10_000, {"a": 1}, "x" * 65, None):
        assert "must be a text of at most 64 characters" in str(refused({"kind": kind}, EITHER))


# ---- what is shown ----


@given(st.text() | st.binary() | st.integers(), st.sampled_from([1, 3, 10, 300]))
def test_anything_becomes_printable_and_short(value: object, limit: int) -> None:
    for text in (printable(value, limit), printable(ValueError(value), limit)):
        assert len(text) <= limit
        assert all(" " <= char <= "~" for char in text)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=300))
def test_plain_text_stays(text: str) -> None:
    assert printable(text) == text


@given(st.text(max_size=400))
def test_what_was_printable_once_stays(text: str) -> None:
    assert printable(printable(text)) == printable(text)


def test_other_characters_are_escaped_and_a_cut_is_shown() -> None:
    assert printable("a\nb\N{SNOWMAN}\x1b[2J\u202e\x85\x7f") == r"a\nb\u2603\x1b[2J\u202e\x85\x7f"
    assert printable("x" * 301) == "x" * 297 + "..."
    assert printable("x" * 10, 5) == "xx..."
    assert printable(b"a\xff\n") == r"a\xff\n"
    assert printable(1 << 10_000) == "an int of 10001 bits"
    assert printable(ConnectionError("no\nroute")) == r"no\nroute"


@pytest.mark.parametrize(
    "value",
    ["x" * 10**7, ["x" * 10**6] * 100, [[["x"] * 1000] * 1000] * 100, {"x" * 10**6: 1}, 1 << 10**6, b"\n" * 10**7],
    ids=["text", "texts", "lists", "object", "number", "bytes"],
)
def test_a_value_is_shown_in_a_few_characters(value: object) -> None:
    texts: list[str] = []
    assert cost_of(lambda: texts.append(shown(value))) < 0.1
    assert len(texts[0]) <= 64
    assert all(" " <= char <= "~" for char in texts[0])


@pytest.mark.parametrize(("depth", "width"), [(1000, 1), (8, 32), (3, 64)])
def test_of_a_list_in_lists_only_the_outermost_is_shown(
    depth: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's JSON can nest as deeply as its parser allows, and a value that is shown was perhaps not scanned."""
    value: object = 1
    for _ in range(depth):
        value = [value] * width
    calls = 0

    def counted(*arguments: Any) -> str:
        nonlocal calls
        calls += 1
        return printable(*arguments)

    monkeypatch.setattr(foreign, "printable", counted)
    text = shown(value)
    assert text == printable("[" + ", ".join(["[...]"] * min(width, 32)) + "]", 64)
    assert calls == 1
    assert shown([[], (1,), "a", 2.5, None]) == "[[...], [...], 'a', 2.5, None]"


def test_a_mapping_is_counted_and_not_shown() -> None:
    class Odd(Mapping[str, int]):
        def __getitem__(self, name: str) -> int:
            raise AssertionError("nothing in it is looked at")

        def __iter__(self) -> Any:
            raise AssertionError("nothing in it is looked at")

        def __len__(self) -> int:
            return 3

    assert shown(Odd()) == "an object of 3 names"
