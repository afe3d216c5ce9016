"""Keys that are replaced while clusters run: links stay, new links use what is new, and what was removed links no longer."""

from __future__ import annotations

import hmac
import json
import logging
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiodatadist import (
    AuthError,
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LinkError,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    ParamInvalid,
)
from aiodatadist._cluster import key_ring
from aiodatadist._cluster.key_ring import LOOK_SECONDS, KeyRing
from aiodatadist._concurrency.blocking_calls import in_thread
from aiodatadist._config.certificates import Certificates
from aiodatadist._config.llm_config import use_key_file
from aiodatadist._config.policy import Policy, read_policy
from aiodatadist._config.seal_keys import SealKeys
from aiodatadist._config.trust import AuthKeyFile, Credential, Key, TrustFolder, UserKey
from aiodatadist._config.user_key import user_key
from aiodatadist._counting import Incidents
from aiodatadist._values.peer_rights import EVERY_RIGHT, PeerRights
from aiodatadist._wire.proved import Proved
from aiodatadist.testing import Cluster, cluster_info, inside, open_cluster, verify
from tests.certificates import DAY, Authority, folder_for, tls_folder, uri_of
from tests.keys import HEX, folder_of, policy_in
from tests.test_pull import moved

OLD, NEW, NEWER = f"old {HEX}", f"new {'cd' * 32}", f"newer {'ef' * 32}"
DESC = CacheDesc(1, [4, 64], DataType.DT_UINT8)


async def link(client: Cluster, server: Cluster) -> Exception | None:
    linked = await client.datadist.link_clusters([cluster_info(server)], 5000)
    return linked.errors[0]


async def pulled(cluster: Cluster, cache: Any, block: int) -> None:
    await cluster.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), cache, [block], [0])
    verify(cluster.memory(cache), cache, moved(DESC, {0: block}))


async def test_a_link_survives_two_rotations_and_two_ends_always_have_a_key_in_common(tmp_path: Path) -> None:
    """Each end is one step ahead of the other at a time. At each step both link anew, in both directions."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    steps = [[OLD], [OLD, NEW], [NEW, OLD], [NEW], [NEW, NEWER], [NEWER, NEW], [NEWER]]
    folder_of(ours, *steps[0])
    folder_of(theirs, *steps[0])
    async with (
        open_cluster(1, trust=ours) as prompt,
        open_cluster(2, device_id=1, trust=theirs) as decoder,
        open_cluster(3, device_id=2, trust=theirs) as other,
    ):
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        assert await link(decoder, prompt) is None
        for number, step in enumerate(steps[1:]):
            for folder in (ours, theirs):
                folder_of(folder, *step)
                for client, server in ((other, prompt), (prompt, other)):
                    assert await link(client, server) is None, (step, folder)
                    await client.datadist.unlink_clusters([cluster_info(server)], 5000)
            await pulled(decoder, cache, number % 4)
        assert [each.generation for each in decoder.datadist.statistics().links] == [1]


async def test_a_key_that_was_removed_links_no_longer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = folder_of(tmp_path / "ours", OLD), folder_of(tmp_path / "theirs", OLD)
    async with open_cluster(1, trust=ours) as prompt, open_cluster(2, device_id=1, trust=theirs) as decoder:
        caplog.set_level(logging.INFO)
        folder_of(ours, NEW)
        for client, server in ((decoder, prompt), (prompt, decoder)):
            assert isinstance(await link(client, server), AuthError)
    assert "cluster 1: new proofs use key new of new" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: (folder / "keys").chmod(0o622), "mode 0622: group and others must not be able to write it"),
        (lambda folder: folder.chmod(0o777), "mode 0777: group and others must not be able to write it"),
        (lambda folder: (folder / "keys").unlink(), "cannot be read: No such file or directory"),
        (lambda folder: policy_in(folder, "{}"), "policy.json': version: Field required"),
    ],
    ids=["a writable file", "a writable folder", "no file", "a policy"],
)
async def test_keys_that_cannot_be_used_any_longer_link_nothing_until_they_are_mended(
    spoil: Any, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer is told no path; the log is. An existing link continues."""
    ours, theirs = folder_of(tmp_path / "ours", OLD), folder_of(tmp_path / "theirs", OLD)
    async with (
        open_cluster(1, trust=ours) as prompt,
        open_cluster(2, device_id=1, trust=theirs) as decoder,
        open_cluster(3, device_id=2, trust=theirs) as other,
    ):
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        assert await link(decoder, prompt) is None
        spoil(ours)
        error = await link(other, prompt)
        assert isinstance(error, AuthError)
        assert "the keys of this end cannot be used now" in str(error)
        assert str(ours) not in str(error)
        assert why in caplog.text
        own = await link(prompt, other)
        assert isinstance(own, AuthError)
        assert why in str(own)
        await pulled(decoder, cache, 3)
        (ours / "policy.json").unlink(missing_ok=True)
        ours.chmod(0o700)
        folder_of(ours, OLD)
        assert await link(other, prompt) is None


@asynccontextmanager
async def told(words: str) -> AsyncIterator[None]:
    """Wait at the end until a key ring has logged these words. A thread that is late costs it another look."""
    event = anyio.Event()

    def note(record: logging.LogRecord) -> bool:
        if words in record.getMessage():
            event.set()
        return True

    key_ring.logger.addFilter(note)
    try:
        yield
        await event.wait()
    finally:
        key_ring.logger.removeFilter(note)


@pytest.mark.autojump
@pytest.mark.parametrize(
    "spoil",
    [lambda keys: keys.chmod(0o602), lambda keys: keys.write_text(f"old {'ä' * 64}", encoding="utf-8")],
    ids=["mode", "letters beyond ASCII"],
)
async def test_a_mistake_in_the_folder_is_logged_before_a_link_needs_it(spoil: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "trust", OLD)
    async with open_cluster(1, trust=folder) as cluster:
        async with told("cluster 1: no peer can be proved: "):
            spoil(folder / "keys")
        assert cluster.datadist.figures().incidents["keys_unusable"] == 1


@pytest.mark.autojump
async def test_looks_at_certificates_log_a_mistake_and_nothing_else(tmp_path: Path) -> None:
    folder = folder_for(tmp_path / "trust", 1)
    async with open_cluster(1, trust=folder) as cluster:
        await anyio.sleep(3 * LOOK_SECONDS)
        assert "keys_unusable" not in cluster.datadist.figures().incidents
        async with told("cluster 1: no peer can be proved: "):
            (folder / "tls.key").chmod(0o604)
        assert cluster.datadist.figures().incidents["keys_unusable"] == 1


class HeldReadings:
    """Readings of key files that hang, as on a network mount whose server has gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = threading.Event()
        self.go_on = threading.Event()
        self.threads: set[int] = set()
        self.used: defaultdict[Path, set[threading.Thread]] = defaultdict(set)
        self._is_held: Callable[[Path], bool] = lambda _: False
        read = TrustFolder.proof

        def proof(folder: TrustFolder) -> tuple[Key, ...] | Certificates:
            self.threads.add(threading.get_ident())
            self.used[folder.path].add(threading.current_thread())
            if self._is_held(folder.path):
                self.held.set()
                self.go_on.wait()
            return read(folder)

        monkeypatch.setattr(TrustFolder, "proof", proof)

    def hold(self, only: Path | None = None) -> None:
        """Let readings hang from now on, of all folders or of one."""
        self._is_held = lambda path: only in {None, path}

    def release(self) -> None:
        """Let them go on, and later ones not hang at all."""
        self._is_held = lambda _: False
        self.go_on.set()


async def test_a_key_file_that_cannot_be_read_in_time_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Links use the keys that were read before, and the log says so. What comes back is used again."""
    folder = folder_of(tmp_path / "trust", OLD)
    readings = HeldReadings(monkeypatch)
    async with open_cluster(1, trust=folder) as prompt, open_cluster(2, device_id=1, trust=folder) as decoder:
        assert threading.get_ident() not in readings.threads, "the event loop reads files"
        monkeypatch.setattr("aiodatadist._cluster.key_ring.READ_SECONDS", 0.0)
        try:
            readings.hold()
            folder_of(folder, NEW)
            assert await link(decoder, prompt) is None
            assert await in_thread(readings.held.wait)
            assert decoder.datadist.figures().credentials == {"old": 1}
            assert "were not read within 0 s: those that were read before stay in use" in caplog.text
            assert decoder.datadist.figures().incidents["keys_late"] >= 1
        finally:
            readings.release()
        monkeypatch.undo()
        await decoder.datadist.unlink_clusters([cluster_info(prompt)], 5000)
        assert await link(decoder, prompt) is None
        assert decoder.datadist.figures().credentials == {"new": 1}


async def test_keys_that_were_never_read_in_time_are_an_error_of_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = HeldReadings(monkeypatch)
    readings.hold()
    monkeypatch.setattr("aiodatadist._cluster.key_ring.READ_SECONDS", 0.0)
    try:
        with pytest.raises(ParamInvalid, match="cluster 1: its keys were not read within 0 s"):
            async with open_cluster(1, trust=folder_of(tmp_path / "trust", OLD)):
                pytest.fail("it is open")
    finally:
        readings.release()


async def test_links_are_made_without_a_new_thread_for_each_reading_of_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cluster has its own thread, so that a reading that hangs delays no other cluster."""
    readings = HeldReadings(monkeypatch)
    ours, theirs = folder_of(tmp_path / "ours", OLD), folder_of(tmp_path / "theirs", OLD)
    async with open_cluster(1, trust=ours) as prompt, open_cluster(2, device_id=1, trust=theirs) as decoder:
        for _ in range(3):
            assert await link(decoder, prompt) is None
            await decoder.datadist.unlink_clusters([cluster_info(prompt)], 5000)
        mine = {folder: used for folder, used in readings.used.items() if folder in {ours, theirs}}
        assert {folder: len(used) for folder, used in mine.items()} == {ours: 1, theirs: 1}
        kept = {thread for used in mine.values() for thread in used}
        assert len(kept) == 2
    assert not any(thread.is_alive() for thread in kept)


async def test_a_reading_that_hangs_delays_no_other_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends with the reading, and a cluster does not wait for that when it ends."""
    readings = HeldReadings(monkeypatch)
    slow, fast = folder_of(tmp_path / "slow", OLD), folder_of(tmp_path / "fast", OLD)
    async with open_cluster(1, trust=fast) as prompt, open_cluster(2, device_id=1, trust=fast) as decoder:
        try:
            async with open_cluster(3, device_id=2, trust=slow) as hanging, anyio.create_task_group() as group:
                readings.hold(slow)
                group.start_soon(inside(hanging.datadist).key_ring.look)
                assert await in_thread(readings.held.wait)
                assert await link(decoder, prompt) is None
                group.cancel_scope.cancel()
            [thread] = readings.used[slow]
            assert thread.is_alive()
        finally:
            readings.release()
        await in_thread(thread.join)


async def test_many_links_at_a_time_share_a_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that come while a reading runs share the next one."""
    reads = 0
    folder = TrustFolder(str(folder_of(tmp_path / "trust", OLD)))
    read = folder.proof

    def counted() -> tuple[Key, ...] | Certificates:
        nonlocal reads
        reads += 1
        return read()

    monkeypatch.setattr(folder, "proof", counted)
    ring = KeyRing(folder, "cluster 1", Incidents())
    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(ring.look)
    assert reads == 2, "the first one's, and one for all who came while it ran"
    await ring.look()
    assert reads == 3


def test_a_key_counts_as_one_if_the_folder_has_certificates_by_now(tmp_path: Path) -> None:
    """A proof takes two round trips, and the folder may change meanwhile."""
    folder = tls_folder(tmp_path / "trust", Authority().for_cluster(1), Authority())
    rules = [
        {"match": {"dns": "old"}, "ids": "2", "may": ["link", "read"]},
        {"match": {"key": "old"}, "may": ["link"]},
    ]
    ring = KeyRing(TrustFolder(str(policy_in(folder, {"version": 1, "clusters": rules}))), "cluster 1", Incidents(), 1)
    ring.read()
    assert ring.certificates() is not None
    assert ring.rights_of(Proved("old", Key("", b"")), 2) == PeerRights(link=True)
    assert ring.rights_of(Proved("old", Key("", b""), 1.0), 2) == PeerRights(link=True, read=True)


def test_a_cluster_knows_when_its_own_certificate_expires(tmp_path: Path) -> None:
    """The expiry is known even if the next certificate cannot be used: then nothing links."""
    authority = Authority()
    folder = tls_folder(tmp_path / "trust", authority.issue([uri_of(1)], valid=(-DAY, 10 * DAY)), authority)
    ring = KeyRing(TrustFolder(str(folder)), "cluster 1", Incidents(), 1)
    assert ring.certificate_seconds() is None, "it is not read yet"
    ring.read()
    assert round((ring.certificate_seconds() or 0.0) / DAY) == 10
    tls_folder(folder, authority.issue([uri_of(1)], valid=(-DAY, 20 * DAY)), authority)
    ring.read()
    assert round((ring.certificate_seconds() or 0.0) / DAY) == 20
    (folder / "tls.key").chmod(0o604)
    with pytest.raises(ParamInvalid):
        ring.read()
    assert round((ring.certificate_seconds() or 0.0) / DAY) == 20
    keys = KeyRing(TrustFolder(str(folder_of(tmp_path / "keys", OLD))), "cluster 1", Incidents(), 1)
    keys.read()
    assert keys.certificate_seconds() is None


def test_no_key_is_known_before_the_policy_that_came_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are read in a thread: a link that came between the two would have every right."""
    folder = TrustFolder(str(policy_in(folder_of(tmp_path / "trust", OLD), {"version": 1, "clusters": []})))
    ring, policy, known = KeyRing(folder, "cluster 1", Incidents()), folder.policy, list[bool]()

    def read() -> Policy | None:
        try:
            known.append(bool(ring.keys()))
        except AuthError:
            known.append(False)
        return policy()

    monkeypatch.setattr(folder, "policy", read)
    ring.read()
    assert known == [False]
    assert ring.keys()


@pytest.mark.autojump
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("embedded null byte")])
async def test_whatever_goes_wrong_when_keys_are_read_the_looks_go_on(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "trust", OLD)

    def fail(_: TrustFolder) -> tuple[Key, ...]:
        raise error

    async with open_cluster(1, trust=folder) as prompt, open_cluster(2, device_id=1, trust=folder) as decoder:
        with monkeypatch.context() as broken:
            async with told("no peer can be proved: the keys cannot be read: "):
                broken.setattr(TrustFolder, "proof", fail)
        await anyio.sleep(LOOK_SECONDS)
        assert await link(decoder, prompt) is None


async def test_a_secret_that_is_replaced_under_its_name_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path / "trust", OLD)
    caplog.set_level(logging.INFO)
    async with open_cluster(1, trust=folder) as prompt, open_cluster(2, device_id=1, trust=folder) as decoder:
        folder_of(folder, f"old {'cd' * 32}")
        for _ in range(2):
            assert await link(decoder, prompt) is None
            await decoder.datadist.unlink_clusters([cluster_info(prompt)], 5000)
    words = "new proofs use key old of old; old has another secret now"
    assert sum(words in line for line in caplog.messages) == 2
    for number in (1, 2):
        assert f"cluster {number}: {words}" in caplog.messages
    assert "cdcd" not in caplog.text


async def test_the_file_of_one_key_is_rotated_like_a_folder(tmp_path: Path) -> None:
    """A live link stays; new ones use the new key, which both ends must have. A key that is too weak is not used."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"

    def write(file: Path, key: bytes) -> None:
        fresh = file.with_suffix(".new")
        fresh.write_bytes(key)
        fresh.chmod(0o600)
        fresh.rename(file)

    def config(file: Path, device: int) -> LLMConfig:
        made = LLMConfig(listen="127.0.0.1:0", device_id=device)
        use_key_file(made, file, "auth_key_file")
        return made

    write(ours, b"the first key of both")
    write(theirs, b"the first key of both")
    async with (
        LLMDataDist(LLMRole.MIX, 1, config(ours, 0)) as one,
        LLMDataDist(LLMRole.MIX, 2, config(theirs, 1)) as two,
        LLMDataDist(LLMRole.MIX, 3, config(theirs, 2)) as three,
    ):
        prompt, decoder, other = map(Cluster, (one, two, three))
        assert await link(decoder, prompt) is None
        write(ours, b"the second key of both")
        assert isinstance(await link(other, prompt), AuthError)
        write(theirs, b"the second key of both")
        assert await link(other, prompt) is None
        assert [each.generation for each in two.statistics().links] == [1]
        await two.unlink_clusters([cluster_info(prompt)], 5000)
        write(ours, b"weak")
        assert "has a key of 4 bytes now: must have at least 16" in str(await link(prompt, decoder) or "")


async def test_a_link_costs_few_looks_at_the_folder_and_proofs_and_a_transfer_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each end two looks, and the keys of two connections are derived. A second key costs nothing more."""
    counts = Counter[str]()
    stat, digest = Path.stat, hmac.digest
    folder = folder_of(tmp_path / "trust", OLD)

    def counted_stat(path: Path, **options: Any) -> os.stat_result:
        counts["stat"] += path.is_relative_to(folder)
        return stat(path, **options)

    def counted_digest(*arguments: Any) -> bytes:
        counts["hmac"] += 1
        return digest(*arguments)

    async with AsyncExitStack() as stack:
        prompt = await stack.enter_async_context(open_cluster(1, trust=folder))
        decoder = await stack.enter_async_context(open_cluster(2, device_id=1, trust=folder))
        await prompt.blocks(DESC)
        cache = await decoder.blocks(DESC)
        monkeypatch.setattr(Path, "stat", counted_stat)
        monkeypatch.setattr("aiodatadist._wire.key_proof.hmac.digest", counted_digest)
        assert await link(decoder, prompt) is None
        assert counts == {"stat": 4, "hmac": 28}
        counts.clear()
        await pulled(decoder, cache, 1)
        assert not counts
        await decoder.datadist.unlink_clusters([cluster_info(prompt)], 5000)
        folder_of(folder, OLD, NEW)
        assert await link(decoder, prompt) is None
        assert counts["hmac"] == 28


@pytest.mark.parametrize(
    ("given", "name"),
    [({}, "user"), ({"auth_key": b"k" * 32}, "auth_key"), ({"trust": "none"}, "")],
    ids=["the user's key", "auth_key", "none"],
)
async def test_figures_name_the_key_of_a_link(given: dict[str, Any], name: str) -> None:
    async with open_cluster(1, **given) as prompt, open_cluster(2, device_id=1, **given) as decoder:
        assert prompt.datadist.figures().credentials == {}
        assert await link(decoder, prompt) is None
        for each in (prompt, decoder):
            assert each.datadist.figures().credentials == {name: 1}
            assert [one.credential for one in each.datadist.statistics().links] == [name]


async def test_figures_show_which_links_still_have_an_old_key(tmp_path: Path) -> None:
    """Each end names the key that was proved, which is the first one of the end that asked. No secret is shown."""
    ours, theirs = folder_of(tmp_path / "ours", OLD), folder_of(tmp_path / "theirs", OLD)
    async with (
        open_cluster(1, trust=ours) as prompt,
        open_cluster(2, device_id=1, trust=theirs) as decoder,
        open_cluster(3, device_id=2, trust=theirs) as other,
    ):
        assert await link(decoder, prompt) is None
        folder_of(ours, OLD, NEW)
        folder_of(theirs, NEW, OLD)
        assert await link(other, prompt) is None
        assert prompt.datadist.figures().credentials == {"old": 1, "new": 1}
        assert [each.credential for each in decoder.datadist.statistics().links] == ["old"]
        assert [each.credential for each in other.datadist.statistics().links] == ["new"]
        shown = repr((prompt.datadist.figures(), prompt.datadist.statistics(), inside(prompt.datadist).key_ring.keys()))
        assert not any(secret in shown for line in (OLD, NEW) for secret in line.split()[1:])


async def test_between_two_policies_no_peer_has_all_rights(tmp_path: Path) -> None:
    """Removing the old policy before the new one is written leaves a moment without one: nothing links meanwhile."""
    ours, theirs = folder_of(tmp_path / "ours", OLD), folder_of(tmp_path / "theirs", OLD)
    rules = {"version": 1, "clusters": [{"match": {"key": "old"}, "may": ["link", "read"]}]}
    policy_in(ours, rules)
    async with open_cluster(1, trust=ours) as owner, open_cluster(2, device_id=1, trust=theirs) as peer:
        (ours / "policy.json").unlink()
        error = await link(peer, owner)
        assert "the keys of this end cannot be used now" in str(error)
        policy_in(ours, rules)
        assert await link(peer, owner) is None
        await owner.datadist.wait_linked(2)
        assert inside(owner.datadist).links.find(2).session.rights == PeerRights.of(["link", "read"])


@pytest.fixture
def one_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all files the same times, as a file system does to those that are written within one tick of its clock."""
    real, now = Path.stat, time.time()
    times = {"st_mtime": now, "st_ctime": now, "st_mtime_ns": int(now * 1e9), "st_ctime_ns": int(now * 1e9)}

    def stat(path: Path, **options: Any) -> os.stat_result:
        return os.stat_result(tuple(real(path, **options)), times)

    monkeypatch.setattr(Path, "stat", stat)


def private(path: Path, content: str) -> Path:
    """Write a file in place, of which its owner alone may know."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(content)
    return path


def secret_in_folder(folder: Path) -> tuple[Path, TrustFolder]:
    return folder / "keys", TrustFolder(str(folder))


def secret_in_file(folder: Path) -> tuple[Path, AuthKeyFile]:
    return folder / "keys", AuthKeyFile(folder / "keys", b"k" * 32)


def secret_for_values(folder: Path) -> tuple[Path, SealKeys]:
    return folder / "keys", SealKeys(folder / "keys")


def secret_of_user(folder: Path) -> tuple[Path, UserKey]:
    return folder / "aiodatadist" / "key", UserKey({"XDG_RUNTIME_DIR": str(folder)})


@pytest.mark.parametrize("kind", [secret_in_folder, secret_in_file, secret_for_values, secret_of_user])
@pytest.mark.usefixtures("one_tick")
def test_a_key_that_is_replaced_within_a_tick_of_the_clock_of_files_is_used_no_longer(
    kind: Callable[[Path], tuple[Path, Credential]], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    path, credential = kind(tmp_path)
    name = "" if kind is secret_of_user else "one "
    private(path, f"{name}{'ab' * 32}\n")
    first = credential.current()[0].secret
    private(path, f"{name}{'cd' * 32}\n")
    assert credential.current()[0].secret != first


def test_the_users_key_stays_when_its_folder_is_removed_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime folder is removed when the user logs out, and this process cannot create it again."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    path, credential = secret_of_user(runtime)
    private(path, f"{'ab' * 32}\n")
    kept = credential.current()

    def read(path: Path) -> bytes:
        runtime.rename(tmp_path / "removed")
        runtime.touch()
        return user_key(path)

    monkeypatch.setattr("aiodatadist._config.trust.user_key", read)
    assert [credential.current() for _ in range(2)] == [kept, kept]


@pytest.mark.usefixtures("one_tick")
def test_a_policy_that_is_replaced_within_a_tick_of_the_clock_of_files_counts_no_longer(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "trust", OLD)
    rules: dict[str, Any] = {"version": 1}
    rules["clusters"] = [{"match": {"key": "old"}, "ids": "1", "may": ["link", "write"]}]
    private(folder / "policy.json", json.dumps(rules))
    credential = TrustFolder(str(folder))
    credential.proof()
    rules["clusters"] = [{"match": {"key": "old"}, "ids": "2", "may": ["link", "write"]}]
    private(folder / "policy.json", json.dumps(rules))
    credential.proof()
    policy = credential.policy()
    assert policy is not None
    assert not policy.rights_of("old", 1).link


def test_certificates_that_have_not_changed_are_not_parsed_again(tmp_path: Path) -> None:
    credential = TrustFolder(str(folder_for(tmp_path / "trust", 1)))
    assert credential.proof() is credential.proof()


class Replaced:
    """A folder whose policy and key are replaced, right after its policy has been read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.credential = TrustFolder(str(folder))
        self.times = 0
        read, self._folder = read_policy, folder
        self._calls = 0

        def read_and_replace(path: Path) -> Policy:
            found = read(path)
            self._calls += 1
            if self._calls % 2 == 0 and self.times:  # once for the mode, and once to be used
                self.times -= 1
                self.put("narrow", ["link"])
            return found

        self.put("wide", ["link", "read", "write"])
        monkeypatch.setattr("aiodatadist._config.trust.read_policy", read_and_replace)

    def put(self, name: str, may: list[str]) -> None:
        """Replace both files by renames: the same name stands for another key, which has other rights."""
        secret = {"wide": "ab", "narrow": "cd"}[name] * 32
        folder_of(self._folder, f"one {secret}")
        policy_in(self._folder, {"version": 1, "clusters": [{"match": {"key": "one"}, "may": may}]})


def test_a_key_never_has_the_rights_that_the_key_before_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = Replaced(tmp_path / "trust", monkeypatch)
    replaced.times = 1
    keys, policy = replaced.credential.current(), replaced.credential.policy()
    assert policy is not None
    assert (keys[0].secret.hex()[:2], policy.rights_of("one", 1).write) == ("cd", False)


def test_files_that_are_replaced_all_the_time_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = Replaced(tmp_path / "trust", monkeypatch)
    replaced.times = 2
    with pytest.raises(ParamInvalid, match="changed while it was read, twice: its files must be those of one moment"):
        replaced.credential.current()
    assert replaced.credential.current()[0].secret.hex().startswith("cd")


def test_a_key_that_is_replaced_after_its_proof_has_no_rights_of_the_new_one(tmp_path: Path) -> None:
    """A link is made in several turns. Meanwhile another link may have looked at the folder."""
    folder = folder_of(tmp_path / "trust", OLD)
    ring = KeyRing(TrustFolder(str(folder)), "cluster 1", Incidents(), 1)
    ring.read()
    proved = Proved("old", Key("", b""), key_hash=ring.keys()[0].hash)
    assert ring.rights_of(proved, 2) is EVERY_RIGHT
    folder_of(folder, f"old {'cd' * 32}")
    policy_in(folder, {"version": 1, "clusters": [{"match": {"key": "old"}, "may": ["link", "write"]}]})
    ring.read()
    with pytest.raises(LinkError, match="the keys of cluster 1 have changed since this link was begun"):
        ring.rights_of(proved, 2)
