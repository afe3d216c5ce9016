"""The proof of a data connection, which carries bytes of one channel of a link. Functions without I/O.

::

    client                                             server
    attach_data  channel, index, nonce, proof    ->
                 <-  attach_data  channel, index, nonce, proof
                      the bytes of the channel, both ways

The two ends of a link have a secret that is new for each link, and is never sent. With a key it comes from the link's session
keys, with certificates it was exchanged inside the link's TLS: it is that of the link's heartbeats. Without either it is as
secret as the link's own connection. From it and a channel's name both ends make the channel's key.

No other process can make a proof. A recorded one of the client's is worthless, because the server accepts each index of a
channel once, and each channel has another key. The server's covers the client's nonce. The keys that seal the bytes depend
on both nonces, so each connection has its own.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, Literal, Self

from aiodatadist._wire.messages import AttachData, Hello
from aiodatadist.errors import AuthError

_DATA: Final = b"aiodatadist 5 data"
_CHANNEL: Final = b"aiodatadist 5 channel "
_NAME: Final = b"aiodatadist 5 channel's name"
_SEALS: Final = b"aiodatadist 5 seals to "
_UNSAID: Final = "0" * 64
"""Stands for the proof, which cannot cover itself."""


def said_secret(one: Hello, other: Hello) -> bytes:
    """Return what only those know who hear both hellos of a link."""
    return bytes.fromhex("".join(sorted((one.nonce, other.nonce))))


@dataclass(frozen=True)
class ChannelKey:
    """The key with which both ends prove the data connections of one channel.

    Attributes:
        name: a hash of the key, by which a connection names its channel.
    """

    name: str
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, link: bytes, channel: str) -> Self:
        """Make the key of a channel from the secret of its link and its name."""
        secret = hmac.digest(link, _CHANNEL + channel.encode(), "sha256")
        return cls(sha256(_NAME + secret).hexdigest(), secret)

    def ask(self, index: int, nonce: str, plain: bool = False) -> AttachData:
        """Return the client's message for the connection with this index.

        Args:
            plain: True if this end lets the bytes travel without seals.
        """
        return self._proving(AttachData(channel=self.name, index=index, plain=plain, nonce=nonce, proof=_UNSAID), "")

    def answer(self, asked: AttachData, nonce: str, plain: bool = False) -> AttachData:
        """Return the server's answer to a client's message, which must have been checked."""
        said = asked.model_copy(update={"plain": plain, "nonce": nonce})
        return self._proving(said, asked.nonce)

    def check(self, said: AttachData, asked: AttachData | None = None) -> None:
        """Check the proof in the other end's message.

        Args:
            asked: the message of this end, if it is the client.

        Raises AuthError if the sender does not have this key, or answers another message.
        """
        is_answer = asked is None or (said.channel, said.index) == (asked.channel, asked.index)
        right = self._proof(said, "" if asked is None else asked.nonce)
        if not (hmac.compare_digest(said.proof, right) and is_answer):
            raise AuthError(f"data connection {said.index} has a wrong proof: the other end is not that of the link")

    def seals(
        self, asked: AttachData, answered: AttachData, side: Literal["client", "server"]
    ) -> tuple[bytes, bytes] | None:
        """Return the keys for what an end sends and for what it receives; None if both ends let the bytes travel plain."""
        if asked.plain and answered.plain:
            return None
        extracted = hmac.digest(bytes.fromhex(asked.nonce + answered.nonce), self.secret, "sha256")
        to_server, to_client = (
            hmac.digest(extracted, _SEALS + to + bytes([asked.index]), "sha256") for to in (b"server", b"client")
        )
        return (to_server, to_client) if side == "client" else (to_client, to_server)

    def _proving(self, said: AttachData, asked_nonce: str) -> AttachData:
        return said.model_copy(update={"proof": self._proof(said, asked_nonce)})

    def _proof(self, said: AttachData, asked_nonce: str) -> str:
        """Return the proof for a message.

        Args:
            asked_nonce: the client's nonce in an answer, empty in the client's own message. So neither is the other's proof.
        """
        content = _DATA + bytes([said.index, said.plain]) + bytes.fromhex(said.nonce + asked_nonce)
        return hmac.digest(self.secret, content, "sha256").hex()
