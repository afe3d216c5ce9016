"""Remarks on options of a pool's URL that are allowed and risky."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from aiodatadist._config.trust import is_loopback

NO_CHECK = {
    "ssl_cert_reqs": ("NONE",),
    "ssl_check_hostname": ("FALSE", "NO", "0", "F", "N"),
}
"""Options of redis-py that turn off the checks of TLS, and the values that do so."""


def remarks_on(url: str) -> list[str]:
    """Return the risks of a valid URL, in lines that show no password."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    if parts.scheme == "redis" and (parts.password or options.get("password")) and not _is_here(parts.hostname or ""):
        return ["its password travels unencrypted to another machine: use rediss://"]
    if parts.scheme != "rediss":
        return []
    off = [name for name, values in NO_CHECK.items() if options.get(name, "").upper() in values]
    if not off:
        return []
    return [f"{', '.join(off)} in its URL turns the check of the server's certificate off: any server is believed"]


def _is_here(host: str) -> bool:
    return host == "localhost" or is_loopback(host)
