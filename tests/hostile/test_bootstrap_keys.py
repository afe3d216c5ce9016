"""Keys of SGLang's bootstrap server: those of the links, the user's own without any, and replaced as those are."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio.to_thread
import pytest

from aiodatadist import AuthError, LinkError, ParamInvalid
from aiodatadist._adapters.rendezvous import RendezvousServer, ask, register
from aiodatadist._adapters.rendezvous_lines import Ask, written
from aiodatadist._adapters.settings import Settings
from aiodatadist._config.trust import AuthKey, Credential, TrustFolder, Untrusted, UserKey
from tests.hostile.test_bootstrap_server import HOST, NOW, Door, registration, say, worker
from tests.hostile.vllm_names import SGLANG, SGLANG_BASE, sglang_manager
from tests.keys import HEX, folder_of

OLD, NEW = f"old {HEX}", f"new {'cd' * 32}"


@pytest.fixture
def door() -> Iterator[Door]:
    with closing(Door()) as made:
        yield made


def clock() -> float:
    return NOW


@asynccontextmanager
async def bootstrap_server(**settings: Any) -> AsyncIterator[tuple[int, RendezvousServer]]:
    """Open the server as SGLang does, with settings from the environment; yield its port, and the server behind it."""
    with pytest.MonkeyPatch.context() as patch, sglang_manager():
        patch.setenv("AIODATADIST_SGLANG", json.dumps(settings))
        base = import_module(SGLANG_BASE)
        patch.setattr(base, "BaseKVBootstrapServer", object, raising=False)
        module: ModuleType = import_module(f"{SGLANG}.bootstrap_server")
        made = await anyio.to_thread.run_sync(module.AioDataDistKVBootstrapServer, HOST, 0)
        try:
            yield made.port, made._server
        finally:
            await anyio.to_thread.run_sync(made.close)


async def test_without_settings_a_process_of_another_user_learns_and_registers_nothing(door: Door) -> None:
    """Both ends use the key of the user, which needs no setting."""
    async with bootstrap_server() as (port, _):
        ours = Settings().credential()
        await register(HOST, port, worker(door.port), ours)
        for line in (written(None, Ask(at=NOW, nonce="0" * 32)), written(None, registration())):
            answer = await say(port, line)
            assert b"it has no seal" in answer
            assert str(door.port).encode() not in answer
        with pytest.raises(AuthError, match="its seal is of another key"):
            await ask(HOST, port, AuthKey(b"o" * 32))
        told = await ask(HOST, port, ours)
        assert told is not None
        assert [each.port for each in told.addresses] == [door.port]


async def test_the_folder_of_the_environment_is_that_of_the_bootstrap_server(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "trust", OLD)
    monkeypatch.setenv("AIODATADIST_TRUST", str(folder))
    async with bootstrap_server() as (port, _):
        await register(HOST, port, worker(door.port), TrustFolder(str(folder)))
        monkeypatch.delenv("AIODATADIST_TRUST")
        with pytest.raises(AuthError, match="its seal is of another key"):
            await ask(HOST, port, Settings().credential())


async def test_two_rotations_without_a_restart(door: Door, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each end is one step ahead of the other at a time. At each step a rank registers, and a decode engine asks."""
    ours, theirs = folder_of(tmp_path / "ours", OLD), folder_of(tmp_path / "theirs", OLD)
    caplog.set_level(logging.INFO)
    async with bootstrap_server(trust=str(ours)) as (port, server):
        peer = TrustFolder(str(theirs))
        for step in ([OLD], [OLD, NEW], [NEW, OLD], [NEW]):
            for folder in (ours, theirs):
                folder_of(folder, *step)
                await register(HOST, port, worker(door.port), peer)
                assert await ask(HOST, port, peer) is not None, (step, folder)
        assert "the rendezvous: new proofs use key old of old, new" in caplog.text
        assert server.incidents.take()["keys_changed"] >= 1
        folder_of(theirs, OLD)
        with pytest.raises(AuthError, match="its seal is of another key"):
            await ask(HOST, port, peer)


def _writable(folder: Path) -> None:
    (folder / "keys").chmod(0o622)


def _gone(folder: Path) -> None:
    (folder / "keys").unlink()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(_writable, "mode 0622: group and others must not be able to write it"), (_gone, "No such file or directory")],
    ids=["a writable file", "no file"],
)
async def test_keys_that_cannot_be_used_prove_no_peer_before_they_are_mended(
    spoil: Callable[[Path], None], why: str, door: Door, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other end is told no path; the log is."""
    ours, theirs = folder_of(tmp_path / "ours", OLD), folder_of(tmp_path / "theirs", OLD)
    async with bootstrap_server(trust=str(ours)) as (port, _):
        peer = TrustFolder(str(theirs))
        await register(HOST, port, worker(door.port), peer)
        spoil(ours)
        with pytest.raises(AuthError, match="refused: the keys of this end cannot be used now") as refused:
            await ask(HOST, port, peer)
        assert str(ours) not in str(refused.value)
        assert why in caplog.text
        folder_of(ours, OLD)
        assert await ask(HOST, port, peer) is not None
        spoil(theirs)
        with pytest.raises(ParamInvalid, match=why):
            await ask(HOST, port, peer)


async def test_keys_that_cannot_be_used_are_refused_before_it_listens(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "trust", OLD)
    _writable(folder)
    with pytest.raises(ParamInvalid, match="mode 0622"):
        async with bootstrap_server(trust=str(folder)):
            pytest.fail("it listens")


@pytest.mark.parametrize(
    ("credential", "rule"),
    [
        (UserKey({}), "needs auth_key or trust"),
        (Untrusted(), "needs auth_key or trust"),
        (AuthKey(b"short"), "needs an auth_key of at least 16 bytes; this one has 5"),
    ],
    ids=["the user's key", "none", "a short key"],
)
async def test_beyond_loopback_the_group_needs_a_good_key_of_its_own(credential: Credential, rule: str) -> None:
    for host in ("0.0.0.0", "10.0.0.7", "prefill-0"):
        with pytest.raises(ParamInvalid, match=f"what is not a loopback address {rule}"):
            RendezvousServer(host, 0, credential)
        with pytest.raises(ParamInvalid, match=f"what is not a loopback address {rule}"):
            await ask(host, 8998, credential)


@pytest.fixture
def of_this_user() -> Iterator[RendezvousServer]:
    with closing(RendezvousServer(HOST, 0, Settings().credential(), clock)) as made:
        yield made


async def test_a_rank_beyond_loopback_does_not_register_with_the_users_key(
    of_this_user: RendezvousServer, door: Door
) -> None:
    elsewhere = worker(door.port)
    elsewhere = elsewhere.model_copy(update={"address": elsewhere.address.model_copy(update={"host": "10.0.0.7"})})
    with pytest.raises(
        LinkError, match=r"10\.0\.0\.7 is not a loopback address: any other one needs auth_key or trust"
    ):
        await register(HOST, of_this_user.port, elsewhere, Settings().credential(), clock)


async def test_trust_that_is_turned_off_is_turned_off_here_too(door: Door) -> None:
    async with bootstrap_server(trust="none") as (port, _):
        await register(HOST, port, worker(door.port), Untrusted())
        assert await ask(HOST, port, Untrusted()) is not None
