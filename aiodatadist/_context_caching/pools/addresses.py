"""URLs of engines. Our own options are taken out of the query and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote_plus, urlencode, urlsplit

from aiodatadist._values.sizes import read_size

T = TypeVar("T", int, float)

SCHEMES: Final = {"valkey": "redis", "valkeys": "rediss"}
"""Other names of schemes."""
_ENCODED: Final = "'#', '/', '?', '@' and brackets in a user name or a password must be percent-encoded"


class Address(NamedTuple):
    """A URL without our options, and the options."""

    url: str
    host: str
    port: int
    options: Mapping[str, str]


def parse(url: str, schemes: tuple[str, ...], port: int, ours: frozenset[str], *, others: bool) -> Address:
    """Take a URL apart.

    Args:
        port: the port if the URL has none.
        ours: names of our options.
        others: if true, other options belong to another library and stay in the URL; otherwise they are refused.

    Raises:
        TypeError, ValueError: if it is not such a URL, or an option is unknown or occurs twice.
    """
    if not isinstance(url, str):
        raise TypeError(f"url is {url!r} of type {type(url).__name__}: must be a str")
    parts, host, number = _place(url, schemes)
    found: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if "@" in name:
            raise ValueError(f"an option's name has an '@' in it; {_ENCODED}")
        if name in found:
            raise ValueError(f"option {name} is in the URL twice")
        if name not in ours and not others:
            raise ValueError(f"option {name} is unknown: the options are {', '.join(sorted(ours))}")
        found[name] = value
    rest = urlencode({name: value for name, value in found.items() if name not in ours})
    options = {name: value for name, value in found.items() if name in ours}
    return Address(parts._replace(query=rest).geturl(), host, port if number is None else number, options)


def taken_out(url: str, names: frozenset[str]) -> tuple[str, dict[str, str]]:
    """Take options out of a URL; return the URL without them, otherwise unchanged, and their values.

    Raises:
        ValueError: if one of them is in the URL twice.
    """
    before, mark, query = url.partition("?")
    query, hash_mark, behind = query.partition("#")
    kept: list[str] = []
    found: dict[str, str] = {}
    for part in query.split("&"):
        name, _, value = part.partition("=")
        if name not in names:
            kept.append(part)
        elif name in found:
            raise ValueError(f"option {name} is in the URL twice")
        else:
            found[name] = unquote_plus(value)
    rest = "&".join(kept)
    return f"{before}{mark if rest or not found else ''}{rest}{hash_mark}{behind}", found


def _place(url: str, schemes: tuple[str, ...]) -> tuple[SplitResult, str, int | None]:
    """Return the parts of the URL, its host, and its port if it has one. Errors show only the URL's scheme."""
    wanted = " or ".join(f"{scheme}://host:port" for scheme in schemes)
    scheme, colon, rest = url.partition(":")
    if not colon or scheme.lower() not in schemes:
        what = f"the URL's scheme is {scheme}" if colon and is_scheme(scheme) else "the URL has no scheme"
        raise ValueError(f"{what}: must be {wanted}")
    if not rest.startswith("//"):
        raise ValueError(f"the URL has no // after {scheme}: must be {wanted}")
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:  # not chained: its message quotes the URL, which may contain a password
        raise ValueError(f"the URL cannot be read: must be {wanted}, and {_ENCODED}") from None
    is_cut = bool(parts.fragment) or "@" in parts.path  # an unescaped character of the account cut the URL there
    try:
        number = parts.port
        is_number = number != 0
    except ValueError:  # its message quotes the URL, too
        number, is_number = None, False
    if "," in parts.netloc.rpartition("@")[2] and not is_cut:
        raise ValueError("the URL must have one host and port; the other servers of a cluster are found through it")
    if not is_number:
        raise ValueError(f"the URL's port must be a number from 1 to 65535; {_ENCODED}")
    if is_cut:
        raise ValueError(f"the URL has a '#', or an '@' after a '/'; {_ENCODED}")
    if not host:
        raise ValueError(f"the URL has no host: must be {wanted}")
    return parts, host, number


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, in small letters; that of Redis also for Valkey."""
    scheme = url.partition(":")[0].lower()
    return SCHEMES.get(scheme, scheme)


def is_scheme(text: str) -> bool:
    """Return True if the text can be shown: it is a scheme, and not part of an account."""
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", text) is not None


def byte_size(text: str, name: str, least: int = 0, most: int | None = None) -> int:
    """Return the bytes of ``1048576``, ``64MiB`` or ``1GiB``. Raises ValueError if it is none or outside the limits."""
    try:
        nbytes = read_size(text)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}: {error}") from None
    if nbytes < least:
        raise ValueError(f"{name} is {nbytes} bytes: must be at least {least}")
    if most is not None and nbytes > most:
        raise ValueError(f"{name} is {nbytes} bytes: must be at most {most}, on this machine")
    return nbytes


def number(text: str, name: str, low: T, high: T) -> T:
    """Return a number of ``low``'s type. Raises ValueError if it is none, or not within low to high."""
    try:
        value = type(low)(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: must be a number") from None
    if not low <= value <= high:
        raise ValueError(f"{name} is {text}: must be {low} to {high}")
    return value
