"""Remarks on options of a pool's URL that are allowed and risky."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlsplit

from aiodatadist._config.trust import is_loopback
from aiodatadist._context_caching.pools.addresses import scheme_of

NO_CHECK = {
    "ssl_cert_reqs": ("NONE",),
    "ssl_check_hostname": ("FALSE", "NO", "0", "F", "N"),
}
"""Options of redis-py that turn off the checks of TLS, and the values that do so."""
_PLAIN: Final = frozenset({"redis", "redis+sentinel"})
_TLS: Final = frozenset({"rediss", "rediss+sentinel"})


def remarks_on(url: str) -> list[str]:
    """Return the risks of a valid URL, in lines that show no password."""
    scheme, parts = scheme_of(url), urlsplit(url)
    options = dict(parse_qsl(parts.query))
    if scheme in _PLAIN:
        has_password = parts.password or options.get("password") or options.get("sentinel_password")
        if has_password and not all(map(_is_here, parts.netloc.rpartition("@")[2].split(","))):
            return [f"its password travels unencrypted to another machine: use {scheme.replace('redis', 'rediss')}://"]
    if scheme not in _TLS:
        return []
    off = [name for name, values in NO_CHECK.items() if options.get(name, "").upper() in values]
    if not off:
        return []
    return [f"{', '.join(off)} in its URL turns the check of the server's certificate off: any server is believed"]


def _is_here(place: str) -> bool:
    """Return True if a host, with or without a port, is this machine."""
    host = urlsplit(f"//{place}").hostname or ""
    return host == "localhost" or is_loopback(host)
