"""The keys or certificates of one cluster, or of one server: read when a peer must be proved, and checked for changes.

They are read in a thread, because a file on a network mount may take any time. A reading that hangs delays only the links
that wait for it, and each by ``READ_SECONDS`` at most: then they use the keys that were read before. Each key ring has its
own thread, so it delays no other cluster of the process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import anyio

from aiodatadist._concurrency.blocking_calls import KeptThread, started_in_thread
from aiodatadist._config.certificates import Certificates, moment
from aiodatadist._config.policy import Policy
from aiodatadist._config.trust import Credential, Key
from aiodatadist._counting import Incident, Incidents
from aiodatadist._values.foreign import printable
from aiodatadist._values.peer_rights import EVERY_RIGHT, PeerRights
from aiodatadist._wire.messages import PLAIN_PROTOCOL, PROTOCOL
from aiodatadist._wire.proved import Proved
from aiodatadist.errors import AuthError, LinkError, LLMException, ParamInvalid

logger = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""Seconds between two looks at keys that may change. Each new link looks at them, too."""
READ_SECONDS = 3.0
"""Seconds that a link waits for its keys to be read; then it uses those that were read before."""

T = TypeVar("T")
Keys = Callable[[], Sequence[Key]]


@dataclass(frozen=True)
class _Reading:
    number: int
    until: float
    done: asyncio.Future[None]


class KeyRing:
    """The keys of one cluster, or of one server.

    Args:
        owner: names it in the log, for instance ``cluster 7``.
        cluster_id: the cluster that a certificate must be for; None for a server, which needs keys.
        use: what the first key is used for, in the log.

    Attributes:
        why_not: returns the rule that keeps a cluster with these keys from an address; empty if there is none.
        protocol: the major version of the protocol that a cluster with these keys speaks.
        are_given: True if the keys were chosen for this cluster. Only then can members on other machines have them.
    """

    def __init__(
        self,
        credential: Credential,
        owner: str,
        incidents: Incidents,
        cluster_id: int | None = None,
        use: str = "new proofs use",
    ) -> None:
        self.why_not: Callable[[str], str] = credential.why_not
        self.protocol: int = PROTOCOL if credential.is_proved else PLAIN_PROTOCOL
        self.are_given: bool = credential.is_given
        self._credential = credential
        self._owner = owner
        self._use = use
        self._incidents = incidents
        self._cluster_id = cluster_id
        self._found: tuple[Key, ...] | Certificates | ParamInvalid | None = None
        self._used: tuple[Key, ...] | Certificates | None = None
        self._policy: Policy | ParamInvalid | None = None
        self._reading: _Reading | None = None
        self._readings = 0
        self._hindrance = ""  # to the last reading, which could not begin or end
        self._thread: KeptThread | None = None

    @property
    def hint(self) -> str:
        """Say how a peer gets the same key."""
        return self._credential.hint

    @property
    def may_change(self) -> bool:
        """True if :meth:`watch` has something to look at."""
        return self._credential.may_change

    def read(self) -> None:
        """Read the keys; this may block. Raises ParamInvalid if they cannot be used."""
        self._read()
        if isinstance(self._found, ParamInvalid):
            raise self._found

    @asynccontextmanager
    async def one_thread(self) -> AsyncIterator[None]:
        """Read the keys in the same thread inside this context. Outside, each reading starts a thread."""
        self._thread = KeptThread("aiodatadist keys")
        try:
            yield
        finally:
            thread, self._thread = self._thread, None
            await thread.aclose()

    async def check(self) -> None:
        """Read the keys or certificates. Raises ParamInvalid if they cannot be used."""
        if not self._credential.is_in_file:
            self._read()
        await self.look()
        if self._found is None:
            raise ParamInvalid(self._too_late())
        if isinstance(self._found, ParamInvalid):
            raise self._found

    def keys(self) -> tuple[Key, ...]:
        """Return the keys as they were read last, without waiting.

        A link that this end asks for uses the first key. A link that a peer asks for may use any of them.

        Raises AuthError if they cannot be used, or there are certificates instead; the message names the file and the
        rule.
        """
        found = self._proof()
        if isinstance(found, Certificates):
            raise AuthError(f"{self._owner} proves a certificate, and has no keys")
        return found

    def certificates(self) -> Certificates | None:
        """Return the certificates as they were read last, without waiting; None if keys prove the cluster, or nothing does.

        Raises AuthError if they cannot be used, or have expired since they were read.
        """
        found = self._proof()
        if not isinstance(found, Certificates):
            return None
        try:
            self._check(found)
        except ParamInvalid as error:
            raise AuthError(str(error.args[0]), hint=error.hint) from error
        return found

    def certificate_seconds(self) -> float | None:
        """Return the seconds until the certificate expires that new links prove, negative if it has expired.

        None if there is none, or it is in the caller's context. Any thread may call it.
        """
        used = self._used
        return used.expires - time.time() if isinstance(used, Certificates) and used.expires < math.inf else None

    def _proof(self) -> tuple[Key, ...] | Certificates:
        if self._found is None and not self._credential.is_in_file:
            self._read()
        if self._found is None:
            raise AuthError(self._too_late())
        if isinstance(self._found, ParamInvalid):
            raise AuthError(str(self._found.args[0]), hint=self._found.hint) from self._found
        return self._found

    def _check(self, found: tuple[Key, ...] | Certificates) -> None:
        """Raise ParamInvalid if these are certificates that this owner cannot use now."""
        if not isinstance(found, Certificates):
            return
        if self._cluster_id is None:
            raise ParamInvalid(f"{self._owner} needs keys: must not have certificates instead")
        found.check(self._cluster_id, time.time())

    async def fresh(self) -> tuple[Key, ...]:
        """Return the keys as they are now. Raises AuthError as :meth:`keys` does."""
        await self.look()
        return self.keys()

    def rights_of(self, proved: Proved | None, cluster_id: int) -> PeerRights:
        """Return the rights of a peer with this credential, by the policy that was read last.

        Raises AuthError if the policy does not let the peer link, LinkError if it cannot be used, or if the peer's key was
        replaced since it was proved: the policy may mean the new one. It names no file; the log does.
        """
        policy = self._policy
        if self._has_replaced(proved):
            raise LinkError(f"the keys of {self._owner} have changed since this link was begun", hint="try again")
        if isinstance(policy, ParamInvalid):
            told = "%s: no peer can be linked: %s", self._owner, policy
            self._incidents.add(Incident.KEYS_UNUSABLE, logger, *told, level=logging.ERROR)
            # An AuthError would end the peer's relinking, but the policy may be mended.
            raise LinkError(f"{self._owner} cannot use its policy now") from policy
        credential, by_key = ("", True) if proved is None else (proved.credential, proved.by_key)
        rights = EVERY_RIGHT if policy is None else policy.rights_of(credential, cluster_id, by_key=by_key)
        if not rights.link:
            named = f"{'key' if by_key else 'certificate'} {printable(credential)}" if credential else "no key"
            raise AuthError(
                f"the policy of {self._owner} does not let cluster {cluster_id} with {named} link",
                hint="its policy.json must have a rule with 'link' for it",
            )
        return rights

    def _has_replaced(self, proved: Proved | None) -> bool:
        """Return True if a peer has proved a key that this owner does not have any longer."""
        keys = self._found
        if proved is None or not proved.key_hash or not isinstance(keys, tuple):
            return False
        return (proved.credential, proved.key_hash) not in {(key.name, key.hash) for key in keys}

    @property
    def trusts_restarts(self) -> bool:
        """True if a process whose certificate has the id of a live link replaces that link, as the policy may say."""
        return isinstance(self._policy, Policy) and self._policy.restart == "trusted"

    def for_client(self, keys: Callable[[], T]) -> T:
        """Return the keys, or certificates, of a listener for a client that is not known yet.

        Raises AuthError if they cannot be used. The client is told no file; the log is.
        """
        try:
            return keys()
        except AuthError as error:
            told = "%s: no peer can be proved: %s", self._owner, error
            self._incidents.add(Incident.KEYS_UNUSABLE, logger, *told, level=logging.ERROR)
            raise AuthError("the keys of this end cannot be used now") from error

    async def watch(self) -> None:
        """Look at the keys now and then, so that a mistake in them is logged before a link needs them."""
        while True:
            await anyio.sleep(LOOK_SECONDS)
            await self.look()
            with suppress(AuthError):
                self.for_client(self.certificates)

    async def look(self) -> None:
        """Read the keys again, if their files have changed.

        At most one reading runs at a time. One that began before this call may have missed a change, so it is not
        enough. If a reading takes too long, this returns, and the keys that were read before stay in use.
        """
        if not self._credential.is_in_file:
            return
        before = self._readings
        while True:
            reading = self._reading
            if reading is None or (reading.done.done() and reading.number <= before):
                reading = self._begin()
            with anyio.move_on_after(reading.until - anyio.current_time()):
                await asyncio.wait([reading.done])
            if not reading.done.done():
                self._incidents.add(Incident.KEYS_LATE, logger, "%s", self._too_late())
                return
            if (error := reading.done.exception()) is not None:
                words = "%s: its keys cannot be read now, those that were read before stay in use: %s"
                self._incidents.add(Incident.KEYS_LATE, logger, words, self._owner, printable(repr(error)))
                self._hindrance = printable(str(error))
                return
            if reading.number > before:
                return

    def _begin(self) -> _Reading:
        self._readings += 1
        until = anyio.current_time() + READ_SECONDS
        self._hindrance = ""
        start = started_in_thread if self._thread is None else self._thread.start
        self._reading = _Reading(self._readings, until, start(self._read))
        return self._reading

    def _too_late(self) -> str:
        words = f"{self._owner}: its keys were not read within {READ_SECONDS:g} s"
        if self._hindrance:
            words = f"{self._owner}: its keys cannot be read now: {self._hindrance}"
        return words if self._found is None else f"{words}: those that were read before stay in use"

    def _read(self) -> None:
        """Read the keys, on any thread. An error is kept, and raised when the keys are used.

        The policy is set first, so that no link is made with new keys and without their policy.
        """
        found = self._read_proof()
        try:
            self._policy = self._credential.policy()
        except ParamInvalid as error:
            self._policy = error
        if not isinstance(found, ParamInvalid):
            self._tell_change(found)
            self._used = found
        self._found = found

    def _read_proof(self) -> tuple[Key, ...] | Certificates | ParamInvalid:
        try:
            found = self._credential.proof()
            self._check(found)
        except ParamInvalid as error:
            return error
        except (OSError, ValueError, LLMException) as error:
            unusable = ParamInvalid(f"the keys cannot be read: {printable(error)}")
            unusable.__cause__ = error
            return unusable
        return found

    def _tell_change(self, found: tuple[Key, ...] | Certificates) -> None:
        """Log that the keys or certificates have changed since they were last used. The log names them, without secrets."""
        if not found or self._used in (None, found):
            return
        if isinstance(found, Certificates):
            words = "%s: new links prove the certificate %s, which expires on %s"
            told = self._owner, printable(found.name), moment(found.expires)
            self._incidents.add(Incident.KEYS_CHANGED, logger, words, *told, level=logging.INFO)
        else:
            self._tell_change_of_keys(found)

    def _tell_change_of_keys(self, keys: tuple[Key, ...]) -> None:
        old = dict(() if isinstance(self._used, Certificates) else self._used or ())
        replaced = [key.name for key in keys if old.get(key.name, key.secret) != key.secret]
        words = "%s: %s key %s of %s"
        told = [self._owner, self._use, keys[0].name, ", ".join(key.name for key in keys)]
        if replaced:
            words += "; %s has another secret now"
            told.append(", ".join(replaced))
        self._incidents.add(Incident.KEYS_CHANGED, logger, words, *told, level=logging.INFO)
