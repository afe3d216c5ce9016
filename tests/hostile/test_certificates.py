"""Certificates that break a rule: each is refused before anything starts, with the file and the rule."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiodatadist import LLMConfig, LLMDataDist, LLMRole, ParamInvalid
from aiodatadist._config import secret_files, trust
from aiodatadist._config.certificates import Certificates
from aiodatadist._config.trust import TrustFolder
from tests.certificates import DAY, Authority, Pair, folder_for, tls_folder, uri_of, write

OWN = 7
CA = Authority()


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trust.VARIABLE, raising=False)


def _with(**options: Any) -> Callable[[Path], object]:
    """Replace the certificate of the folder with another one."""
    return lambda folder: tls_folder(folder, CA.issue(**{"uris": [uri_of(OWN)]} | options), CA)


def _mode(name: str, mode: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).chmod(mode)


def _content(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: write(folder / name, content)


def _gone(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _pipe(folder: Path) -> None:
    (folder / "tls.key").unlink()
    os.mkfifo(folder / "tls.key", 0o600)


def _key_of_another(folder: Path) -> None:
    tls_folder(folder, Pair(CA.for_cluster(OWN).certificate, CA.issue(number=1).key), CA)


GROUP_MUST_NOT_WRITE = "group and others must not be able to write it"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder that a group may write": (lambda folder: folder.chmod(0o770), f"mode 0770: {GROUP_MUST_NOT_WRITE}"),
    "a certificate that a group may write": (
        _mode("tls.crt", 0o664),
        rf"tls.crt' has mode 0664: {GROUP_MUST_NOT_WRITE}",
    ),
    "a key that all may write": (_mode("tls.key", 0o602), rf"tls.key' has mode 0602: {GROUP_MUST_NOT_WRITE}"),
    "authorities that all may write": (_mode("ca.crt", 0o646), rf"ca.crt' has mode 0646: {GROUP_MUST_NOT_WRITE}"),
    "a key that others may read": (
        _mode("tls.key", 0o604),
        r"tls.key' has mode 0604: users outside its group must not",
    ),
    "no certificate": (_gone("tls.crt"), r"the certificate .*tls.crt' cannot be read: No such file"),
    "no key": (_gone("tls.key"), r"the private key .*tls.key' cannot be read: No such file"),
    "no authorities": (_gone("ca.crt"), r"the file of authorities .*ca.crt' cannot be read: No such file"),
    "a pipe": (_pipe, r"tls.key' is not a regular file: must be one"),
    "a large file": (_content("ca.crt", b"#" * (1 << 17)), r"ca.crt' has more than 65536 bytes"),
    "an empty certificate": (_content("tls.crt", b""), r"tls.crt' and the private key .* cannot be used: .*in PEM"),
    "an empty key": (_content("tls.key", b""), r"the private key .*tls.key' cannot be used: .*in PEM"),
    "empty authorities": (_content("ca.crt", b""), r"ca.crt' has no certificate: must have one or more, in PEM"),
    "authorities that are none": (_content("ca.crt", b"\xff\0"), r"ca.crt' has no certificate: must have one or more"),
    "an expired certificate": (_with(valid=(-DAY, -1)), r"the certificate .*tls.crt' expired: must be valid"),
    "a certificate for later": (_with(valid=(DAY, 2 * DAY)), r"tls.crt' cannot be used: certificate is not yet valid"),
    "a certificate for servers only": (
        _with(only_for=["server"]),
        r"tls.crt' cannot be used: unsuitable certificate purpose",
    ),
    "a certificate for clients only": (
        _with(only_for=["client"]),
        r"tls.crt' cannot be used: unsuitable certificate purpose",
    ),
    "an encrypted key": (_with(password=b"secret"), r"tls.key' is encrypted: must not be"),
    "a key of another certificate": (_key_of_another, r"tls.key' is not that of .*tls.crt': must be"),
    "a certificate of another cluster": (
        _with(uris=[uri_of(8), uri_of(9)]),
        r"tls.crt' is for clusters 8, 9: must be for cluster 7",
    ),
    "a certificate of no cluster": (_with(uris=["https://x"], dns=["a.b"]), r"tls.crt' is for no cluster: must be for"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_folder_that_breaks_a_rule_is_refused_before_anything_is_opened(name: str, tmp_path: Path) -> None:
    spoil, rule = WRONG[name]
    folder = folder_for(tmp_path / "trust", OWN)
    spoil(folder)
    datadist = LLMDataDist(LLMRole.MIX, OWN, LLMConfig(trust=folder))
    with pytest.raises(ParamInvalid, match=rule) as caught:
        await datadist.init()
    assert str(folder) in str(caught.value)
    assert "PRIVATE" not in str(caught.value)


def held(folder: Path) -> Certificates:
    found = TrustFolder(str(folder)).proof()
    assert isinstance(found, Certificates)
    return found


def test_a_folder_is_used_as_kubernetes_mounts_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All users may write it, as its mode says, but the mount is read-only. A group reads the key; all are links."""
    folder, data = tmp_path / "trust", tmp_path / "trust" / "..2026"
    folder.mkdir()
    folder_for(data, OWN)
    (data / "tls.key").chmod(0o440)
    (data / "tls.crt").chmod(0o444)
    (folder / "..data").symlink_to("..2026")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (folder / name).symlink_to(f"..data/{name}")
    folder.chmod(0o1777)
    with pytest.raises(ParamInvalid, match="mode 1777"):
        held(folder)
    monkeypatch.setattr(secret_files, "is_read_only", lambda path: True)
    assert held(folder).name == uri_of(OWN)


def test_a_certificate_is_for_the_clusters_that_it_names(tmp_path: Path) -> None:
    found = held(tls_folder(tmp_path / "trust", CA.issue([uri_of(7), uri_of(8)], dns=["a.b"]), CA, Authority(1)))
    found.check(7, time.time())
    found.check(8, time.time())
    with pytest.raises(ParamInvalid, match=r"is for clusters 7, 8: must be for cluster 9"):
        found.check(9, time.time())
    assert 29 * DAY < found.expires - time.time() <= 30 * DAY
    assert repr(found) == f"<Certificates {uri_of(7)}>"


def test_a_certificate_that_has_expired_since_it_was_read_is_refused(tmp_path: Path) -> None:
    found = held(folder_for(tmp_path / "trust", OWN))
    found.check(OWN, found.expires - 1)
    with pytest.raises(ParamInvalid, match=r"tls.crt' expired on \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC: must be valid"):
        found.check(OWN, found.expires)


def test_both_ends_of_a_link_must_show_a_certificate_and_speak_tls_1_3(tmp_path: Path) -> None:
    found = held(folder_for(tmp_path / "trust", OWN))
    for context in (found.client, found.server):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert found.server.num_tickets == 0


def test_a_folder_is_read_again_once_it_has_changed(tmp_path: Path) -> None:
    folder = folder_for(tmp_path / "trust", OWN)
    credential = TrustFolder(str(folder))
    first = credential.proof()
    assert credential.proof() is first
    write(folder / "ca.crt", Authority(1).certificate)
    assert credential.proof() is not first


def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the old certificate would be tried with the new key."""
    folder, read, replaced = folder_for(tmp_path / "trust", OWN), os.fdopen, list[bool]()

    def then_replace(descriptor: int, *arguments: Any, **options: Any) -> Any:
        if not replaced and Path(f"/proc/self/fd/{descriptor}").readlink().name == "tls.key":
            replaced.append(True)
            os.close(descriptor)
            tls_folder(folder, CA.issue([uri_of(OWN)], number=1), CA)
            descriptor = os.open(folder / "tls.key", os.O_RDONLY)
        return read(descriptor, *arguments, **options)

    monkeypatch.setattr(os, "fdopen", then_replace)
    held(folder).check(OWN, time.time())
    assert replaced == [True]


def test_a_folder_that_loses_its_keys_to_certificates_has_no_keys(tmp_path: Path) -> None:
    """A server that needs keys must not take that for a folder without a proof."""
    credential = TrustFolder(str(folder_for(tmp_path / "trust", OWN)))
    with pytest.raises(ParamInvalid, match=r"has certificates: must have keys"):
        credential.current()
