"""The way from a URL to a pool. An engine is imported only if a URL names it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from aiodatadist._cluster.key_ring import KeyRing
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._config.seal_keys import SealKeys, seal_keys_of_trust
from aiodatadist._context_caching import checks as rules
from aiodatadist._context_caching.errors import EmsInvalidArgument
from aiodatadist._context_caching.pools import addresses
from aiodatadist._context_caching.pools.contract import KVPool
from aiodatadist._context_caching.pools.embedded import MemoryPool
from aiodatadist._context_caching.pools.extras import how_to_install
from aiodatadist._context_caching.pools.sealed import SealedPool, ring_of
from aiodatadist._context_caching.pools.seals import Seals
from aiodatadist.errors import ParamInvalid

DEFAULT_BYTES: Final = 256 << 20
SEALING: Final = frozenset({"seal_key_file", "seal_seconds"})
"""Options of any pool's URL, which no engine sees."""
MAX_SEAL_SECONDS: Final = 366.0 * 86_400
_ENGINES: Final = {
    "redis": ("redis", "RedisPool"),
    "rediss": ("redis", "RedisPool"),
    "valkey": ("redis", "RedisPool"),
    "valkeys": ("redis", "RedisPool"),
    "redis+sentinel": ("redis", "RedisPool"),
    "rediss+sentinel": ("redis", "RedisPool"),
    "unix": ("redis", "RedisPool"),
    "mooncake": ("mooncake", "MooncakePool"),
}


@dataclass(frozen=True)
class PoolPlace:
    """The place of a pool, and the keys that seal its values. They have been read.

    Attributes:
        url: the URL for the engine, without the options that seal.
        ring: the keys; None if values are not sealed.
    """

    url: str
    ring: KeyRing | None = None
    seals: Seals | None = None

    async def open(self) -> KVPool:
        """Open the pool; raises as :func:`open_pool`."""
        pool = await _open_engine(self.url)
        return pool if self.ring is None or self.seals is None else SealedPool(pool, self.ring, self.seals)


async def open_pool(url: str) -> KVPool:
    """Open the pool that a URL names. The caller closes it.

    ``memory:`` is a pool of this process of 256 MiB, ``memory:?bytes=1GiB`` one of 1 GiB. ``redis://``, ``rediss://``
    and ``mooncake://`` need extras; their modules list the options. With ``seal_key_file=`` in the URL of any pool, or
    keys for values in the folder that ``AIODATADIST_TRUST`` names, values are sealed, as ``docs/engines.md`` says.

    Raises:
        EmsInvalidArgument: if there is no such kind of pool, an option is wrong, an extra is not installed, or no event
            loop runs here.
        PoolUnreachable, PoolTimeout: if the engine does not answer.
        LLMException: if the memory cannot be allocated.
    """
    return await (await place_of(url)).open()


async def place_of(url: str) -> PoolPlace:
    """Read what a URL says about sealing, and the keys. Raises EmsInvalidArgument if they cannot be used."""
    rules.on_a_loop("a pool")
    if not isinstance(url, str):
        raise EmsInvalidArgument(f"the pool's url is of type {type(url).__name__}: must be a str")
    scheme = url.partition(":")[0]
    try:
        rest, options = addresses.taken_out(url, SEALING)
        seconds = options.get("seal_seconds")
        age = None if seconds is None else addresses.number(seconds, "seal_seconds", 1.0, MAX_SEAL_SECONDS)
        keys = await _seal_keys(scheme, options)
        if keys is None:
            if seconds is not None:
                raise ValueError("seal_seconds is set, but nothing is sealed: give seal_key_file, too")
            return PoolPlace(rest)
        return PoolPlace(rest, await ring_of(keys, scheme), await in_thread(Seals, age))
    except ImportError as problem:
        raise EmsInvalidArgument(f"seal_key_file needs {_missing(problem)}: {how_to_install('sealed')}") from problem
    except (ValueError, ParamInvalid) as problem:
        raise EmsInvalidArgument(f"{scheme}: {problem}") from problem


async def _seal_keys(scheme: str, options: Mapping[str, str]) -> SealKeys | None:
    """Return the keys that seal: of the URL, or of the folder of trust for a pool outside this process. None: no keys."""
    if "seal_key_file" in options:
        if not options["seal_key_file"]:
            raise ValueError("seal_key_file is empty: must be a path")
        return SealKeys(Path(options["seal_key_file"]))
    return await in_thread(seal_keys_of_trust) if scheme in _ENGINES else None


async def _open_engine(url: str) -> KVPool:
    scheme = url.partition(":")[0]
    if scheme == "memory":
        try:
            return await MemoryPool.open(_bytes_of(url))
        except ParamInvalid as problem:
            raise EmsInvalidArgument(f"{url}: {problem}") from problem
    if scheme not in _ENGINES:
        what = repr(scheme) if addresses.is_scheme(scheme) else "a URL without a scheme"
        raise EmsInvalidArgument(
            f"{what} is not a kind of pool: must be memory:, redis://, rediss://, "
            "redis+sentinel://, rediss+sentinel://, unix:// or mooncake://"
        )
    name, kind = _ENGINES[scheme]
    try:
        engine = importlib.import_module(f"aiodatadist._context_caching.pools.{name}.pool")
    except ImportError as problem:
        raise EmsInvalidArgument(f"{scheme}:// needs {_missing(problem)}: {how_to_install(name)}") from problem
    try:
        pool: KVPool = await getattr(engine, kind).open(url)
    except EmsInvalidArgument:
        raise
    except (TypeError, ValueError, ImportError, ParamInvalid) as problem:
        raise EmsInvalidArgument(f"{scheme}://: {problem}") from problem
    return pool


def _missing(problem: ImportError) -> str:
    """Return the name of the missing package, whichever import failed first."""
    while isinstance(problem.__cause__, ImportError):
        problem = problem.__cause__
    package = (problem.name or "").partition(".")[0]
    if isinstance(problem, ModuleNotFoundError) and package not in {"", "aiodatadist"}:
        return f"the package {package}, which is not installed"
    return f"a package that cannot be imported ({problem})"


def _bytes_of(url: str) -> int:
    parts = urlsplit(url)
    options = parse_qs(parts.query, keep_blank_values=True)
    wanted = options.pop("bytes", [str(DEFAULT_BYTES)])
    if options or parts.path or parts.netloc or len(wanted) != 1:
        raise EmsInvalidArgument(f"{url!r} does not name a memory pool: must be memory: or memory:?bytes=1GiB")
    try:
        return addresses.byte_size(wanted[0], "bytes", 1)
    except ValueError as problem:
        raise EmsInvalidArgument(f"{url!r} does not name a memory pool: {problem}") from problem
