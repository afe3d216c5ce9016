"""An authority for tests, and folders of trust with certificates that it issued."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = 86400.0


class Pair(NamedTuple):
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


def uri_of(cluster_id: int, path: str = "kv") -> str:
    return f"spiffe://test/{path}/cluster/{cluster_id}"


@cache
def _new_key(number: int) -> ec.EllipticCurvePrivateKey:
    """Return the key of this number. Keys are used again, because nothing here is secret."""
    return ec.generate_private_key(ec.SECP256R1())


class Authority:
    """An authority that issues certificates. Each number is another authority."""

    def __init__(self, number: int = 0) -> None:
        self._key = _new_key(-1 - number)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {number}")])
        builder = self._builder(self._name, self._key.public_key(), (-DAY, 3650 * DAY))
        self._own = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(
            self._key, hashes.SHA256()
        )
        self.certificate: bytes = self._own.public_bytes(serialization.Encoding.PEM)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, valid: tuple[float, float]
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        begin, end = (now + datetime.timedelta(seconds=seconds) for seconds in valid)
        own, issuer = self._key.public_key(), x509.AuthorityKeyIdentifier.from_issuer_public_key
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(issuer(own), critical=False)
        )

    def issue(
        self,
        uris: Sequence[str] = (),
        dns: Sequence[str] = (),
        valid: tuple[float, float] = (-DAY, 30 * DAY),
        only_for: Sequence[str] = (),
        number: int = 0,
        password: bytes | None = None,
    ) -> Pair:
        """Issue a certificate.

        Args:
            valid: seconds from now, of its begin and its end.
            only_for: ``server`` or ``client``, if it may not be used for both.
            number: of its key.
            password: with which its key is encrypted.
        """
        key = _new_key(number)
        builder = self._builder(x509.Name([]), key.public_key(), valid)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        names += [x509.DNSName(name) for name in dns]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        if only_for:
            uses = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
            builder = builder.add_extension(x509.ExtendedKeyUsage([uses[use] for use in only_for]), critical=False)
        how: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            how = serialization.BestAvailableEncryption(password)
        return Pair(
            builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how),
        )

    def for_cluster(self, cluster_id: int, path: str = "kv") -> Pair:
        return self.issue([uri_of(cluster_id, path)])


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file beside the old one, and rename it."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_bytes(content)
    fresh.chmod(mode)
    fresh.rename(path)


def tls_folder(path: Path, own: Pair, *authorities: Authority) -> Path:
    """Make a folder of trust with a certificate and the authorities of peers, or write them into it."""
    path.mkdir(mode=0o700, exist_ok=True)
    write(path / "tls.crt", own.certificate)
    write(path / "tls.key", own.key)
    write(path / "ca.crt", b"".join(each.certificate for each in authorities))
    return path


def folder_for(path: Path, cluster_id: int, authority: Authority | None = None) -> Path:
    """Make a cluster's folder of trust, with a certificate from the authority."""
    issuer = authority or Authority()
    return tls_folder(path, issuer.for_cluster(cluster_id), issuer)
