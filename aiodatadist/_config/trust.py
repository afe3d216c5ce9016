"""Keys or certificates with which a cluster proves itself: those of a folder, of ``auth_key``, of this user, or none.

``LLMConfig.trust`` says which. They are read when a link is made, never when bytes move.
"""

from __future__ import annotations

import base64
import ipaddress
import math
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from aiodatadist._config.certificates import FILES as TLS_FILES
from aiodatadist._config.certificates import Certificates, Contexts, read_certificates
from aiodatadist._config.policy import POLICY, Policy, read_policy
from aiodatadist._config.secret_files import check_folder, read_key, read_secret, unreadable
from aiodatadist._config.user_key import key_path, user_key
from aiodatadist.errors import ParamInvalid

VARIABLE: Final = "AIODATADIST_TRUST"
NONE: Final = "none"
"""The value of ``trust`` that turns the proof off."""
KEY_FILE: Final = "the file of auth_key"
"""The name of a file with one key in errors."""
KEYS: Final = "keys"
"""The file with keys in a folder of trust."""
SECRET_BYTES: Final = 32
"""The shortest secret of a folder of trust."""
NETWORK_BYTES: Final = 16
"""The shortest ``auth_key`` with which a cluster leaves the machine."""
MAX_KEYS: Final = 16
"""Keys in one file. A listener compares a proof with each of them."""
_NAMES: Final = {KEYS: "the key file", POLICY: "the policy"} | dict(
    zip(TLS_FILES, ("the certificate", "the private key", "the file of authorities"), strict=True)
)
VALUES: Final = "seal"
"""The name of a key that seals values in pools, and never proves a link; also the beginning of such names, before a '-'."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ALL: Final = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO
_HEX: Final = re.compile(r"(?:[0-9A-Fa-f]{2})+")

MAKE_FOLDER: Final = (
    "make a folder of mode 0700 with a file 'keys' of mode 0600, and a line in it: a name, a space, and 32 random bytes in "
    "hexadecimal (SECURITY.md has the commands)"
)
BOTH_ENDS: Final = (
    "both ends need the same key (the same folder LLMConfig(trust=...), or the same auth_key), or both need certificates "
    "of an authority in the other end's ca.crt"
)


class Key(NamedTuple):
    """A key, and the name under which logs and errors speak of it."""

    name: str
    secret: bytes

    def __repr__(self) -> str:
        return f"<Key {self.name}>"

    @property
    def hash(self) -> bytes:
        """A hash of the secret, which tells this key from another one of its name."""
        return sha256(b"aiodatadist key " + self.secret).digest()


class Credential(ABC):
    """The keys with which a cluster proves itself."""

    @abstractmethod
    def current(self) -> tuple[Key, ...]:
        """Return the keys. A new link uses the first one; a client may prove any. Return () if nothing is proved.

        Raises:
            ParamInvalid: if they cannot be used; the message names the file and the rule.
        """

    def policy(self) -> Policy | None:
        """Return what each peer may do, as it was read with the keys; None if a peer with a key may do everything.

        Raises:
            ParamInvalid: as :meth:`current`, if it could not be read.
        """
        return None

    def proof(self) -> tuple[Key, ...] | Certificates:
        """Return the certificates in TLS mode, otherwise the keys. Raises what :meth:`current` raises."""
        return self.current()

    @property
    def is_given(self) -> bool:
        """True if the keys were chosen for this cluster, so a mistake in them is reported by ``init``."""
        return True

    @property
    def is_in_file(self) -> bool:
        """True if :meth:`current` reads files, which may block, so the event loop must not call it."""
        return False

    @property
    def is_proved(self) -> bool:
        """True if a cluster proves a key; False if any user of the machine may link."""
        return True

    @property
    def may_change(self) -> bool:
        """True if later calls of :meth:`current` may return others."""
        return False

    def why_not(self, host: str) -> str:
        """Return the rule that keeps a cluster with these keys from an address; empty if there is none."""
        return "" if is_loopback(host) else self._why_no_network()

    def _why_no_network(self) -> str:
        return ""

    @property
    def hint(self) -> str:
        """Say how a peer gets the same key."""
        return BOTH_ENDS


class Untrusted(Credential):
    """The lack of a key, so any user of this machine may link."""

    @property
    def is_proved(self) -> bool:
        return False

    def current(self) -> tuple[Key, ...]:
        return ()

    def _why_no_network(self) -> str:
        return "needs auth_key or trust"

    @property
    def hint(self) -> str:
        return f"{BOTH_ENDS}; with trust='none' at one end, the other one needs it, too"


class UserKey(Credential):
    """The key of this user, which is read, and created if there is none, when the first link needs it.

    It is read for each look, so a file that has been replaced counts. A file that is gone changes nothing: when a user logs
    out, the runtime folder is removed, and a process that was started later creates the key again.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._path: Path | None = None
        self._keys: tuple[Key, ...] = ()

    @property
    def is_given(self) -> bool:
        return False

    @property
    def is_in_file(self) -> bool:
        return True

    def current(self) -> tuple[Key, ...]:
        if self._path is None:
            self._path = key_path(self._environment)
        kept = self._keys
        if not kept or self._path.exists():
            self._keys = ()  # also if the new one cannot be used: then the old one is not used either
            try:
                self._keys = (Key("user", user_key(self._path)),)
            except ParamInvalid:
                if not kept or self._path.exists():
                    raise
                self._keys = kept  # its file has gone in the meantime
        return self._keys

    def _why_no_network(self) -> str:
        return "needs auth_key or trust"

    @property
    def hint(self) -> str:
        return f"{BOTH_ENDS}. Without these, both must be processes of one user and use one file: this end has {self._path}"


def state_of(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes with a file or folder."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _states(looked: list[os.stat_result]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(state_of, looked))


class AuthKey(Credential):
    """The key of ``LLMConfig.auth_key``."""

    def __init__(self, secret: bytes) -> None:
        self._keys = (Key("auth_key", secret),)

    def current(self) -> tuple[Key, ...]:
        return self._keys

    def _why_no_network(self) -> str:
        size = len(self._keys[0].secret)
        if size >= NETWORK_BYTES:
            return ""
        return f"needs an auth_key of at least {NETWORK_BYTES} bytes; this one has {size}"


class KeysInFile(Credential):
    """The keys in one file, which are read for each look.

    Args:
        name: the name of such a file in errors.
        keys: the keys that are known before the file is read.
    """

    def __init__(self, path: Path, name: str, keys: tuple[Key, ...] = ()) -> None:
        self.path: Path = path
        self._name = name
        self._keys = keys

    @property
    def is_in_file(self) -> bool:
        return True

    @property
    def may_change(self) -> bool:
        return True

    def current(self) -> tuple[Key, ...]:
        self._keys = self._read()
        return self._keys

    @abstractmethod
    def _read(self) -> tuple[Key, ...]:
        """Return the keys in the file. Raises ParamInvalid if they cannot be used."""


class AuthKeyFile(KeysInFile):
    """The key that is the whole content of a file.

    Args:
        secret: the key that was in the file when the cluster was configured.
    """

    def __init__(self, path: Path, secret: bytes) -> None:
        super().__init__(path, KEY_FILE, AuthKey(secret).current())

    def _why_no_network(self) -> str:
        return AuthKey(self._keys[0].secret)._why_no_network()

    def _read(self) -> tuple[Key, ...]:
        secret, old = read_key(self.path, KEY_FILE), self._keys[0].secret
        if len(secret) < NETWORK_BYTES <= len(old):  # the addresses were allowed for the old key
            raise ParamInvalid(
                f"{KEY_FILE} {str(self.path)!r} has a key of {len(secret)} bytes now: must have at least {NETWORK_BYTES}, "
                "as the key before it"
            )
        return AuthKey(secret).current()

    @property
    def hint(self) -> str:
        return f"{BOTH_ENDS}; this end has the key of {self.path}"


class GivenContexts(Credential):
    """The certificates in contexts of the caller's."""

    def __init__(self, contexts: Contexts) -> None:
        self._own = Certificates(contexts.client, contexts.server, None, 0, math.inf, "trust", {})

    def current(self) -> tuple[Key, ...]:
        raise ParamInvalid("trust has contexts of TLS: must be a folder with keys, because only keys are used here")

    def proof(self) -> tuple[Key, ...] | Certificates:
        return self._own

    @property
    def hint(self) -> str:
        return "both ends need certificates that the other end's context verifies"


class _Held(NamedTuple):
    """The content of a folder of trust: keys or certificates, and the policy.

    Attributes:
        seen: the state of its files before they were read.
        content: a hash of what was in them. A file that is written twice within a tick of the file system's clock, with
            contents of one size, has the same state after both.
    """

    seen: tuple[tuple[int, ...], ...]
    content: bytes
    keys: tuple[Key, ...] = ()
    certificates: Certificates | None = None
    policy: Policy | None = None


class TrustFolder(Credential):
    """The keys or certificates in a folder, and its policy, which are read again when the folder has changed.

    Any thread may ask for them, because a new reading replaces them as a whole.
    """

    def __init__(self, path: str) -> None:
        self.path: Path = Path(path)
        self._files: tuple[str, ...] = (KEYS,)
        self._held: _Held | None = None
        self._is_limited = False  # by a policy that was read

    @property
    def is_in_file(self) -> bool:
        return True

    @property
    def may_change(self) -> bool:
        return True

    def current(self) -> tuple[Key, ...]:
        proof = self.proof()
        if isinstance(proof, Certificates):
            raise ParamInvalid(
                f"{str(self.path)!r} has certificates: must have keys, because only keys are used here",
                hint=f"give this a folder with a file {KEYS!r}",
            )
        return proof

    def policy(self) -> Policy | None:
        return (self._held or self._hold()).policy

    def proof(self) -> tuple[Key, ...] | Certificates:
        held = self._hold()
        return held.keys if held.certificates is None else held.certificates

    def _hold(self) -> _Held:
        held = self._held
        if held is not None and not self._has_moved_on(held):
            return held
        self._held = None  # also if the new ones cannot be used: then the old ones are not used either
        fresh = self._held = self._read_new()
        self._is_limited |= fresh.policy is not None
        return fresh

    def _has_moved_on(self, held: _Held) -> bool:
        """Return True if a file has changed, or is gone, since it was read."""
        try:
            return (_states(self._look(self._files)), self._content(self._files)) != (held.seen, held.content)
        except ParamInvalid:
            return True

    def _read_new(self, is_last: bool = False) -> _Held:
        """Read the files of one moment: keys are never used with the policy of other keys.

        Args:
            is_last: True if they were replaced between the reading of two of them already.
        """
        files = self._files = self._present()
        looked = self._look(files)
        try:
            fresh = self._read(looked, files)
        except ParamInvalid:
            if is_last or not self._has_changed(files, looked):
                raise
        else:
            if not self._has_moved_on(fresh):
                return fresh
            if is_last:
                raise ParamInvalid(
                    f"{str(self.path)!r} changed while it was read, twice: its files must be those of one moment",
                    hint="replace them by one rename; they are read again for the next link",
                )
        return self._read_new(is_last=True)

    def _has_changed(self, files: tuple[str, ...], looked: list[os.stat_result]) -> bool:
        try:
            return _states(self._look(files)) != _states(looked)
        except ParamInvalid:
            return False

    def _present(self) -> tuple[str, ...]:
        """Return the files of the mode that the folder is for. If one is missing, its reader reports that."""
        has_tls = any(os.path.lexists(self.path / name) for name in TLS_FILES)
        has_policy = os.path.lexists(self.path / POLICY)
        if self._is_limited and not has_policy:  # without one, a link would have all rights, and keep them
            raise ParamInvalid(
                f"{str(self.path)!r} has no {POLICY!r} now: must have one as long as a process runs that has read it",
                hint="replace it by a rename; to lift it, write one that gives all rights, or start again without one",
            )
        mode = read_policy(self.path / POLICY).mode if has_policy else None
        if mode is None and has_tls and os.path.lexists(self.path / KEYS):
            raise ParamInvalid(
                f"{str(self.path)!r} has {KEYS!r} as well as certificates: must have either, or a mode in policy.json",
                hint=f"remove {KEYS!r}, or {', '.join(TLS_FILES)}",
            )
        files = TLS_FILES if mode == "tls" or (mode is None and has_tls) else (KEYS,)
        return (*files, POLICY) if has_policy else files

    def _look(self, files: tuple[str, ...]) -> list[os.stat_result]:
        """Return the status of the folder and of these files, or of what symbolic links there point to."""
        found: list[os.stat_result] = []
        for path, name in ((self.path, "the folder of trust"), *((self.path / file, _NAMES[file]) for file in files)):
            try:
                found.append(path.stat())
            except (OSError, ValueError) as error:
                raise unreadable(
                    path, name, error, MAKE_FOLDER if isinstance(error, FileNotFoundError) else None
                ) from error
        return found

    def _read(self, looked: list[os.stat_result], files: tuple[str, ...]) -> _Held:
        check_folder(self.path, "the folder of trust")
        content = self._content(files)
        policy = read_policy(self.path / POLICY) if POLICY in files else None
        fresh = _Held(_states(looked), content, policy=policy)
        if KEYS not in files:
            dns = {} if policy is None else policy.dns_ids()
            return fresh._replace(certificates=read_certificates(self.path, dns))
        path = self.path / KEYS
        keys = tuple(key for key in keys_of(read_secret(path, "the key file"), path) if not is_for_values(key.name))
        if not keys:
            raise ParamInvalid(f"{str(path)!r} has no key for links: all of its keys are for values, by their names")
        return fresh._replace(keys=keys)

    def _content(self, files: tuple[str, ...]) -> bytes:
        """Return a hash of what is in these files. Who may read them is checked when they are used."""
        digest = sha256()
        for name in files:
            digest.update(sha256(read_secret(self.path / name, _NAMES[name], readable_by=_ALL)).digest())
        return digest.digest()

    @property
    def hint(self) -> str:
        return f"{BOTH_ENDS}; this end has the folder {self.path}"


def keys_of(content: bytes, path: Path) -> tuple[Key, ...]:
    """Return the keys of a file: lines of ``name secret``, the secret in hexadecimal or base64. ``#`` begins a comment.

    Raises:
        ParamInvalid: if a line is wrong, or there is no key. The message never shows a secret.
    """
    found: list[Key] = []
    lines = content.decode("ascii", "replace").splitlines()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"line {number} of {str(path)!r}"
        if len(words) != 2 or not _NAME.fullmatch(words[0]):
            raise ParamInvalid(
                f"{where} is not a key: must be a name of at most 64 letters, digits, '.', '_' and '-', a space, and a secret"
            )
        name, secret = words[0], _secret(words[1])
        if secret is None:
            raise ParamInvalid(f"{where}: the secret must be in hexadecimal or base64")
        if len(secret) < SECRET_BYTES:
            raise ParamInvalid(f"{where}: the secret has {len(secret)} bytes: must have at least {SECRET_BYTES}")
        if any(each.name == name for each in found):
            raise ParamInvalid(f"{where}: another key has the name {name!r}: names must be unique")
        if len(found) == MAX_KEYS:  # at once: each key is compared with all before it
            raise ParamInvalid(f"{str(path)!r} has more than {MAX_KEYS} keys: must have at most that many")
        found.append(Key(name, secret))
    if not found:
        raise ParamInvalid(f"{str(path)!r} has no key: must have 1 to {MAX_KEYS}")
    return tuple(found)


def is_for_values(name: str) -> bool:
    """Return True if a key of this name, in a folder of trust, seals values in pools: ``seal``, or ``seal-...``."""
    return name.partition("-")[0] == VALUES


def _secret(text: str) -> bytes | None:
    if _HEX.fullmatch(text):
        return bytes.fromhex(text)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # also for characters beyond ASCII, for which there is no binascii.Error
        return None


def is_loopback(host: str) -> bool:
    """Return True if the text is an address of this machine's own loopback."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def credential_of(
    trust: str | Contexts | None,
    auth_key: bytes | None,
    environment: Mapping[str, str] = os.environ,
    auth_key_file: Path | None = None,
) -> Credential:
    """Return what a cluster with these options proves. ``AIODATADIST_TRUST`` counts if no key is given.

    Args:
        auth_key_file: the file from which ``auth_key`` was read, if it is to be read again when it changes.

    Raises:
        ParamInvalid: if both are given.
    """
    if auth_key is not None and trust is not None:
        raise ParamInvalid(
            "trust and auth_key are both set: must be one of them", hint="put the key into the folder's file"
        )
    if auth_key is not None:
        return AuthKey(auth_key) if auth_key_file is None else AuthKeyFile(auth_key_file, auth_key)
    if isinstance(trust, Contexts):
        return GivenContexts(trust)
    chosen = trust or environment.get(VARIABLE) or None
    if chosen is None:
        return UserKey(environment)
    return Untrusted() if chosen == NONE else TrustFolder(chosen)
