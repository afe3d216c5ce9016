"""Weak, readable and foreign keys: each is refused, with the file, the value and the rule."""

from __future__ import annotations

import base64
import os
import pickle
import pwd
import stat
import sys
import tempfile
import threading
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiodatadist import AuthError, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode, ParamInvalid
from aiodatadist._cluster import dial as dialling
from aiodatadist._config import secret_files, trust, user_key
from aiodatadist._config.llm_config import check_mode, credential_for
from aiodatadist._config.trust import TrustFolder, UserKey, credential_of, keys_of
from aiodatadist.blocking import LLMConfig as BlockingConfig
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster
from tests import children
from tests.hostile.test_strangers import port_of
from tests.keys import HEX, folder_of

OTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
OTHER_HEX = "cd" * 32


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trust.VARIABLE, raising=False)


# ---- a folder of trust ----


def _writable(folder: Path) -> None:
    folder.chmod(0o770)


def _world_writable(folder: Path) -> None:
    folder.chmod(0o1777)


def _file_writable(folder: Path) -> None:
    (folder / "keys").chmod(0o620)


def _file_readable(folder: Path) -> None:
    (folder / "keys").chmod(0o604)


def _no_file(folder: Path) -> None:
    (folder / "keys").unlink()


def _pipe(folder: Path) -> None:
    (folder / "keys").unlink()
    os.mkfifo(folder / "keys", 0o600)


def _large(folder: Path) -> None:
    folder_of(folder, "#" * (64 << 10))


def _with(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).touch(0o600)


def _lines(*lines: str) -> Callable[[Path], object]:
    return lambda folder: folder_of(folder, *lines)


def _encoded(line: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "keys").write_text(line, encoding="utf-8")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder that a group may write": (_writable, "mode 0770: group and others must not be able to write it"),
    "a folder that all may write": (_world_writable, "mode 1777: group and others must not be able to write it"),
    "a key file that a group may write": (_file_writable, "mode 0620: group and others must not be able to write it"),
    "a key file that others may read": (
        _file_readable,
        "mode 0604: users outside its group must not be able to read it",
    ),
    "no key file": (_no_file, "keys' cannot be read: No such file or directory"),
    "a pipe": (_pipe, "keys' is not a regular file: must be one"),
    "a large file": (_large, "has more than 65536 bytes: must have at most that many"),
    "no key": (_lines("# nothing"), "has no key: must have 1 to 16"),
    "too many keys": (
        _lines(*(f"k{i} {HEX}" for i in range(900))),
        "has more than 16 keys: must have at most that many",
    ),
    "a short secret": (_lines(f"a {'ab' * 31}"), "line 1 of .*: the secret has 31 bytes: must have at least 32"),
    "no secret": (_lines(f"a {HEX}", "b"), "line 2 of .* is not a key: must be a name"),
    "a wrong name": (_lines(f"a/b {HEX}"), "line 1 of .* is not a key: must be a name"),
    "one name twice": (_lines(f"a {HEX}", f"a {OTHER_HEX}"), "line 2 of .*: another key has the name 'a'"),
    "no hexadecimal": (_lines("a *secret*"), "line 1 of .*: the secret must be in hexadecimal or base64"),
    "letters beyond ASCII": (_encoded(f"a {'ä' * 64}"), "line 1 of .*: the secret must be in hexadecimal or base64"),
    "keys and a certificate": (_with("tls.crt"), "has 'keys' as well as certificates: must have either, or a mode"),
    "keys and a private key": (_with("tls.key"), "has 'keys' as well as certificates: must have either, or a mode"),
    "keys and an authority": (_with("ca.crt"), "has 'keys' as well as certificates: must have either, or a mode"),
    "an empty policy": (_with("policy.json"), "policy.json': Invalid JSON"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_folder_that_breaks_a_rule_is_refused_before_anything_is_opened(name: str, tmp_path: Path) -> None:
    spoil, rule = WRONG[name]
    folder = folder_of(tmp_path / "trust", f"a {HEX}")
    spoil(folder)
    datadist = LLMDataDist(LLMRole.MIX, 1, LLMConfig(trust=folder))
    with pytest.raises(ParamInvalid, match=rule) as caught:
        await datadist.init()
    assert str(folder) in str(caught.value)
    assert "*secret*" not in str(caught.value)


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
async def test_a_path_that_can_be_no_files_is_refused(path: str) -> None:
    with pytest.raises(ParamInvalid, match=r"the folder of trust .* cannot be read: "):
        await LLMDataDist(LLMRole.MIX, 1, LLMConfig(trust=path)).init()
    with pytest.raises(ParamInvalid, match=r"a key .* cannot be read: "):
        secret_files.read_key(Path(path), "a key")


def test_a_folder_that_goes_away_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing a folder by two renames leaves a moment without one."""
    folder, path_stat = folder_of(tmp_path / "trust", f"a {HEX}"), Path.stat

    def then_gone(path: Path, **options: Any) -> os.stat_result:
        status = path_stat(path, **options)
        if path == folder / "keys":
            folder.rename(tmp_path / "elsewhere")
        return status

    monkeypatch.setattr(Path, "stat", then_gone)
    with pytest.raises(ParamInvalid, match=r"the folder of trust .* cannot be read: No such file"):
        TrustFolder(str(folder)).current()


async def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParamInvalid, match=r"the folder of trust .*nowhere' cannot be read: No such file") as caught:
        await LLMDataDist(LLMRole.MIX, 1, LLMConfig(trust=tmp_path / "nowhere")).init()
    assert "make a folder of mode 0700 with a file 'keys'" in str(caught.value)


@needs_root
async def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "trust", f"a {HEX}")
    os.chown(folder, OTHER_USER, OTHER_USER)
    with pytest.raises(ParamInvalid, match=f"belongs to user {OTHER_USER}: must belong to user 0, or root"):
        TrustFolder(str(folder)).current()


def test_a_folder_is_used_as_kubernetes_mounts_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All users may write it, as its mode says, but the mount is read-only. A group reads the file; both are links."""
    folder, data = tmp_path / "trust", tmp_path / "trust" / "..2026"
    folder.mkdir()
    folder_of(data, f"a {HEX}", mode=0o440)
    (folder / "..data").symlink_to("..2026")
    (folder / "keys").symlink_to("..data/keys")
    folder.chmod(0o1777)
    with pytest.raises(ParamInvalid, match="mode 1777"):
        TrustFolder(str(folder)).current()
    monkeypatch.setattr(secret_files, "is_read_only", lambda path: True)
    assert [key.name for key in TrustFolder(str(folder)).current()] == ["a"]


@pytest.mark.parametrize("what", ["trust", "trust/keys"])
def test_a_path_that_leads_to_a_read_only_mount_by_now_makes_nothing_trusted(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user who can exchange what a path names does so between the opening and the check."""
    folder = folder_of(tmp_path / "trust", f"a {HEX}")
    (tmp_path / what).chmod(0o777 if what == "trust" else 0o660)
    elsewhere = os.statvfs_result((4096, 4096, 1, 0, 0, 1, 0, 0, os.ST_RDONLY, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: elsewhere)
    with pytest.raises(ParamInvalid, match="group and others must not be able to write it"):
        TrustFolder(str(folder)).current()


def test_secrets_are_read_in_hexadecimal_and_base64(tmp_path: Path) -> None:
    secret = bytes(range(200, 240))
    text = f"# keys\n\nhex {secret.hex()}\n  base64   {base64.b64encode(secret).decode()}\n"
    assert [tuple(key) for key in keys_of(text.encode(), tmp_path)] == [("hex", secret), ("base64", secret)]
    assert secret.hex() not in repr(keys_of(text.encode(), tmp_path))


async def test_clusters_with_one_folder_link_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = folder_of(tmp_path / "a", f"a {HEX}"), folder_of(tmp_path / "b", f"a {OTHER_HEX}")
    monkeypatch.setenv(trust.VARIABLE, str(folder))
    async with (
        open_cluster(1, trust=folder) as prompt,
        open_cluster(2, device_id=1) as friend,
        open_cluster(3, device_id=2, trust=str(other)) as foe,
        open_cluster(4, device_id=3, auth_key=bytes.fromhex(HEX)) as friend_too,
    ):
        for cluster in (friend, friend_too):
            assert (await cluster.datadist.link_clusters([cluster_info(prompt)], 5000))[0] is LLMStatusCode.LLM_SUCCESS
        linked = await foe.datadist.link_clusters([cluster_info(prompt)], 5000)
        assert isinstance(linked.errors[0], AuthError)
        assert str(other) in str(linked.errors[0].hint)
        assert str(folder) not in str(linked.errors[0])


def test_a_folder_and_a_key_exclude_each_other() -> None:
    with pytest.raises(ParamInvalid, match="trust and auth_key are both set: must be one of them"):
        credential_of("/run/trust", b"k" * 32)
    with pytest.raises(ParamInvalid, match="trust and auth_key"):
        check_mode(LLMConfig(trust="x", auth_key="y"))


def test_what_is_given_comes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.VARIABLE, "none")
    assert isinstance(credential_for(LLMConfig()), trust.Untrusted)
    assert isinstance(credential_for(LLMConfig(auth_key=b"k")), trust.AuthKey)
    assert isinstance(credential_for(LLMConfig(trust="/run/trust")), TrustFolder)


def test_the_dictionary_of_options_carries_the_folder() -> None:
    assert LLMConfig(trust="/run/trust").generate_options()["aiodatadist.Trust"] == "/run/trust"
    assert BlockingConfig.from_options({"aiodatadist.Trust": "/run/trust"}).trust == "/run/trust"


# ---- beyond this machine ----


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "needs auth_key or trust"),
        ({"trust": "none"}, "needs auth_key or trust"),
        ({"auth_key": b"k" * 15}, "needs an auth_key of at least 16 bytes; this one has 15"),
    ],
)
@pytest.mark.parametrize("host", ["10.0.0.1", "node-7"])
async def test_a_cluster_without_a_good_key_neither_listens_nor_dials_beyond_loopback(
    options: dict[str, Any], rule: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connected(*_: Any) -> None:
        raise AssertionError("a socket was opened")

    async def addresses_of(*_: Any) -> list[str]:
        return ["10.0.0.1"]

    monkeypatch.setattr(dialling, "connected", connected)
    with pytest.raises(ParamInvalid, match=rule):
        await LLMDataDist(LLMRole.MIX, 1, LLMConfig(listen="10.0.0.1:26000", **options)).init()
    async with open_cluster(2, **options) as cluster:
        monkeypatch.setattr(inside(cluster.datadist).initiator.host_names, "addresses_of", addresses_of)
        info = LLMClusterInfo(1)
        info.append_remote_ip_info(host, 26000)
        linked = await cluster.datadist.link_clusters([info], 5000)
    assert isinstance(linked.errors[0], AuthError)
    assert f"is on a network: linking to it {rule}" in str(linked.errors[0])


async def test_a_long_key_may_leave_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = []

    async def connected(*address: Any) -> None:
        dialled.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(dialling, "connected", connected)
    async with open_cluster(2, auth_key=b"k" * 16) as cluster:
        info = LLMClusterInfo(1)
        info.append_remote_ip_info("10.0.0.1", 26000)
        await cluster.datadist.link_clusters([info], 5000)
    assert dialled == [("10.0.0.1", 26000)]


@pytest.mark.parametrize(
    ("host", "is_on_this_machine"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("fe80::1%lo", False), ("localhost", False)],
)  # fmt: skip
def test_addresses_of_this_machine(host: str, is_on_this_machine: bool) -> None:
    assert trust.is_loopback(host) is is_on_this_machine
    assert bool(UserKey({}).why_not(host)) is not is_on_this_machine


# ---- this user's key ----


def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_the_place_of_this_users_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime folder that is not there, or not this user's, does not count. Nor does a relative path."""
    _own_folders(tmp_path, monkeypatch)
    assert user_key.key_path(os.environ) == tmp_path / "state/aiodatadist/key"
    (tmp_path / "run").mkdir()
    assert user_key.key_path(os.environ) == tmp_path / "run/aiodatadist/key"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "run")
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert user_key.key_path(os.environ) == tmp_path / "home/.local/state/aiodatadist/key"


@needs_root
def test_a_runtime_folder_of_another_user_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After su the environment still names it."""
    _own_folders(tmp_path, monkeypatch)
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", OTHER_USER, OTHER_USER)
    assert user_key.key_path(os.environ) == tmp_path / "state/aiodatadist/key"


def test_this_users_key_is_created_once_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "aiodatadist" / "key"
    key = user_key.user_key(path)
    assert len(key) == 32
    assert user_key.user_key(path) == key
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path)] == [0o700, 0o600]
    assert list(path.parent.iterdir()) == [path]


def test_first_users_at_the_same_time_have_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have found no key, and have one ready, before the first one gives its key the name."""
    path, link, ready, keys = tmp_path / "aiodatadist" / "key", os.link, threading.Barrier(8), set[bytes]()

    def together(source: Path, target: Path) -> None:
        ready.wait(10)
        link(source, target)

    monkeypatch.setattr(os, "link", together)
    threads = [threading.Thread(target=lambda: keys.add(user_key.user_key(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 1
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("mode", "content", "rule"),
    [
        (0o644, HEX, "mode 0644: users outside its group must not be able to read it"),
        (0o640, HEX, "mode 0640: its group must not be able to read it"),
        (0o602, HEX, "mode 0602: group and others must not be able to write it"),
        (0o600, "", "has no key: must be 32 bytes or more in hexadecimal"),
        (0o600, "ab" * 31, "has no key: must be 32 bytes or more in hexadecimal"),
    ],
)
async def test_a_weak_key_of_this_user_is_refused(
    mode: int, content: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "aiodatadist" / "key"
    path.parent.mkdir(mode=0o700)
    path.write_text(content, encoding="ascii")
    path.chmod(mode)
    with pytest.raises(ParamInvalid, match=rule):
        await LLMDataDist(LLMRole.MIX, 1, LLMConfig(listen="127.0.0.1:0")).init()


def test_a_folder_of_this_users_key_that_others_may_write_is_refused(tmp_path: Path) -> None:
    user_key.user_key(tmp_path / "aiodatadist" / "key")
    (tmp_path / "aiodatadist").chmod(0o777)
    with pytest.raises(ParamInvalid, match=r"the folder of this user's key .* has mode 0777"):
        user_key.user_key(tmp_path / "aiodatadist" / "key")


async def test_processes_that_were_there_before_the_users_key_was_replaced_link_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime folder is removed when its user logs out, with the key; the user's processes may continue."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "aiodatadist" / "key"
    async with open_cluster(1) as prompt, open_cluster(2, device_id=1) as decoder:
        before = path.read_bytes()
        path.unlink()
        path.parent.rmdir()
        assert await _linked(decoder, prompt)
        await decoder.datadist.unlink_clusters([cluster_info(prompt)], 5000)
        assert not path.exists()
        async with open_cluster(3, device_id=2) as newer:
            assert path.read_bytes() != before
            for client, server in ((newer, prompt), (decoder, newer), (decoder, prompt)):
                assert await _linked(client, server)


async def _linked(client: Cluster, server: Cluster) -> bool:
    linked = await client.datadist.link_clusters([cluster_info(server)], 5000)
    return linked.status is LLMStatusCode.LLM_SUCCESS


async def test_a_home_in_which_nothing_can_be_created_is_an_error_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a cluster that links needs the key."""
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    with pytest.raises(ParamInvalid, match=r"key cannot be kept as .*home/.local/state/aiodatadist/key': ") as caught:
        await LLMDataDist(LLMRole.MIX, 1, LLMConfig(listen="127.0.0.1:0")).init()
    assert "AIODATADIST_TRUST" in str(caught.value)
    async with open_cluster(1, listen_ip_info=None) as cluster:
        linked = await cluster.datadist.link_clusters([_silent_place()], 5000)
        assert isinstance(linked.errors[0], AuthError)
        assert "key cannot be kept as" in str(linked.errors[0])


async def test_a_cluster_whose_key_cannot_be_used_does_not_begin_to_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would listen, and refuse each client."""
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    async with open_cluster(1, listen_ip_info=None) as cluster:
        with pytest.raises(ParamInvalid, match="key cannot be kept as"):
            await cluster.datadist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})
        assert inside(cluster.datadist).listen_address is None
        assert cluster.datadist.role is LLMRole.MIX


def _silent_place() -> LLMClusterInfo:
    info = LLMClusterInfo(2)
    info.append_remote_ip_info("127.0.0.1", 9)
    return info


def test_a_user_without_a_home_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_account(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", no_account)
    with pytest.raises(ParamInvalid, match=r"user \d+ has no home") as caught:
        user_key.key_path({})
    assert "mount such a folder" in str(caught.value)


async def test_trust_that_is_turned_off_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with open_cluster(1, trust="none") as prompt, open_cluster(2, device_id=1, trust="none") as decoder:
        assert (await decoder.datadist.link_clusters([cluster_info(prompt)], 5000))[0] is LLMStatusCode.LLM_SUCCESS
    assert "trust is 'none': processes of any user of this machine can link, and read caches" in caplog.text


STRANGER = """
import asyncio, os, sys
from aiodatadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole

async def link(**options: str) -> None:
    async with LLMDataDist(LLMRole.MIX, 2, LLMConfig(device_id=1, **options)) as datadist:
        info = LLMClusterInfo(1)
        info.append_remote_ip_info("127.0.0.1", int(sys.argv[1]))
        linked = await datadist.link_clusters([info], 5000)
        print(linked.status.name, linked.errors[0], flush=True)

asyncio.run(link())  # as the user of the cluster; this loads all that needs that user's files
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
os.environ["HOME"] = sys.argv[2]
for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
    os.environ.pop(name, None)
for options in ({}, {"trust": "none"}, {"auth_key": "a guess of some bytes"}):
    asyncio.run(link(**options))
"""


@needs_root
async def test_another_user_of_this_machine_is_refused_at_the_proof() -> None:
    """A process of user 65534: with its own key, with none, and with a guess."""
    with tempfile.TemporaryDirectory() as theirs:
        os.chown(theirs, OTHER_USER, OTHER_USER)
        async with open_cluster(1) as cluster:
            command = sys.executable, "-c", STRANGER, str(port_of(cluster)), theirs
            stranger = await children.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
            said, errors = await stranger.communicate()
            lines = said.decode().splitlines()
            assert len(lines) == 4, errors.decode()
            assert not cluster.datadist.statistics().links
        assert (await anyio.Path(theirs, ".local/state/aiodatadist/key").stat()).st_uid == OTHER_USER
    refused = "LLM_LINK_FAILED the peer does not have this end's key"
    assert lines[0] == "LLM_SUCCESS None"
    assert lines[1].startswith(refused)
    assert lines[2].startswith("LLM_LINK_FAILED an unproved peer refused: protocol differs: 5 here, 4 at the peer")
    assert lines[3].startswith(refused)


# ---- nothing shows a key ----


def test_no_pickle_repr_or_dump_of_a_configuration_has_the_key() -> None:
    config = LLMConfig(auth_key=b"secret of 16 byte")
    for shown in (repr(config), str(config), repr(config.model_dump()), config.model_dump_json(), str(config.options)):
        assert "secret of" not in shown
    with pytest.raises(TypeError, match="cannot be pickled: the key would be in the pickle"):
        pickle.dumps(config)
    assert config.model_copy(deep=True).auth_key == config.auth_key
    assert pickle.loads(pickle.dumps(LLMConfig(trust="/run/trust"))) == LLMConfig(trust="/run/trust")
