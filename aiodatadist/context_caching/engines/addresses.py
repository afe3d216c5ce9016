"""The URL that says where an engine is: our own options are taken out of its query, and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

T = TypeVar("T", int, float)

_UNITS: Final = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


class Address(NamedTuple):
    """A URL without our options, and these."""

    url: str
    host: str
    port: int
    options: Mapping[str, str]


def parse(url: str, schemes: tuple[str, ...], port: int, ours: frozenset[str], *, others: bool) -> Address:
    """Take a URL apart.

    Args:
        port: if the URL does not say.
        ours: names of our options.
        others: other options are somebody else's, and stay in the URL; else there may be none.

    Raises:
        TypeError, ValueError: it is not such a URL, or has an option twice, or one that nobody knows.
    """
    if not isinstance(url, str):
        raise TypeError(f"url is {url!r} of type {type(url).__name__}: it has to be a str")
    parts = urlsplit(url)
    if parts.scheme not in schemes or not parts.hostname:
        wanted = " or ".join(f"{scheme}://host:port" for scheme in schemes)
        raise ValueError(f"the URL begins with {parts.scheme}://{parts.hostname or ''}: it has to be {wanted}")
    found: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in found:
            raise ValueError(f"option {name} is in the URL twice")
        if name not in ours and not others:
            raise ValueError(f"option {name} is unknown: the options are {', '.join(sorted(ours))}")
        found[name] = value
    rest = urlencode({name: value for name, value in found.items() if name not in ours})
    options = {name: value for name, value in found.items() if name in ours}
    return Address(parts._replace(query=rest).geturl(), parts.hostname, parts.port or port, options)


def byte_size(text: str, name: str) -> int:
    """``1048576``, ``64MiB``, ``1GiB``. Raises ValueError: it is neither."""
    found = re.fullmatch(r"(\d+)\s*([KMGT]iB|)", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{name} is {text!r}: it has to be a number of bytes, or of KiB, MiB, GiB or TiB")
    return int(found[1]) * _UNITS[found[2].lower()]


def number(text: str, name: str, low: T, high: T) -> T:
    """A number of ``low``'s type. Raises ValueError: it is none, or outside of low to high."""
    try:
        value = type(low)(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: it has to be a number") from None
    if not low <= value <= high:
        raise ValueError(f"{name} is {text}: it has to be {low} to {high}")
    return value
