"""The cluster ids that the names in a certificate stand for. No I/O: a certificate is not verified here.

A URI names a cluster itself: ``spiffe://DOMAIN/.../cluster/ID`` or ``aiodatadist://cluster/ID``. A DNS name stands for the
clusters that the policy lists for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from aiodatadist._values.checks import UINT64

MAX_SHOWN: Final = 4
"""Ids that a message lists."""

_ID: Final = r"(0|[1-9][0-9]{0,19})"
_SEGMENT: Final = r"/(?!\.{1,2}/)[A-Za-z0-9._-]+"
_SPIFFE: Final = re.compile(rf"spiffe://[a-z0-9._-]{{1,255}}(?:{_SEGMENT})*/cluster/{_ID}")
_OWN: Final = re.compile(rf"aiodatadist://cluster/{_ID}")
_MAX_URI: Final = 2048
"""The longest SPIFFE id that its specification asks implementations to support."""

DnsIds = Mapping[str, Sequence[range]]
"""The ids that the policy lists for DNS names, which are in lower case."""


def uri_id(uri: str) -> int | None:
    """Return the id of the cluster that a URI names; None if it names none.

    An id has one spelling: decimal digits without leading zeros.
    """
    if len(uri) > _MAX_URI:
        return None
    found = _SPIFFE.fullmatch(uri) or _OWN.fullmatch(uri)
    return None if found is None or int(found[1]) not in UINT64 else int(found[1])


class CertificateNames:
    """The names of one certificate, and the clusters that they stand for.

    Args:
        names: kind and text of each, as ``ssl.SSLObject.getpeercert()`` lists them under ``subjectAltName``.
        dns: the ids that DNS names stand for.
    """

    def __init__(self, names: Iterable[tuple[str, str]], dns: DnsIds | None = None) -> None:
        kept = tuple(names)
        uris = [text for kind, text in kept if kind == "URI"]
        hosts = [text.lower() for kind, text in kept if kind == "DNS"]
        self._named: dict[int, str] = {}
        for uri in uris:
            cluster = uri_id(uri)
            if cluster is not None:
                self._named.setdefault(cluster, uri)
        self._listed = tuple((host, ids) for host in hosts for ids in (dns or {}).get(host, ()))
        self._all = [*uris, *hosts]

    @property
    def any(self) -> str:
        """The name of the certificate in messages: the first that stands for clusters, or else the first; empty if none."""
        return next(iter([*self._named.values(), *(name for name, _ in self._listed), *self._all]), "")

    def name_for(self, cluster_id: int) -> str | None:
        """Return the name in the certificate that stands for this cluster, a URI or a host; None if there is none."""
        named = self._named.get(cluster_id)
        if named is not None:
            return named
        return next((name for name, ids in self._listed if cluster_id in ids), None)

    def clusters(self) -> str:
        """Return the clusters of the certificate, in words: ``cluster 7``, ``clusters 7, 1-999`` or ``no cluster``."""
        ids = [*map(str, self._named), *(_shown(each) for _, each in self._listed)]
        if not ids:
            return "no cluster"
        more = ", ..." if len(ids) > MAX_SHOWN else ""
        plural = "s" if len(ids) > 1 or "-" in ids[0] else ""
        return f"cluster{plural} {', '.join(ids[:MAX_SHOWN])}{more}"


def _shown(ids: range) -> str:
    return str(ids.start) if len(ids) == 1 else f"{ids.start}-{ids.stop - 1}"
