"""The way from a URL to a pool. An engine is imported only if a URL names it."""

from __future__ import annotations

import importlib
from typing import Final
from urllib.parse import parse_qs, urlsplit

from aiodatadist._context_caching import checks as rules
from aiodatadist._context_caching.errors import EmsInvalidArgument
from aiodatadist._context_caching.pools import addresses
from aiodatadist._context_caching.pools.contract import KVPool
from aiodatadist._context_caching.pools.embedded import MemoryPool
from aiodatadist._context_caching.pools.extras import how_to_install
from aiodatadist.errors import ParamInvalid

DEFAULT_BYTES: Final = 256 << 20
_ENGINES: Final = {
    "redis": ("redis", "RedisPool"),
    "rediss": ("redis", "RedisPool"),
    "mooncake": ("mooncake", "MooncakePool"),
}


async def open_pool(url: str) -> KVPool:
    """Open the pool that a URL names. The caller closes it.

    ``memory:`` is a pool of this process of 256 MiB, ``memory:?bytes=1GiB`` one of 1 GiB. ``redis://``, ``rediss://``
    and ``mooncake://`` need extras; their modules list the options.

    Raises:
        EmsInvalidArgument: if there is no such kind of pool, an option is wrong, an extra is not installed, or no event
            loop runs here.
        PoolUnreachable, PoolTimeout: if the engine does not answer.
        LLMException: if the memory cannot be allocated.
    """
    rules.on_a_loop("a pool")
    if not isinstance(url, str):
        raise EmsInvalidArgument(f"the pool's url is of type {type(url).__name__}: must be a str")
    scheme = url.partition(":")[0]
    if scheme == "memory":
        try:
            return await MemoryPool.open(_bytes_of(url))
        except ParamInvalid as problem:
            raise EmsInvalidArgument(f"{url}: {problem}") from problem
    if scheme not in _ENGINES:
        what = repr(scheme) if addresses.is_scheme(scheme) else "a URL without a scheme"
        raise EmsInvalidArgument(f"{what} is not a kind of pool: must be memory:, redis://, rediss:// or mooncake://")
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
