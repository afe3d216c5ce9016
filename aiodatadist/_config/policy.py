"""The policy of a cluster: ``policy.json`` in its folder of trust, which says what each peer may do."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.types import FailFast

from aiodatadist._config.secret_files import MAX_FILE, read_secret
from aiodatadist._values.foreign import Unreadable, read_foreign, shown
from aiodatadist._values.peer_rights import RIGHTS, PeerRights, RightName
from aiodatadist.errors import ParamInvalid

POLICY: Final = "policy.json"
"""The policy's file in a folder of trust."""
MAX_RULES: Final = 256
"""Rules in one policy. A new link is compared with each of them."""
MAX_RANGES: Final = 64
"""Ranges of cluster ids in one rule."""
MAX_NAME: Final = 512
"""Characters of a text in a policy."""
URIS: Final = ("spiffe://", "aiodatadist://")
_RANGE: Final = re.compile(r"\s*([0-9]{1,19})\s*(?:-\s*([0-9]{1,19})\s*)?", re.ASCII)

_Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]
_May = Annotated[list[RightName], FailFast(), Field(max_length=len(RIGHTS))]


class _Part(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)


class Match(_Part):
    """The names of credentials that a rule is about: exactly one of the three.

    Attributes:
        key: the name of a key in ``keys``; also ``communicator``, for members of a communicator.
        spiffe: a URI of a certificate. ``*`` stands for any characters of one part of the path, and ``/*`` at the end for
            one or more parts, because a URI ends in ``/cluster/ID``.
        dns: a DNS name of a certificate, which may then have the ids of its rule.
    """

    key: _Text | None = None
    spiffe: _Text | None = None
    dns: _Text | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.model_fields_set) != 1 or all(each is None for each in (self.key, self.spiffe, self.dns)):
            raise ValueError("must have exactly one of 'key', 'spiffe' and 'dns'")
        if self.spiffe is not None and not self.spiffe.startswith(URIS):
            raise ValueError(f"spiffe must begin with {' or '.join(map(repr, URIS))}")
        if any(part.count("*") > 1 for part in (self.spiffe or "").split("/")):
            raise ValueError("must have at most one '*' between two slashes")
        if self.dns is not None and "*" in self.dns:
            raise ValueError("dns must have no '*'")
        return self

    def fits(self, name: str, by_key: bool) -> bool:
        """Return True if the rule names this credential: a key, or else a certificate."""
        if by_key or self.key is not None:
            return by_key and name == self.key
        if self.spiffe is not None:
            front = self.spiffe.removesuffix("/*")
            rest = "/.+" if front != self.spiffe else ""
            return re.fullmatch(re.escape(front).replace(r"\*", "[^/]*") + rest, name) is not None
        return self.dns is not None and name.lower() == self.dns.lower()


class Rule(_Part):
    """A rule: what peers with some credentials may do.

    Attributes:
        match: the credentials.
        ids: ranges of cluster ids, as ``"1-999, 2000"``; if None, any. A rule for a DNS name must have it.
        may: the rights.
    """

    match: Match
    ids: _Text | None = None
    may: _May

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ids is not None:
            _ranges(self.ids)
        elif self.match.dns is not None:
            raise ValueError("ids must be given with 'dns', because a DNS name has none")
        _check_link(self.may)
        return self

    def fits(self, name: str, cluster_id: int, by_key: bool) -> bool:
        """Return True if the rule is about a peer that proved this credential and has this cluster id."""
        is_inside = self.ids is None or any(cluster_id in ids for ids in _ranges(self.ids))
        return is_inside and self.match.fits(name, by_key)


class Policy(_Part):
    """The content of ``policy.json``. The first rule that fits a peer counts.

    Attributes:
        version: of the format.
        clusters: the rules.
        otherwise: the rights of peers that no rule fits.
        mode: how links are proved if the folder has files for both: ``"keys"`` or ``"tls"``.
        restart: ``"trusted"`` if a process whose certificate has the id of a live link replaces that link at once.
        private_memory: False if softnpu opens no ordinary memory of this process to peers: caches there are then read in
            request/response mode only.
        relink_after_rotation: must be False in this version.
    """

    version: Literal[1]
    clusters: Annotated[list[Rule], FailFast(), Field(max_length=MAX_RULES)]
    otherwise: _May = []
    mode: Literal["keys", "tls"] | None = None
    restart: Literal["trusted"] | None = None
    private_memory: bool = True
    relink_after_rotation: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_link(self.otherwise)
        if self.relink_after_rotation:
            raise ValueError("relink_after_rotation is not supported yet: unlink and link again")
        return self

    def rights_of(self, credential: str, cluster_id: int, *, by_key: bool = True) -> PeerRights:
        """Return the rights of a peer that has proved a key of this name, or a certificate if not ``by_key``."""
        for rule in self.clusters:
            if rule.fits(credential, cluster_id, by_key):
                return PeerRights.of(rule.may, self.private_memory)
        return PeerRights.of(self.otherwise, self.private_memory)

    def dns_ids(self) -> dict[str, list[range]]:
        """Return the ids that certificates with a DNS name may have, by the name in lower case."""
        found: dict[str, list[range]] = {}
        for rule in self.clusters:
            if rule.match.dns is not None and rule.ids is not None:
                found.setdefault(rule.match.dns.lower(), []).extend(_ranges(rule.ids))
        return found


def _check_link(may: list[RightName]) -> None:
    if may and "link" not in may:
        raise ValueError(f"{may[0]!r} has no effect without 'link': add it")


def _ranges(text: str) -> list[range]:
    """Return the ranges that a text lists. Raises ValueError if it lists none, or a wrong one."""
    parts = text.split(",")
    if len(parts) > MAX_RANGES:
        raise ValueError(f"ids has {len(parts)} ranges: must have at most {MAX_RANGES}")
    found: list[range] = []
    for part in parts:
        read = _RANGE.fullmatch(part)
        if read is None:
            raise ValueError(f"ids has {shown(part)}: must be numbers and ranges, as '1-999, 2000'")
        first, last = int(read[1]), int(read[2] or read[1])
        if last < first:
            raise ValueError(f"ids has {shown(part)}: the first number must not be above the last")
        found.append(range(first, last + 1))
    return found


def read_policy(path: Path) -> Policy:
    """Return the policy in a file, which only this user and root may write, and all users may read.

    Raises:
        ParamInvalid: if it cannot be read, or is not a policy. The message names the file, the place, the value and the rule.
    """
    all_users = stat.S_IRWXU | stat.S_IRGRP | stat.S_IROTH
    content = read_secret(path, "the policy", readable_by=all_users)
    try:
        return read_foreign(content, Policy, limit_bytes=MAX_FILE, limit_chars=MAX_NAME)
    except Unreadable as error:
        raise ParamInvalid(f"the policy {str(path)!r}: {error}") from None
