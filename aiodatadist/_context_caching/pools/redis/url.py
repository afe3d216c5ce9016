"""URLs of Redis pools: one server or a cluster, a server behind sentinels, or one on a Unix socket.

::

    redis://[[user]:password@]host[:port][/db][?...]                    rediss:// with TLS; valkey://, valkeys:// likewise
    redis+sentinel://[[user]:password@]host[:port],.../service[/db]     rediss+sentinel:// with TLS everywhere
    unix://[[user]:password@]/path/of/the/socket[?db=0]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from aiodatadist._context_caching.pools import addresses
from aiodatadist._context_caching.pools.redis.nodes import Account, Address, SSLConnection, parse_url
from aiodatadist._context_caching.pools.redis.tls_port import check_tls_options
from aiodatadist._values.addresses import is_address, is_host_name

OPTIONS: Final = frozenset({"cluster", "connections", "memory", "nat", "sentinel_username", "sentinel_password"})
SILENT: Final = frozenset(
    {
        "decode_responses",
        "encoding",
        "encoding_errors",
        "health_check_interval",
        "lib_name",
        "lib_version",
        "protocol",
        "retry",
        "retry_on_error",
        "retry_on_timeout",
        "socket_connect_timeout",
        "socket_read_size",
        "socket_timeout",
    }
)
"""Options of redis-py that this pool decides."""
LEAST: Final = 1 << 20
"""Fewest bytes of memory for values on their way."""
PORT: Final = 6379
SENTINEL_PORT: Final = 26379
MAX_SENTINELS: Final = 64
MAX_NAT: Final = 1024
"""Most servers whose addresses are replaced."""
MAX_SERVICE: Final = 256


@dataclass(frozen=True)
class RedisPlace:
    """The place of a pool.

    Attributes:
        account: the account at its servers.
        host, port: of a server; of a socket, its path and 0; unused if there are sentinels.
        memory: bytes for stages and values.
        wanted: what ``cluster=`` says; None if it is absent.
        service: the name under which sentinels know the server; empty without sentinels.
        sentinels: their addresses, and ``watcher`` the account there.
    """

    account: Account
    host: str
    port: int
    memory: int
    wanted: bool | None = None
    service: str = ""
    sentinels: tuple[Address, ...] = ()
    watcher: Account | None = None


def read_url(url: str) -> RedisPlace:
    """Read a URL. Raises TypeError or ValueError if it is wrong, with the rule and without its account."""
    if not isinstance(url, str):
        raise TypeError(f"url is {url!r} of type {type(url).__name__}: must be a str")
    scheme, (_, colon, rest) = addresses.scheme_of(url), url.partition(":")
    if scheme == "unix":
        return _on_a_socket(rest)
    if scheme in {"redis+sentinel", "rediss+sentinel"}:
        return _behind_sentinels(scheme.partition("+")[0], rest)
    place, others = _one(f"{scheme}{colon}{rest}")
    for name in sorted(others):
        raise ValueError(
            f"option {name} needs sentinels: the URL must begin with redis+sentinel:// or rediss+sentinel://"
        )
    return place


def _one(url: str, port: int = PORT) -> tuple[RedisPlace, Mapping[str, str]]:
    """Return the place of a URL with one host, and the options that are for sentinels."""
    address = addresses.parse(url, ("redis", "rediss"), port, OPTIONS, others=True)
    path = unquote(urlsplit(address.url).path)
    if not re.fullmatch(r"/?|/[0-9]+/?", path):
        raise ValueError(f"the path of the URL is {path}: must be the number of a database, for instance /0")
    options: dict[str, Any] = dict(parse_url(address.url))
    is_tls = options.pop("connection_class", None) is SSLConnection
    options.pop("host", None)
    options.pop("port", None)
    for name in sorted(SILENT & options.keys()):
        raise ValueError(
            f"option {name} cannot be in the URL: the pool decides deadlines, retries, bytes and the start of a connection"
        )
    check_tls_options(options, is_tls=is_tls)
    if is_tls and options.get("ssl_cert_reqs") != "none":  # redis-py before 6 does not compare the name by default
        options.setdefault("ssl_check_hostname", True)
    cluster = address.options.get("cluster")
    if cluster not in {None, "yes", "no", "true", "false"}:
        raise ValueError(f"cluster is {cluster!r}: must be yes or no")
    wanted = None if cluster is None else cluster in {"yes", "true"}
    if wanted and options.get("db"):
        raise ValueError(f"db is {options['db']}: a cluster has only 0")
    memory = addresses.byte_size(address.options.get("memory", "256MiB"), "memory", LEAST)
    connections = addresses.number(address.options.get("connections", "8"), "connections", 1, 1024)
    account = Account(options, is_tls, connections, nat=_nat(address.options.get("nat", "")))
    _check_options(account, address.host, address.port)
    others = {name: value for name, value in address.options.items() if name.startswith("sentinel_")}
    return RedisPlace(account, address.host, address.port, memory, wanted), others


def _check_options(account: Account, host: str, port: int) -> None:
    """Raise ValueError if redis-py refuses an option."""
    try:
        account.connection(host, port)
    except TypeError as error:
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            ours = sorted(name for name in OPTIONS if not name.startswith("sentinel_"))
            known = f"{', '.join(ours)}, or redis-py's connection options"
            raise ValueError(f"option {unknown[1]} is unknown: the options are {known}") from error
        raise ValueError(f"redis-py refuses an option of the URL: {error}") from error


def _nat(text: str) -> dict[Address, Address]:
    """Return the addresses that replace others, from ``announced=reached`` pairs with commas between them."""
    found: dict[Address, Address] = {}
    for pair in filter(None, text.split(",")):
        announced, mark, reached = pair.partition("=")
        if not mark:
            raise ValueError(f"nat has {pair!r}: must be announced:port=reached:port, with commas between such pairs")
        address = _address(announced, "nat")
        if address in found:
            raise ValueError(f"nat has {announced} twice")
        found[address] = _address(reached, "nat")
    if len(found) > MAX_NAT:
        raise ValueError(f"nat has {len(found)} addresses: the limit is {MAX_NAT}")
    return found


def _address(text: str, name: str, default: int | None = None) -> Address:
    """Return host and port of ``host:port`` or ``[ipv6]:port``; with a default the port may be missing."""
    host, _, port = text.rpartition(":")
    if default is not None and (not host or text.endswith("]")):
        host, port = text, str(default)
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65535
    if not is_port or not (is_address(host) or is_host_name(host)):
        raise ValueError(f"{name} has {text!r}: must be host:port, with brackets around an IPv6 address")
    return host, int(port)


def _split(scheme: str, rest: str, form: str) -> tuple[str, str, str, str]:
    """Return account with ``@``, host, path, and query with ``?``. Raises ValueError if it has not this form."""
    # an '@' behind the account is none: a password with a '/' or '?' was cut there, and its beginning would count as a host
    found = re.fullmatch(r"//(?:([^/?#]*)@)?([^/?#@]*)(/[^?#@]*)?(?:\?([^#@]*))?", rest)
    if found is None:
        raise ValueError(
            f"the URL after {scheme}: must be {form}; '#', '/', '?' and '@' in a password percent-encoded, '@' everywhere"
        )
    account, hosts, path, query = (each or "" for each in found.groups())
    return f"{account}@" if account else "", hosts, path, f"?{query}" if query else ""


def _on_a_socket(rest: str) -> RedisPlace:
    account, host, path, query = _split("unix", rest, "unix:///path/of/the/socket")
    path = unquote(path)
    if host or len(path) < 2 or path.endswith("/"):
        raise ValueError("the URL after unix: must be ///path/of/the/socket")
    place, others = _one(f"redis://{account}localhost{query}")
    for name in sorted({"cluster", "nat", *others} & {name for name, _, _ in map(_named, query[1:].split("&"))}):
        raise ValueError(f"option {name} is for servers with an address: a Unix socket reaches one server")
    options = Account(place.account.options, is_tls=False, connections=place.account.connections, path=path)
    return RedisPlace(options, path, 0, place.memory, wanted=False)


def _named(part: str) -> tuple[str, str, str]:
    return part.partition("=")


def _behind_sentinels(scheme: str, rest: str) -> RedisPlace:
    form = f"{scheme}+sentinel://host:port,host:port/service"
    account, hosts, path, query = _split(f"{scheme}+sentinel", rest, form)
    service, _, db = path[1:].partition("/")
    service = unquote(service)
    if not hosts or not service or not re.fullmatch(r"[0-9]*", db):
        raise ValueError(f"the URL names no service, or no sentinel: must be {form}, with /0 behind it for database 0")
    if len(service) > MAX_SERVICE or not (service.isascii() and service.isprintable()) or " " in service:
        raise ValueError(f"the service has characters that no service has, or more than {MAX_SERVICE}")
    sentinels = tuple(dict.fromkeys(_address(each, "the URL", SENTINEL_PORT) for each in hosts.split(",")))
    if len(sentinels) > MAX_SENTINELS:
        raise ValueError(f"the URL has {len(sentinels)} sentinels: the limit is {MAX_SENTINELS}")
    place, others = _one(f"{scheme}://{account}localhost/{db}{query}")
    if place.wanted:
        raise ValueError("cluster is yes: servers behind sentinels are no cluster")
    given = place.account
    options = {
        name: value
        for name, value in given.options.items()
        if name not in {"username", "password", "db", "client_name"}
    }
    options |= {name.removeprefix("sentinel_"): value for name, value in others.items()}
    watcher = Account(options, given.is_tls, connections=1)
    _check_options(watcher, *sentinels[0])
    return RedisPlace(given, "", 0, place.memory, False, service, sentinels, watcher)
