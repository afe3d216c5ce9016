"""TLS without I/O: bytes of the socket on one side, bytes of messages on the other.

A link's connection stays the same with TLS and without it: what comes passes through :meth:`TlsPipe.feed`, what goes through
:meth:`TlsPipe.seal`. So both event loops, and the plain socket on which a client proves itself, treat it alike.

A certificate is verified by OpenSSL during the handshake. Then this end knows the names in it, and the peer's hello must
agree with them.
"""

from __future__ import annotations

import ssl
from typing import Final

from aiodatadist._config.certificate_names import CertificateNames
from aiodatadist._config.certificates import Certificates, alt_names, validity
from aiodatadist._values.foreign import printable
from aiodatadist._wire.data_proof import said_secret
from aiodatadist._wire.frames import MAGIC, Decoder
from aiodatadist._wire.key_proof import Side, heartbeat_key
from aiodatadist._wire.messages import Hello, Refuse
from aiodatadist._wire.proved import Proved
from aiodatadist._wire.reasons import refused
from aiodatadist.errors import AuthError, IncompatiblePeer, LinkError, ProtocolError

FIRST_BYTE: Final = b"\x16"
"""The first byte of a client that begins TLS. A message begins with ``K``."""
_HEAD: Final = 5
"""Bytes of the head of a record. The last two are the length of the rest."""
RECORD: Final = 1 << 14
"""The most bytes of messages in one record of TLS."""
MAX_HANDSHAKE: Final = 16 << 10
"""The most bytes that a peer may send before it is proved."""
HINT: Final = "both ends need certificates of an authority in the other end's ca.crt, and valid now"
_ABOUT_CERTIFICATES: Final = (
    "CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "DECRYPT_ERROR", "INSUFFICIENT_SECURITY",
)  # fmt: skip
"""Words in the names of alerts with which a peer refuses this end's certificate."""


class TlsPipe:
    """An end of a TLS connection.

    Args:
        own: the certificates of this end.
        expected: the cluster that must answer a client. Another member of the group may answer at its address; what that
            one says decides nothing.

    Feed it what the socket brings with :meth:`shake` until that returns True, and with :meth:`feed` from then on. Send what
    :meth:`outgoing` returns after each call of these two, also if it raised: then it has the alert for the peer.

    Attributes:
        records: the number of heads of records that have come.
        names: the names in the peer's certificate, once the handshake is complete.
        expires: the time at which that certificate expires, in seconds since the epoch.
        is_proved: True once the peer has proved that it has the certificate.
        is_over: True once the peer has closed its side, or either end has refused the other: no message comes after that,
            and none can be sent.
    """

    def __init__(self, side: Side, own: Certificates, expected: int | None = None) -> None:
        self.names: CertificateNames = CertificateNames(())
        self.expires: float = 0.0
        self.is_proved: bool = False
        self._own = own
        self._expected = expected
        self._side = side
        self.is_over: bool = False
        self._shaken = 0
        self._plain: Decoder | None = None
        self.records: int = 0
        self._head = b""
        self._missing = 0
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = own.server if side == "server" else own.client
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=side == "server")

    @property
    def is_within(self) -> bool:
        """True if a record has begun whose rest has not come. OpenSSL does not tell."""
        return bool(self._head or self._missing)

    def _take(self, data: bytes | memoryview) -> None:
        self._incoming.write(data)
        is_new = not self._head and not self._missing
        if is_new and len(data) > _HEAD and len(data) == _HEAD + (data[3] << 8 | data[4]):
            self.records += 1  # one whole record, as most messages are
            return
        while data:
            if self._missing:
                step = min(self._missing, len(data))
                self._missing -= step
            else:
                step = min(_HEAD - len(self._head), len(data))
                self._head += data[:step]
                if len(self._head) == _HEAD:
                    self._missing, self._head = int.from_bytes(self._head[3:]), b""
                    self.records += 1
            data = data[step:]

    def shake(self, data: bytes = b"") -> bool:
        """Continue the handshake with bytes of the socket; return True if it is complete.

        Raises:
            AuthError: if either end's certificate is refused.
            ProtocolError: if the bytes are not a handshake of TLS 1.3, or too many.
        """
        if (
            self._side == "client"
            and data
            and not self._shaken
            and data[:1] != FIRST_BYTE
            and MAGIC.startswith(data[:1])
        ):
            self._plain = Decoder(MAX_HANDSHAKE)
        self._shaken += len(data)
        if self._plain is not None:
            return self._hear_plain(self._plain, data)
        self._take(data)
        if self._shaken > MAX_HANDSHAKE:
            raise ProtocolError(
                f"the peer's handshake has more than {MAX_HANDSHAKE} bytes: must have at most that many"
            )
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            self.is_over = True
            raise self._reason(error) from None
        shown = self._tls.getpeercert()
        if not shown:  # an SSLContext that does not ask for a certificate
            raise AuthError("the peer showed no certificate: must show one", hint=HINT)
        self.names, self.expires = CertificateNames(alt_names(shown), self._own.dns), validity(shown)[1]
        self.is_proved = True
        return True

    def _hear_plain(self, decoder: Decoder, data: bytes) -> bool:
        """Read the refusal of a peer that answers without TLS, because it has no certificates. Nothing in it is proved."""
        for message in decoder.feed(data):
            if isinstance(message, Refuse):
                raise refused(message, is_proved=False, hint=HINT)
            raise ProtocolError("the peer answers without TLS: this end proves a certificate, and the peer must, too")
        return False

    def feed(self, data: bytes | memoryview) -> bytes:
        """Decrypt bytes of the socket, and return the messages in them. No more come once the peer has closed its side.

        Raises:
            ProtocolError: if a byte was changed, added or left out on its way.
            AuthError: if the peer refuses this end's certificate.
        """
        if self.is_over:
            return b""
        self._take(data)
        # Messages are shorter than their records, so most need no room for a whole record, nor a second look.
        most = len(data) if _HEAD < len(data) < RECORD else RECORD
        records: list[bytes] = []
        try:
            while not records or len(records[-1]) == most or self._incoming.pending:
                records.append(self._tls.read(most))
                if not records[-1]:
                    self.is_over = True
                    break
        except ssl.SSLWantReadError:  # the rest is a part of a record, or a message between the two ends of TLS
            pass
        except ssl.SSLError as error:
            self.is_over = True
            raise self._reason(error) from None
        return records[0] if len(records) == 1 else b"".join(records)

    def seal(self, data: bytes) -> bytes:
        """Return the bytes for the socket that carry these, and all that still wait for it. Call it only before the end."""
        written = self._tls.write(data) if data else 0  # one record, unless it is large
        if written < len(data):
            left = memoryview(data)[written:]
            while left:
                left = left[self._tls.write(left) :]
        return self._outgoing.read()

    def outgoing(self) -> bytes:
        """Return the bytes for the socket that the handshake, or the reading, has caused."""
        return self._outgoing.read() if self._outgoing.pending else b""

    def vouch(self, peer: Hello, own: Hello) -> Proved:
        """Return the credential of a peer: the name in its certificate that stands for the cluster that it says it is.

        Python's TLS exports no secret. The nonces of both hellos serve as one, because they travel encrypted.

        Raises IncompatiblePeer if its certificate is for another cluster.
        """
        cluster_id = peer.cluster_id
        name = self.names.name_for(cluster_id)
        if name is None:
            raise IncompatiblePeer(
                f"its certificate is for {printable(self.names.clusters())}, it says {cluster_id}",
                hint=f"its certificate must have the URI spiffe://DOMAIN/.../cluster/{cluster_id}",
            )
        return Proved(printable(name), heartbeat_key(said_secret(peer, own)), self.expires)

    def _reason(self, error: ssl.SSLError) -> LinkError:
        """Return the link's error for an error of OpenSSL's."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return AuthError(f"the peer's certificate does not verify: {printable(error.verify_message)}", hint=HINT)
        reason = error.reason or printable(error)
        words = reason.replace("_", " ").lower()
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return AuthError("the peer showed no certificate: must show one", hint=HINT)
        if "ALERT" in reason and any(word in reason for word in _ABOUT_CERTIFICATES):
            refused = AuthError(f"the peer refused this end's certificate: {words.partition('alert ')[2]}", hint=HINT)
            is_expected = self._expected is not None and self.names.name_for(self._expected) is not None
            refused.is_proved = self.is_proved and is_expected
            return refused
        if self.is_proved:
            return ProtocolError(f"a message was changed or added on its way: {words}")
        return ProtocolError(f"the peer broke the rules of TLS 1.3: {words}")
