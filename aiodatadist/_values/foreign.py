"""Input from outside: one function that reads all of it, and one that makes it safe to show.

Frames, offers, tickets, push messages, bootstrap lines and headers of pool values come from outside. Whatever they
contain, reading one takes at most 10 ms and 10 MiB, and a refusal is one short line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from typing import Any, Final, TypeVar, overload

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

SHOWN: Final = 300
"""The longest text from outside in a log line, an error, a span or a label, in characters."""
SHOWN_VALUE: Final = 64
"""The longest refused value in an error, in characters."""
SMALL: Final = 1 << 14
"""The largest JSON, in bytes, that is parsed without a scan if it contains few texts. Parsing it takes at most 2 ms."""
SMALL_QUOTES: Final = 256
"""The largest number of quotation marks in such JSON."""
MAX_DEPTH: Final = 32
"""The largest number of lists and objects around a value."""
MAX_NAMES: Final = 64
"""The largest number of fields in an object. pydantic makes an error for each unknown one, and only the first is reported."""
MAX_VALUES: Final = 8192
"""The largest number of values other than ints in lists. An offer of 64 workers with full layouts has fewer than 3000."""
MAX_SIGNS: Final = {b",": (1 << 16) + MAX_VALUES, b'"': 4 * MAX_VALUES, b"[": 2048, b"{": 2048}
"""The largest number of each character in JSON that is not small. JSON of mostly numbers, or one long text, stays below."""
KEYS: Final = {"mac", "token", "heartbeat_token", "secret", "key", "auth_key", "seal"}
"""Fields whose values no error shows."""
_WITHOUT_VALUE: Final = {"missing", "extra_forbidden", "json_invalid", "blocks"}
"""Types of errors that are clear without the value, or whose text already has it."""


class Unreadable(ValueError):
    """Input from outside was refused. The message is one line of at most 300 printable ASCII characters.

    Attributes:
        error: what pydantic found; None if the input was refused before it was validated.
    """

    def __init__(self, text: str, error: ValidationError | None = None) -> None:
        super().__init__(printable(text))
        self.error = error


def printable(value: object, limit: int = SHOWN) -> str:
    """Return text from outside as printable ASCII of at most ``limit`` characters; other characters are escaped.

    A value of another type is converted with ``str``. A text that is cut ends in three dots.
    """
    if isinstance(value, int) and value.bit_length() > 4 * limit:
        value = f"an int of {value.bit_length()} bits"  # str refuses some, and is slow for others
    elif isinstance(value, (bytes, bytearray, memoryview)):
        value = ascii(bytes(value[: limit + 1]))[2:-1]
    text = value if isinstance(value, str) else str(value)
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text
    escaped = "".join(char if " " <= char <= "~" else ascii(char)[1:-1] for char in text[: limit + 1])
    return escaped if len(escaped) <= limit else (escaped[: max(limit - 3, 0)] + "...")[:limit]


def shown(value: object, limit: int = SHOWN_VALUE) -> str:
    """Return a value from outside as an error shows it: printable ASCII of at most ``limit`` characters.

    The time that this takes depends neither on the size of the value nor on its depth. A list in a list is not shown.
    """
    if isinstance(value, Mapping):
        return f"an object of {len(value)} names"
    if isinstance(value, (list, tuple)):
        return printable("[" + ", ".join(_inside(each, limit) for each in value[: limit // 2]) + "]", limit)
    if isinstance(value, (str, bytes)):
        return printable(f"'{printable(value, limit)}'", limit)
    return printable(value, limit)


def _inside(value: object, limit: int) -> str:
    """Return an element of a list as an error shows it."""
    return "[...]" if isinstance(value, (list, tuple)) else shown(value, limit)


def first_complaint(error: ValidationError) -> str:
    """Return the first thing that pydantic refused, as one short line: the place, the value and the rule."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(printable(part, SHOWN_VALUE) for part in first["loc"][:MAX_DEPTH])
    is_key = bool(first["loc"]) and first["loc"][-1] in KEYS
    if is_key or first["type"] in _WITHOUT_VALUE or first["type"].startswith("union_tag"):
        return printable(f"{where}: {first['msg']}" if where else first["msg"])
    return printable(f"{where or 'it'} is {shown(first['input'])}: {first['msg']}")


@overload
def read_foreign(data: object, model: type[M], *, limit_bytes: int, limit_chars: int) -> M: ...


@overload
def read_foreign(data: object, model: TypeAdapter[T], *, limit_bytes: int, limit_chars: int) -> T: ...


def read_foreign(data: object, model: Any, *, limit_bytes: int, limit_chars: int) -> Any:
    """Read input from outside: JSON as bytes, or objects that another library has parsed.

    The input is refused at the first limit that it exceeds, before it is validated. NaN and infinity are refused. If a
    name occurs twice in an object, the last value counts.

    Args:
        data: JSON, or dictionaries, lists, tuples, texts, numbers, True, False and None.
        model: a pydantic model, or the adapter of a type. Its lists must be ``FailFast``, its tuples must accept lists,
            and the members of a union must be distinguished by ``type`` or ``kind``.
        limit_bytes: of the whole input, as JSON without blanks.
        limit_chars: of each text, names included.

    Raises:
        Unreadable: if the input exceeds a limit, or does not match the model.
    """
    adapter = model if isinstance(model, TypeAdapter) else None
    try:
        if isinstance(data, (bytes, bytearray, memoryview)):
            if len(data) > limit_bytes:
                raise Unreadable(f"it has {len(data)} bytes: the limit is {limit_bytes}")
            text = bytes(data)
            if len(text) <= min(SMALL, limit_chars) and text.count(b'"') <= SMALL_QUOTES:
                return model.model_validate_json(text) if adapter is None else adapter.validate_json(text)
            content: object = _parsed(text)
        else:
            content = data
        Scan(limit_chars, None if content is not data else limit_bytes).walk(content)
        if adapter is None:
            return model.model_validate(content)
        _check_kind(content)
        return adapter.validate_python(content)
    except ValidationError as error:
        raise Unreadable(first_complaint(error), error) from None


def scan_foreign(data: object, *, limit_bytes: int, limit_chars: int) -> None:
    """Check objects as :func:`read_foreign` does before it validates them. Raises Unreadable if they exceed a limit."""
    Scan(limit_chars, limit_bytes).walk(data)


def _parsed(data: bytes) -> object:
    """Parse JSON that cannot become more objects than fit into 10 MiB."""
    for sign, limit in MAX_SIGNS.items():
        if (count := data.count(sign)) > limit:
            raise Unreadable(f"it has {len(data)} bytes with {count} times {sign.decode()!r}: the limit is {limit}")
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Unreadable(f"Invalid JSON: {error}") from None


def _check_kind(content: object) -> None:
    """Refuse a ``type`` or ``kind`` that is not a short text: pydantic writes it out in its error, however large it is."""
    if isinstance(content, dict):
        for name in ("type", "kind"):
            if name in content and not (isinstance(content[name], str) and len(content[name]) <= SHOWN_VALUE):
                raise Unreadable(
                    f"its {name} is {shown(content[name])}: must be a text of at most {SHOWN_VALUE} characters"
                )


class Scan:
    """A look at objects before they are validated, without recursion, up to the first limit that they exceed.

    Args:
        limit_bytes: None if the size is known to be small enough.
    """

    def __init__(self, limit_chars: int, limit_bytes: int | None) -> None:
        self._limit_chars = limit_chars
        self._limit_bytes = self._left = limit_bytes
        self._values = 0

    def walk(self, root: object) -> None:
        """Count everything inside ``root``. Raises Unreadable at the first limit that it exceeds."""
        waiting: list[Iterator[object]] = [iter((root,))]
        while waiting:
            for value in waiting[-1]:
                inside = self.look(value)
                if inside is not None:
                    waiting.append(iter(inside))
                    break
            else:
                waiting.pop()
            if len(waiting) > MAX_DEPTH + 1:
                raise Unreadable(f"it has lists or objects nested too deeply: the limit is {MAX_DEPTH}")

    def look(self, value: object) -> Iterable[object] | None:
        """Count one value; return its contents if they must be counted one by one, or None."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise Unreadable(f"it has more than {MAX_VALUES} values")
        if isinstance(value, str):
            self._text(value)
        elif isinstance(value, int):
            self._spend(1 + value.bit_length() * 3 // 10)
        elif value is None:
            self._spend(4)
        elif isinstance(value, float):
            if not isfinite(value):
                raise Unreadable(f"it has the number {value}: must be finite")
            self._spend(16)
        elif isinstance(value, dict):
            return self._names(value)
        elif isinstance(value, (list, tuple)):
            return self._elements(value)
        else:
            raise Unreadable(f"it has a {type(value).__name__}: JSON has no such value")
        return None

    def _names(self, value: dict[object, object]) -> Iterable[object]:
        if len(value) > MAX_NAMES:
            raise Unreadable(f"it has an object of {len(value)} names: the limit is {MAX_NAMES}")
        self._spend(2)
        for name in value:
            if not isinstance(name, str):
                raise Unreadable(f"it has the name {shown(name)}: must be a text")
            self._text(name)
        return value.values()

    def _elements(self, value: list[Any] | tuple[Any, ...]) -> Iterable[object] | None:
        # a comma and half a digit for each number, besides the digits that its bits give below
        self._spend(2 + len(value) * 3 // 2)
        try:
            bits = sum(map(int.bit_length, value))  # takes a fifth of the time of a look at each type
        except TypeError:
            return value
        self._spend(bits * 3 // 10)
        return None

    def _text(self, value: str) -> None:
        if len(value) > self._limit_chars:
            raise Unreadable(f"it has a text of {len(value)} characters: the limit is {self._limit_chars}")
        self._spend(3 + len(value))

    def _spend(self, nbytes: int) -> None:
        if self._left is None:
            return
        self._left -= nbytes
        if self._left < 0:
            raise Unreadable(f"it has more than {self._limit_bytes} bytes")
