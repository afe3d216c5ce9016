"""The findings about pools of KV blocks: if their values are sealed, and if a pool answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing, suppress
from urllib.parse import urlsplit

import anyio

from aiodatadist._cli.doctor.finding import Finding
from aiodatadist._config.seal_keys import seal_keys_of_trust
from aiodatadist._context_caching.errors import EmsException
from aiodatadist._context_caching.pools.contract import PoolTimeout, PoolUnreachable
from aiodatadist._context_caching.pools.open import PoolPlace, place_of
from aiodatadist._context_caching.pools.remarks import remarks_on
from aiodatadist._values.foreign import printable
from aiodatadist.errors import LLMException, ParamInvalid

BELIEVED = "another writer of this pool is believed"


def sealing_findings() -> Iterator[Finding]:
    """Yield if the folder of trust has keys that seal values in pools. No key is shown."""
    try:
        keys = seal_keys_of_trust()
    except ParamInvalid as error:
        yield Finding("sealed values", "no key", "fail", f"pools outside this process are not opened: {error}")
        return
    if keys is None:
        meaning = (
            "another writer of a pool outside this process is believed, unless its URL has seal_key_file=, or the folder of "
            "AIODATADIST_TRUST has a key named seal"
        )
        yield Finding("sealed values", "off", "ok", meaning)
        return
    first = keys.current()[0].name
    meaning = "from AIODATADIST_TRUST: what others write to pools outside this process is not used"
    yield Finding("sealed values", f"key {first} of {keys.path}", "ok", meaning)


def pool_findings(url: str) -> list[Finding]:
    """Return what opening this pool shows. Nothing is stored, and no password is shown."""
    return anyio.run(_look, url)


async def _look(url: str) -> list[Finding]:
    try:
        place = await place_of(url)
    except EmsException as error:
        return [Finding("pool", "wrong", "fail", printable(error))]
    found: list[Finding] = []
    with suppress(ValueError):  # the answer says it, too
        found = [Finding("pool", _name(place), "warn", remark) for remark in remarks_on(place.url)]
    if not place.url.startswith("memory:"):
        found.append(_belief(place))
    return [await _answer(place), *found]


def _name(place: PoolPlace) -> str:
    try:
        parts = urlsplit(place.url)
    except ValueError:  # its message quotes the URL
        return printable(f"{place.url.partition(':')[0]}:")
    account, _, servers = parts.netloc.rpartition("@")
    if not account and "@" in place.url:  # a password that is not encoded begins where a server should be named
        return printable(f"{parts.scheme}:")
    return printable(f"{parts.scheme}:{'//' if parts.netloc else ''}{servers}")


def _belief(place: PoolPlace) -> Finding:
    if place.ring is None:
        hint = "seal its values: seal_key_file= in the URL"
        return Finding("pool", _name(place), "warn", f"{BELIEVED}; {hint}")
    return Finding("pool", _name(place), "ok", f"its values are sealed with key {place.ring.keys()[0].name}")


async def _answer(place: PoolPlace) -> Finding:
    try:
        async with aclosing(await place.open()) as pool:
            is_healthy = await pool.healthy(deadline=anyio.current_time() + 5.0)
            name = pool.capabilities.name
    except (EmsException, LLMException, PoolTimeout, PoolUnreachable) as error:
        return Finding("pool", _name(place), "fail", f"it cannot be used: {printable(error)}")
    if not is_healthy:
        return Finding("pool", _name(place), "fail", f"{name} answers, but reports that it does not work")
    return Finding("pool", _name(place), "ok", f"{name} answers")
