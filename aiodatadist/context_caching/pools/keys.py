"""What a value is called in an engine, and which of several nodes a distribute key belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiodatadist.context_caching.pools.contract import PoolKey
from aiodatadist.context_caching.pools.extras import how_to_install

try:
    import xxhash
except ImportError as missing:
    raise ImportError(f"pool engines need the package xxhash ({missing}): {how_to_install('redis')}") from missing

_ESCAPES: Final = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES) if "%" in text or "{" in text or "}" in text else text  # most need no escape


def tag(key: PoolKey) -> str:
    """A distribute key between braces. Never empty, since Redis does not take an empty one for a hash tag."""
    return f"{{{_escaped(key.distribute_key) or '%'}}}"  # nothing else is escaped to a lone percent sign


def group(key: PoolKey) -> str:
    """What all attribute keys of one distribute key and namespace have in common."""
    return f"{_escaped(key.namespace)}:{tag(key)}"


def flat(key: PoolKey) -> str:
    """``namespace:{distribute_key}:attribute_key``; braces and percent signs of the first two are escaped.

    Different keys never have the same: the first brace ends the namespace, the second ends the distribute key.
    """
    return f"{group(key)}:{key.attribute_key}"


def rendezvous(name: str, nodes: Iterable[str]) -> str | None:
    """The node with the highest draw for this name: one that comes or goes moves its own share of names, and no others."""
    return max(nodes, key=lambda node: (xxhash.xxh3_64_intdigest(f"{node}\n{name}".encode()), node), default=None)
