"""Names of values in an engine, and the choice of the node for a distribute key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiodatadist._context_caching.pools.contract import PoolKey
from aiodatadist._context_caching.pools.extras import how_to_install

try:
    import xxhash
except ImportError as missing:
    raise ImportError(f"pool engines need the package xxhash ({missing}): {how_to_install('redis')}") from missing

_ESCAPES: Final = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})


def _escaped(text: str) -> str:
    # most texts need no escape, and the check is faster
    return text.translate(_ESCAPES) if "%" in text or "{" in text or "}" in text else text


def tag(key: PoolKey) -> str:
    """Return a distribute key between braces. Never empty, because Redis ignores an empty hash tag."""
    return f"{{{_escaped(key.distribute_key) or '%'}}}"  # no escaped text is a lone percent sign


def group(key: PoolKey) -> str:
    """Return the part of the name that all attribute keys of one distribute key and namespace share."""
    return f"{_escaped(key.namespace)}:{tag(key)}"


def flat(key: PoolKey) -> str:
    """Return ``namespace:{distribute_key}:attribute_key``, with braces and percent signs of the first two escaped.

    Different keys never get the same name: the first brace ends the namespace, the second ends the distribute key.
    """
    return f"{group(key)}:{key.attribute_key}"


def rendezvous(name: str, nodes: Iterable[str]) -> str | None:
    """Return the node with the highest hash for this name.

    A node that comes or goes moves only its own share of names.
    """
    return max(nodes, key=lambda node: (xxhash.xxh3_64_intdigest(f"{node}\n{name}".encode()), node), default=None)
