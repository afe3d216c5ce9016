"""The proof of a key or a certificate over a connection, as its client. Neither end has said who it is before that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

from aiodatadist._config.certificates import Certificates
from aiodatadist._config.trust import Key
from aiodatadist._link.control.connection import Connection
from aiodatadist._link.control.wire import Wire
from aiodatadist._wire.frames import Unknown
from aiodatadist._wire.key_proof import KeyProof, SessionKeys
from aiodatadist._wire.messages import Message
from aiodatadist._wire.proved import Proved, Vouch
from aiodatadist._wire.seals import Opener, Sealer
from aiodatadist._wire.tls_pipe import TlsPipe
from aiodatadist.errors import ProtocolError

Prove = Callable[[Wire], Awaitable[Vouch]]
"""Proves both ends of a new connection, as its client. Raises LinkError if there is no proof."""


class _Words(Protocol):
    """A conversation that is not sealed yet."""

    def seal_with(self, sealer: Sealer, opener: Opener) -> None: ...


async def agree_on_key(
    words: _Words,
    say: Callable[[Message], Awaitable[None]],
    hear: Callable[[], Awaitable[Message | Unknown]],
    keys: Sequence[Key],
    hint: str,
    opens: Literal["link", "heartbeats"] = "link",
) -> tuple[KeyProof, SessionKeys]:
    """Prove a key to a server that proves it, too, and seal everything from then on.

    Returns:
        The proof, which knows the key, and the keys of the connection.

    Raises:
        LinkError: if the server refuses, or does not prove the key.
    """
    proof = KeyProof("client", keys, opens, hint)
    await say(proof.start())
    proof.receive(await hear())
    if proof.keys is None:
        raise ProtocolError("the peer proved no key")
    words.seal_with(*proof.keys.frames("client"))
    return proof, proof.keys


def prover_of(
    connection: Connection, keys: Sequence[Key], hint: str, certificates: Certificates | None, expected: int
) -> Prove | None:
    """Return the proof of a certificate, if there are any, or of one of these keys; None without either.

    With a certificate, the connection passes through TLS from then on, and cluster ``expected`` must answer.
    """
    if certificates is not None:
        return _tls_prover_of(connection, certificates, expected)
    return _key_prover_of(keys, hint) if keys else None


def _key_prover_of(keys: Sequence[Key], hint: str) -> Prove:

    async def prove(wire: Wire) -> Vouch:
        proof, session = await agree_on_key(wire, wire.send, wire.receive, keys, hint)
        name, key_hash = proof.credential, proof.key_hash  # the link keeps nothing else of the proof
        return lambda *_: Proved(name, session.heartbeats, key_hash=key_hash)

    return prove


def _tls_prover_of(connection: Connection, certificates: Certificates, expected: int) -> Prove:
    async def prove(wire: Wire) -> Vouch:
        pipe = TlsPipe("client", certificates, expected)
        await connection.start_tls(pipe)
        wire.has_proved()
        return pipe.vouch

    return prove
