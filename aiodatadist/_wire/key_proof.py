"""The proof of a shared key, before either end says who it is. A state machine without I/O.

::

    client                                server
    WELCOME  hello1    ->                 HELLO1
             <-  welcome                  SEAL      it knows which key is asked for, not whether the client has it
    PROVED   everything is sealed  <->    PROVED    with the first frame whose seal is right

From both first messages each end derives five keys of 32 bytes: one for the server's confirmation in ``welcome``, one for
the frames of each direction, and one for the heartbeats of each direction. They depend on both nonces, and on the choice
of protocol and key, so nothing can be replayed, reflected or downgraded.

Until the client is proved, the server says nothing but its protocol, its nonce and the name of a key. The client knows
that the server has the key before it says who it is.

The connection for a link's heartbeats begins in the same way. Its key is made from the two heartbeat keys of the link, and
has the link's name, a hash of that key. Neither key is ever sent.

What either end says before the proof affects only its own connection.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Final, Literal

from aiodatadist._config.trust import BOTH_ENDS, Key
from aiodatadist._wire.frames import Unknown, encode
from aiodatadist._wire.messages import PLAIN_PROTOCOL, PROTOCOL, Hello, Hello1, Message, Refuse, Welcome
from aiodatadist._wire.reasons import refused
from aiodatadist._wire.seals import Opener, Sealer
from aiodatadist.errors import AuthError, IncompatiblePeer, LinkError, ProtocolError

Side = Literal["client", "server"]

CONTEXT: Final = b"aiodatadist 5"
_LINK_NAME: Final = b"aiodatadist 5 link"
_UNSAID: Final = "0" * 64
"""Stands for the confirmation, which cannot cover itself."""


@dataclass(frozen=True)
class SessionKeys:
    """The keys of one connection. ``to_server`` and ``to_client`` are directions.

    The first of the five keys is used only for ``confirmation``, with which the server shows in ``welcome`` that it has it.
    """

    confirmation: str
    frames_to_server: bytes
    frames_to_client: bytes
    beats_to_server: bytes
    beats_to_client: bytes

    def __repr__(self) -> str:
        return "<SessionKeys>"

    @property
    def heartbeats(self) -> Key:
        """The key of the connection for this link's heartbeats, which has the link's name."""
        return heartbeat_key(self.beats_to_server + self.beats_to_client)

    def frames(self, side: Side) -> tuple[Sealer, Opener]:
        """Return what seals the frames of an end, and what checks its peer's."""
        out, back = self.frames_to_server, self.frames_to_client
        return (Sealer(out), Opener(back)) if side == "client" else (Sealer(back), Opener(out))

    def beats(self, side: Side) -> tuple[bytes, bytes]:
        """Return the key for the heartbeats that an end sends, and the key for those of its peer."""
        keys = self.beats_to_server, self.beats_to_client
        return keys if side == "client" else keys[::-1]


def heartbeat_key(secret: bytes) -> Key:
    """Return the key of a link's heartbeats, made from a secret that only the two ends of the link have."""
    return Key(sha256(_LINK_NAME + secret).hexdigest(), secret)


def session_keys(secret: bytes, hello: Hello1, welcome: Welcome) -> SessionKeys:
    """Derive the keys of a connection from a shared key and both first messages, with HKDF-SHA256."""
    said = encode(hello) + encode(welcome.model_copy(update={"confirmation": _UNSAID}))
    extracted = hmac.digest(bytes.fromhex(hello.nonce + welcome.nonce), secret, "sha256")
    keys: list[bytes] = []
    for number in range(1, 6):
        last = keys[-1] if keys else b""
        keys.append(hmac.digest(extracted, last + CONTEXT + said + bytes([number]), "sha256"))
    return SessionKeys(hmac.digest(keys[0], said, "sha256").hex(), *keys[1:])


class ProofState(Enum):
    """The states of a proof, each named after what is expected next."""

    HELLO1 = "hello1"
    WELCOME = "welcome"
    SEAL = "seal"
    PROVED = "proved"
    OVER = "over"


class KeyProof:
    """An end of the proof of a key. Feed it what arrives, and send what it returns; it raises if there is no proof.

    Args:
        keys: at least one. A client offers all of them. A server chooses the first one whose name the client offers, or else
            its own first one.
        opens: for a client: what its connection is for.
        hint: says how both ends get the same key.

    Attributes:
        credential: name of the key; empty until it is chosen. The peer has it once the state is ``PROVED``.
        key_hash: a hash of that key, which tells it from another one of its name.
        keys: the keys of the connection, once both first messages are known.
    """

    def __init__(
        self,
        side: Side,
        keys: Sequence[Key],
        opens: Literal["link", "heartbeats"] = "link",
        hint: str = BOTH_ENDS,
        make_nonce: Callable[[], str] = lambda: secrets.token_hex(32),
    ) -> None:
        self.side: Side = side
        self.state: ProofState = ProofState.WELCOME if side == "client" else ProofState.HELLO1
        self.credential: str = ""
        self.key_hash: bytes = b""
        self.keys: SessionKeys | None = None
        self._preferred = keys[0]
        self._known = {key.name: key for key in keys}
        self._hint = hint
        self._opens: Literal["link", "heartbeats"] = opens
        self._hello: Hello1 | None = None
        self._make_nonce = make_nonce

    def start(self) -> Hello1:
        """Return the client's first message."""
        names = [*self._known]
        self._hello = Hello1(protocols=[PROTOCOL], nonce=self._make_nonce(), key_names=names, opens=self._opens)
        return self._hello

    def receive(self, message: Message | Unknown) -> Welcome | None:
        """Return the answer to a message, if there is one.

        Raises:
            LinkError: if the peer refused, which is not proved.
            AuthError, IncompatiblePeer, ProtocolError: if this end refuses.
        """
        try:
            return self._react(message)
        except LinkError:
            self.state = ProofState.OVER
            raise

    def _react(self, message: Message | Unknown) -> Welcome | None:
        match self.state, message:
            case ProofState.WELCOME, Refuse():
                raise refused(message, is_proved=False, hint=self._hint)
            case ProofState.HELLO1, Hello1():
                return self._on_hello(message)
            case ProofState.WELCOME, Welcome():
                self._on_welcome(message)
                return None
            case ((ProofState.HELLO1 | ProofState.WELCOME), Hello()) if message.protocol != PROTOCOL:
                raise other_proof(PROTOCOL, [message.protocol])
        raise ProtocolError(f"the peer sent {message.type!r} when {self.state.value!r} was expected")

    def sealed(self) -> None:
        """Note that a frame of the client's has the right seal: it has the key."""
        if self.state is ProofState.SEAL:
            self.state = ProofState.PROVED
        elif self.state is not ProofState.PROVED:
            self.state = ProofState.OVER
            raise ProtocolError("the peer sent a sealed message before there was a key for it")

    def _on_hello(self, hello: Hello1) -> Welcome:
        if PROTOCOL not in hello.protocols:
            theirs = ", ".join(map(str, hello.protocols))
            raise IncompatiblePeer(f"protocol differs: {PROTOCOL} here, {theirs} at the peer")
        # Names may differ, if one end has a folder and the other one ``auth_key``. The client finds out by the confirmation.
        key = next((self._known[name] for name in hello.key_names if name in self._known), self._preferred)
        welcome = Welcome(protocol=PROTOCOL, nonce=self._make_nonce(), key_name=key.name, confirmation=_UNSAID)
        self.credential, self.key_hash, self.keys = key.name, key.hash, session_keys(key.secret, hello, welcome)
        self.state = ProofState.SEAL
        return welcome.model_copy(update={"confirmation": self.keys.confirmation})

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.protocol != PROTOCOL:
            raise IncompatiblePeer(f"protocol differs: {PROTOCOL} here, {welcome.protocol} at the peer")
        if self._hello is None:
            raise ProtocolError("a client must start() first")
        named = self._known.get(welcome.key_name)
        for key in self._known.values() if named is None else [named]:
            keys = session_keys(key.secret, self._hello, welcome)
            if hmac.compare_digest(welcome.confirmation, keys.confirmation):
                self.credential, self.key_hash = key.name, key.hash
                self.keys, self.state = keys, ProofState.PROVED
                return
        names = ", ".join(self._known) if named is None else named.name
        raise AuthError(f"the peer does not have this end's key {names!r}", hint=self._hint)


def other_proof(ours: int, theirs: Iterable[int]) -> AuthError:
    """Return the error for two ends of which only one has a key. Neither speaks the other's version."""
    versions = ", ".join(map(str, theirs))
    return AuthError(
        f"protocol differs: {ours} here, {versions} at the peer: an end with a key speaks only {PROTOCOL}, "
        f"an end without one only {PLAIN_PROTOCOL}",
        hint=BOTH_ENDS,
    )
