"""The keys or certificates of one cluster, or of one server: read when a peer must be proved, and looked at now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import anyio

from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._config.trust import Credential, Key
from aiodatadist._counting import Incident, Incidents
from aiodatadist.errors import AuthError, ParamInvalid

logger = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""Seconds between two looks at keys that may change. Each new link looks at them, too."""

Keys = Callable[[], Sequence[Key]]


class KeyRing:
    """The keys of one cluster, or of one server.

    Args:
        owner: names it in the log, for instance ``cluster 7``.

    Attributes:
        why_not: returns the rule that keeps a cluster with these keys from an address; empty if there is none.
        are_given: True if the keys were chosen for this cluster. Only then members on other machines can have them.
    """

    def __init__(self, credential: Credential, owner: str, incidents: Incidents) -> None:
        self.why_not: Callable[[str], str] = credential.why_not
        self.are_given: bool = credential.is_given
        self._credential = credential
        self._owner = owner
        self._incidents = incidents
        self._names: tuple[str, ...] | None = None

    @property
    def hint(self) -> str:
        """Say how a peer gets the same key."""
        return self._credential.hint

    @property
    def may_change(self) -> bool:
        """True if :meth:`watch` has something to look at."""
        return self._credential.may_change

    async def check(self, cluster_id: int) -> None:
        """Read the keys or certificates. Raises ParamInvalid if this cluster cannot use them."""
        certificates = await in_thread(self._credential.certificates)
        if certificates is not None:
            certificates.check(cluster_id, time.time())
        self._names = tuple(key.name for key in self._credential.current())

    def keys(self) -> tuple[Key, ...]:
        """Return the keys: the first for links that this end asks for, all for those that it is asked for.

        Raises AuthError if they cannot be used; the message names the file and the rule.
        """
        try:
            keys = self._credential.current()
        except ParamInvalid as error:
            raise AuthError(str(error.args[0]), hint=error.hint) from error
        names = tuple(key.name for key in keys)
        if self._names not in (names, None):
            told = "%s: new proofs use key %s of %s", self._owner, names[0], ", ".join(names)
            self._incidents.add(Incident.KEYS_CHANGED, logger, *told, level=logging.INFO)
        self._names = names
        return keys

    def for_client(self, keys: Keys) -> Sequence[Key]:
        """Return the keys of a listener for a client that is not known yet.

        Raises AuthError if they cannot be used. The client is told no file; the log is.
        """
        try:
            return keys()
        except AuthError as error:
            told = "%s: no peer can be proved: %s", self._owner, error
            self._incidents.add(Incident.KEYS_UNUSABLE, logger, *told, level=logging.ERROR)
            raise AuthError(f"{self._owner} cannot use its keys now") from error

    async def watch(self) -> None:
        """Look at the keys now and then, so that a mistake in them is logged before a link needs them."""
        while True:
            await anyio.sleep(LOOK_SECONDS)
            with suppress(AuthError):
                self.for_client(self.keys)
