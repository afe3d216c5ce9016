"""The rights of a peer: what it may do on its link, as the policy of this cluster says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, get_args

RightName = Literal["link", "read", "write", "claim", "notify", "critical"]
"""The names of rights in a policy."""
RIGHTS: Final[tuple[str, ...]] = get_args(RightName)


class PeerRights(NamedTuple):
    """The rights of one peer. They are settled when its link is made, and do not change while the link lasts.

    Attributes:
        link: be linked at all.
        read: read this cluster's caches.
        write: write into them.
        claim: claim leases of blocks, and release them.
        notify: send notifications.
        critical: have its requests served as critical ones.
        private: reach memory that can be opened only with the whole process. It is not a name in ``may``.
    """

    link: bool = False
    read: bool = False
    write: bool = False
    claim: bool = False
    notify: bool = False
    critical: bool = False
    private: bool = True

    @classmethod
    def of(cls, names: Iterable[str], private: bool = True) -> PeerRights:
        """Return the rights with these names, and no others."""
        return cls(**dict.fromkeys(names, True), private=private)


EVERY_RIGHT: Final = PeerRights.of(RIGHTS)
"""The rights of a peer if there is no policy."""
