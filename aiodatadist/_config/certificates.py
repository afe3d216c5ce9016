"""Certificates with which a cluster proves itself over TLS: read from a folder of trust, checked, and ready for links.

Files are checked before they are used, and OpenSSL reads exactly what was checked: it accepts a key only from a path, so it
gets the path of a file in memory. Then the certificate is used at both ends of a handshake in memory. That finds each reason
for which peers would refuse it, apart from their authorities: its dates, its uses, its key.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from aiodatadist._config.certificate_names import CertificateNames, DnsIds
from aiodatadist._config.secret_files import read_secret
from aiodatadist._values.foreign import printable
from aiodatadist.errors import ParamInvalid

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITY: Final = "ca.crt"
FILES: Final = (CERTIFICATE, KEY, AUTHORITY)
"""The files of a folder of trust in TLS mode."""
_ALL: Final = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO
_EXPIRED: Final = 10
"""OpenSSL's number for a certificate that has expired."""
_ROUNDS: Final = 4
"""The steps of each end after which a handshake of TLS 1.3 is complete."""


class _IsEncrypted(Exception):
    """OpenSSL asked for the password of a key."""


class Certificates:
    """The certificate with which one cluster proves itself over TLS, and the authorities that its peers need.

    Attributes:
        client: the context for links that this cluster asks for.
        server: the context for links that it is asked for.
        names: the names in its own certificate; None if it is in the caller's context, which does not show it.
        begins: the time from which its own certificate is valid, in seconds since the epoch.
        expires: the time at which it expires.
        dns: the ids that the policy lists for DNS names, for certificates of peers.
    """

    def __init__(
        self,
        client: ssl.SSLContext,
        server: ssl.SSLContext,
        names: CertificateNames | None,
        begins: float,
        expires: float,
        where: str,
        dns: DnsIds,
    ) -> None:
        self.client: ssl.SSLContext = client
        self.server: ssl.SSLContext = server
        self.names: CertificateNames | None = names
        self.begins: float = begins
        self.expires: float = expires
        self.dns: DnsIds = dns
        self._where = where

    def check(self, cluster_id: int, now: float) -> None:
        """Check that a cluster can use its certificate at this time.

        Raises ParamInvalid if the certificate is not for this cluster, or has expired.
        """
        if now >= self.expires:
            raise _expired(self._where, self.expires)
        if self.names is not None and self.names.name_for(cluster_id) is None:
            raise ParamInvalid(
                f"{self._where} is for {printable(self.names.clusters())}: must be for cluster {cluster_id}",
                hint=f"its URI must be spiffe://DOMAIN/.../cluster/{cluster_id} or aiodatadist://cluster/{cluster_id}",
            )

    def __repr__(self) -> str:
        return f"<Certificates {printable(self.name)}>"

    @property
    def name(self) -> str:
        """The name of this cluster's certificate in messages."""
        return "of the context" if self.names is None else self.names.any


class Contexts:
    """Two contexts of the caller's, instead of files: the caller renews their certificates.

    Attributes:
        client: for links that the cluster asks for.
        server: for links that it is asked for.

    Raises:
        ParamInvalid: if one would link to an end that shows no certificate, or speaks an older version of TLS.
    """

    def __init__(self, client: ssl.SSLContext, server: ssl.SSLContext) -> None:
        self.client: ssl.SSLContext = client
        self.server: ssl.SSLContext = server
        for name, context, protocol in (
            ("client", client, ssl.PROTOCOL_TLS_CLIENT),
            ("server", server, ssl.PROTOCOL_TLS_SERVER),
        ):
            what = f"the {name}'s context in trust"
            if context.protocol is not protocol:
                raise ParamInvalid(f"{what} has protocol {context.protocol.name}: must have {protocol.name}")
            if context.verify_mode is not ssl.CERT_REQUIRED:
                rule = "must be CERT_REQUIRED, because both ends show a certificate"
                raise ParamInvalid(f"{what} has verify_mode {context.verify_mode.name}: {rule}")
            if context.minimum_version is not ssl.TLSVersion.TLSv1_3:
                raise ParamInvalid(f"{what} has minimum_version {context.minimum_version.name}: must be TLSv1_3")
            if context.check_hostname:
                rule = "must not, because a cluster is known by the id in its certificate, wherever it runs"
                raise ParamInvalid(f"{what} has check_hostname on: {rule}")

    def __deepcopy__(self, _: object) -> Contexts:
        return self

    def __reduce__(self) -> str:
        raise TypeError("trust has contexts of TLS, which cannot be pickled: give the other process a folder")

    def __repr__(self) -> str:
        return "<contexts of TLS>"


def read_certificates(folder: Path, dns: DnsIds | None = None) -> Certificates:
    """Read the certificate, the key and the authorities of a folder.

    It takes some milliseconds: call it in a thread.

    Raises:
        ParamInvalid: if a file cannot be used; the message names it, and the rule.
    """
    paths = {name: folder / name for name in FILES}
    own = read_secret(paths[CERTIFICATE], "the certificate", readable_by=_ALL)
    key = read_secret(paths[KEY], "the private key")
    authority = _text(read_secret(paths[AUTHORITY], "the file of authorities", readable_by=_ALL))
    chain, where = own + b"\n" + key, repr(str(paths[CERTIFICATE]))
    contexts: list[ssl.SSLContext] = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = new_context(protocol)
        _load_own(context, chain, paths)
        _load_authorities(context, authority, paths[AUTHORITY])
        contexts.append(context)
    shown = _try_out(chain, _text(own), paths)
    names, (begins, expires) = CertificateNames(alt_names(shown), dns), validity(shown)
    return Certificates(contexts[0], contexts[1], names, begins, expires, where, dns or {})


def new_context(protocol: int) -> ssl.SSLContext:
    """Return a context for one side of links: TLS 1.3 only, and the other end must show a certificate."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a peer is known by its cluster id, wherever it runs
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no link resumes another one: its certificate is verified again
    return context


def alt_names(shown: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the names in a certificate, as ``getpeercert()`` shows them."""
    return tuple((str(kind), str(text)) for kind, text in shown.get("subjectAltName", ()))


def validity(shown: Mapping[str, Any]) -> tuple[float, float]:
    """Return the times from and until which a certificate is valid, from ``getpeercert()``, in seconds since the epoch."""
    begins, expires = (ssl.cert_time_to_seconds(shown[name]) for name in ("notBefore", "notAfter"))
    return float(begins), float(expires)


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> ssl.SSLObject:
    """Return the server's end of a handshake in memory. Raises ssl.SSLError if either end refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    left = set(ends)
    for _ in range(_ROUNDS):
        for end in ends:
            try:
                end.do_handshake()
                left.discard(end)
            except ssl.SSLWantReadError:
                continue
    if left:
        raise ssl.SSLError("the handshake is not complete")
    return ends[1]


def _text(content: bytes) -> str:
    """Return PEM as a text. Comments in it may have any characters."""
    return content.decode("ascii", "replace").replace("\ufffd", "?")


def _load_own(context: ssl.SSLContext, chain: bytes, paths: Mapping[str, Path]) -> None:
    def password() -> bytes:
        raise _IsEncrypted  # without this OpenSSL asks on the terminal, and waits

    descriptor = os.memfd_create("aiodatadist-tls", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(chain)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=password)
    except _IsEncrypted:
        raise ParamInvalid(
            f"the private key {str(paths[KEY])!r} is encrypted: must not be", hint="the mode of the file protects it"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            what = f"the private key {str(paths[KEY])!r} is not that of {str(paths[CERTIFICATE])!r}: must be"
            raise ParamInvalid(what, hint="replace both together, as Kubernetes does: by one rename") from None
        what = f"the certificate {str(paths[CERTIFICATE])!r} and the private key {str(paths[KEY])!r} cannot be used"
        raise ParamInvalid(f"{what}: {_reason(error)}; both must be in PEM") from None
    finally:
        os.close(descriptor)


def _load_authorities(context: ssl.SSLContext, authority: str, path: Path) -> None:
    try:
        context.load_verify_locations(cadata=authority)
    except (ssl.SSLError, ValueError) as error:
        why = _reason(error) if isinstance(error, ssl.SSLError) else str(error)
        what = f"the file of authorities {str(path)!r} has no certificate: must have one or more, in PEM"
        raise ParamInvalid(f"{what} ({why})") from None


def _try_out(chain: bytes, own: str, paths: Mapping[str, Path]) -> Mapping[str, Any]:
    """Use a certificate at both ends of a handshake, where only it is trusted, and return what ``getpeercert()`` shows."""
    ends: list[ssl.SSLContext] = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        end = new_context(protocol)
        end.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        _load_own(end, chain, paths)
        _load_authorities(end, own, paths[CERTIFICATE])
        ends.append(end)
    where = f"the certificate {str(paths[CERTIFICATE])!r}"
    try:
        return handshake(*ends).getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            raise _expired(where) from None
        what = f"{where} cannot be used: {error.verify_message}"
        raise ParamInvalid(what, hint="it must be valid now, and usable for servers and clients") from None
    except ssl.SSLError as error:
        raise ParamInvalid(f"{where} cannot be used: {_reason(error)}") from None


def moment(at: float) -> str:
    """Return a time in seconds since the epoch as texts show it."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _expired(where: str, at: float | None = None) -> ParamInvalid:
    since = "" if at is None else f" on {moment(at)}"
    return ParamInvalid(f"{where} expired{since}: must be valid", hint="put a new one, and its key, into the folder")


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason in words."""
    return (error.reason or str(error)).replace("_", " ").lower()
