"""Doctor says what it found and what that means, and fails only for what is fatal."""

from __future__ import annotations

import json
import os
import pwd
import re
import resource
import subprocess
import sys
import time
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from aiodatadist._cli import main
from aiodatadist._cli.doctor import command as doctor
from aiodatadist._cli.doctor import findings, pools
from aiodatadist._cli.doctor.finding import Finding
from aiodatadist._config.user_key import user_key
from aiodatadist._context_caching.pools.mooncake import store as mooncake_store
from aiodatadist._native.runtime import FUNCTIONS, Runtime, open_runtime
from aiodatadist.errors import RuntimeUnavailable
from tests import children, vendor_names
from tests.certificates import DAY, Authority, tls_folder, uri_of
from tests.keys import HEX, folder_of, policy_in


def test_this_machine_is_examined_without_a_fatal_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in (
        "runtime",
        "libraries",
        "devices",
        "memfd",
        "open files",
        "locked memory",
        "ptrace",
        "CPUs",
        "loopback",
        "network",
        "softnpu's peers",
        "TCP",
        "data connections",
        "trust",
        "Python",
    ):
        assert name in text
    assert text.splitlines()[-1].startswith("no fatal finding")


def test_json_has_the_same_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True
    assert [finding["name"] for finding in report["findings"]] == [finding.name for finding in findings.examine()]
    assert all(finding["meaning"] for finding in report["findings"])


def test_fatal_finding_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("runtime", "none", "fail", "nothing to open")])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "nothing to open" in out
    assert "1 fatal" in out


def test_missing_runtime_is_fatal_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeUnavailable("libascendcl.so: no such file", hint="is CANN installed?")

    monkeypatch.setattr(findings, "open_runtime", refuse)
    monkeypatch.setenv("AIODATADIST_RUNTIME", "ascend")
    (finding,) = findings.runtime_findings()
    assert finding.mark == "fail"
    assert finding.value == "none (ascend)"
    assert "is CANN installed?" in finding.meaning


def test_few_open_files_are_a_warning_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    warning = next(findings.limit_findings())
    assert (warning.mark, warning.value) == ("warn", "256")
    assert "ulimit -n" in warning.meaning
    assert "4096" in warning.meaning


def test_unlimited_files_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (infinity, infinity))
    assert [(finding.mark, finding.value) for finding in findings.limit_findings()] == [("ok", "unlimited")] * 2


def test_missing_numpy_is_no_more_than_a_warning() -> None:
    assert findings.package("no-such-package", missing="only the demo needs it", mark="warn").mark == "warn"


@pytest.mark.parametrize("name", ["llm_datadist", "hixl"])
def test_a_vendors_package_is_named_with_whose_a_script_gets(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found() -> Finding:
        return next(finding for finding in findings.vendor_findings() if finding.name == name)

    assert (found().value, found().mark) == ("not installed", "ok")
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise ImportError('never imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert found().value == "the vendor's"
    assert str(tmp_path / name) in found().meaning
    assert "blocking run" in found().meaning


def test_under_the_runner_a_vendors_package_is_ours(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from aiodatadist._cli.doctor import findings\n"
        "print(*((each.name, each.value) for each in findings.vendor_findings()))\n"
    )
    command = [sys.executable, "-m", "aiodatadist.blocking", "run", str(script)]
    done = children.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "('llm_datadist', 'ours') ('hixl', 'ours')\n"


def test_engines_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding.name for finding in findings.engine_findings()] == ["redis-py", "mooncake", "xxhash"]
    monkeypatch.setattr(findings, "find_spec", lambda module: None)
    mooncake = next(f for f in findings.engine_findings() if f.name == "mooncake")
    assert mooncake.value == "not installed"
    assert "pip install '.[mooncake]' in a clone" in mooncake.meaning


def test_an_installed_client_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"redis": "8.1.0"}.get(name, "1"))
    redis = next(findings.engine_findings())
    assert (redis.name, redis.value, redis.mark) == ("redis-py", "8.1.0", "ok")
    assert "with a server to talk to" in redis.meaning


@pytest.mark.parametrize("is_there", [True, False])
def test_xxhash_is_missed_where_there_is_an_engine(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(findings, "find_spec", lambda module: object() if is_there and module == "redis" else None)
    found = next(finding for finding in findings.engine_findings() if finding.name == "xxhash")
    assert (found.mark, "do not work" in found.meaning) == (("warn", True) if is_there else ("ok", False))


def test_mooncake_that_does_not_load_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ImportError("Mooncake needs libnuma.so.1: apt install libnuma1")

    monkeypatch.setattr(findings, "find_spec", lambda module: object())
    monkeypatch.setattr(mooncake_store, "load", refuse)
    mooncake = next(f for f in findings.engine_findings() if f.name == "mooncake")
    assert (mooncake.mark, mooncake.value) == ("warn", "does not load")
    assert "libnuma1" in mooncake.meaning


def test_chosen_word_of_a_kernel_setting(tmp_path: Path) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text("always within_size [advise] never\n")
    assert findings.chosen_word(str(setting)) == "advise"
    assert findings.chosen_word(str(tmp_path / "missing")) == ""


def test_a_full_disk_is_said_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "aiodatadist", "doctor"]
        done = children.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "aiodatadist: [Errno 28] No space left on device\n")


# ---- trust ----


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this user another home, where there is no key, and no folder of trust."""
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "AIODATADIST_TRUST", "AIODATADIST_AUTH_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_users_key_is_named_and_not_created(home: Path) -> None:
    (found,) = findings.trust_findings()
    key = home / ".local/state/aiodatadist/key"
    assert (found.mark, found.value) == ("ok", f"this user's key {key}, which the first cluster creates")
    assert "only processes of this user link, on loopback addresses" in found.meaning
    assert list(home.iterdir()) == []
    secret = user_key(key)
    (found,) = findings.trust_findings()
    assert (found.mark, found.value) == ("ok", f"this user's key {key} (mode 0600)")
    assert secret.hex() not in repr(found)


def test_a_users_key_that_links_refuse_is_a_warning_with_the_rule(home: Path) -> None:
    key = home / ".local/state/aiodatadist/key"
    user_key(key)
    key.chmod(0o640)
    (found,) = findings.trust_findings()
    assert (found.mark, found.value) == ("warn", "no key")
    assert "has mode 0640: its group must not be able to read it" in found.meaning


def test_a_home_in_which_no_key_can_be_created_is_a_warning(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    (found,) = findings.trust_findings()
    assert found.mark == "warn"
    assert f"{home} is not writable" in found.meaning
    assert "AIODATADIST_TRUST" in found.meaning


def test_a_user_without_a_home_is_a_warning(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", refuse)
    monkeypatch.delenv("HOME")
    (found,) = findings.trust_findings()
    assert found.mark == "warn"
    assert "has no home" in found.meaning


@pytest.mark.parametrize("value", ["", "home", "."])
def test_an_empty_or_relative_home_is_that_of_the_account(
    home: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the key would be created in the root folder, or wherever the process was started."""
    monkeypatch.setattr(pwd, "getpwuid", lambda _: _Account(str(home)))
    monkeypatch.setenv("HOME", value)
    (found,) = findings.trust_findings()
    assert found.value == f"this user's key {home}/.local/state/aiodatadist/key, which the first cluster creates"


class _Account(NamedTuple):
    pw_dir: str


def test_the_key_file_of_the_blocking_calls_is_named_and_not_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = home / "key"
    monkeypatch.setenv("AIODATADIST_AUTH_KEY_FILE", str(file))
    *_, found = findings.trust_findings()
    assert (found.name, found.mark) == ("auth key file", "fail")
    assert "cannot be read: No such file" in found.meaning
    file.write_text(HEX)
    file.chmod(0o604)
    *_, found = findings.trust_findings()
    assert (found.mark, found.value) == ("fail", f"AIODATADIST_AUTH_KEY_FILE={file}")
    assert "mode 0604" in found.meaning
    file.chmod(0o600)
    *_, found = findings.trust_findings()
    assert (found.mark, found.value) == ("ok", f"{file} (mode 0600)")
    assert HEX not in repr(found)
    file.write_text("short")
    *_, found = findings.trust_findings()
    assert found.mark == "warn"
    assert "it has 5 bytes, and must have at least 16" in found.meaning


def test_the_keys_of_a_folder_are_named_and_not_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(home / "trust", f"new {'cd' * 32}", f"old {HEX}")
    monkeypatch.setenv("AIODATADIST_TRUST", str(folder))
    (found,) = findings.trust_findings()
    assert (found.mark, found.value) == ("ok", f"key new of {folder / 'keys'} (mode 0600)")
    assert "from AIODATADIST_TRUST" in found.meaning
    assert "old is accepted, too" in found.meaning
    assert HEX not in repr(found)
    folder.chmod(0o770)
    (found,) = findings.trust_findings()
    assert (found.mark, found.value) == ("fail", f"AIODATADIST_TRUST={folder}")
    assert "mode 0770: group and others must not be able to write it" in found.meaning


def rules(*matches: dict[str, str], **others: object) -> dict[str, object]:
    return {"version": 1, "clusters": [{"match": match, "may": ["link", "read"]} for match in matches], **others}


def test_a_policy_is_counted_and_a_rule_that_fits_no_peer_is_a_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(home / "trust", f"decode {HEX}")
    monkeypatch.setenv("AIODATADIST_TRUST", str(folder))
    for names, mark, words in (
        (["decode"], "ok", "1 rule says what peers may do"),
        (["decode", "decode"], "ok", "2 rules say what peers may do"),
        (["decod", "decode"], "warn", "2 rules say what peers may do; keys has no key decod, so its rule fits no peer"),
    ):
        policy_in(folder, rules(*({"key": name} for name in names)))
        _, found = findings.trust_findings()
        assert (found.name, found.mark, found.value) == ("policy", mark, str(folder / "policy.json"))
        assert found.meaning == words
    policy_in(folder, rules({"spiffe": "spiffe://prod/kv/*"}, private_memory=False))
    _, found = findings.trust_findings()
    assert found.mark == "warn"
    assert "; 1 is for certificates, which this folder does not prove" in found.meaning
    assert "opens no ordinary memory" in found.meaning


def test_the_policy_beside_a_certificate_is_shown_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority()
    folder = tls_folder(home / "trust", authority.issue([uri_of(7)], valid=(-DAY, 9 * DAY)), authority)
    monkeypatch.setenv("AIODATADIST_TRUST", str(folder))
    for match, mark, words in (
        ({"spiffe": "spiffe://prod/kv/*"}, "ok", "1 rule says what peers may do"),
        ({"key": "decode"}, "warn", "1 rule says what peers may do; 1 is for keys, which this folder does not prove"),
    ):
        policy_in(folder, rules(match))
        _, found = findings.trust_findings()
        assert (found.name, found.mark, found.meaning) == ("policy", mark, words)


def test_a_certificate_is_named_with_its_clusters_and_the_time_that_is_left(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    folder = tls_folder(home / "trust", authority.issue([uri_of(7)], valid=(-DAY, 9 * DAY)), authority)
    monkeypatch.setenv("AIODATADIST_TRUST", str(folder))
    (found,) = findings.trust_findings()
    assert found.mark == "ok"
    assert found.value == f"certificate {uri_of(7)} of {folder / 'tls.crt'} (tls.key has mode 0600)"
    said = re.findall(r"for cluster 7; it expires on (.*?) UTC;", found.meaning)[0]
    left = datetime.fromisoformat(f"{said}+00:00").timestamp() - time.time()
    assert 8 * DAY < left <= 9 * DAY
    tls_folder(folder, authority.issue([uri_of(7)], valid=(-19 * DAY, DAY)), authority)
    (found,) = findings.trust_findings()
    assert found.mark == "warn"
    assert "it should have been replaced by now" in found.meaning
    tls_folder(folder, authority.issue([uri_of(7)], valid=(-DAY, -1)), authority)
    (found,) = findings.trust_findings()
    assert (found.mark, found.value) == ("fail", f"AIODATADIST_TRUST={folder}")
    assert "tls.crt' expired: must be valid" in found.meaning


def test_trust_that_is_turned_off_is_a_warning(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODATADIST_TRUST", "none")
    (found,) = findings.trust_findings()
    assert (found.mark, found.value) == ("warn", "AIODATADIST_TRUST=none")
    assert "any user of this machine can link" in found.meaning


# ---- pools ----


def test_the_key_for_values_is_named_and_not_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = pools.sealing_findings()
    assert (found.mark, found.value) == ("ok", "off")
    assert "another writer of a pool outside this process is believed" in found.meaning
    folder = folder_of(home / "trust", f"link {HEX}", f"seal {'cd' * 32}")
    monkeypatch.setenv("AIODATADIST_TRUST", str(folder))
    (found,) = pools.sealing_findings()
    assert (found.mark, found.value) == ("ok", f"key seal of {folder / 'keys'}")
    assert "cdcd" not in repr(found)
    assert [each.value for each in findings.trust_findings()] == [f"key link of {folder / 'keys'} (mode 0600)"]
    (folder / "keys").chmod(0o604)
    (found,) = pools.sealing_findings()
    assert found.mark == "fail"
    assert "mode 0604" in found.meaning


def test_a_pool_says_whose_values_are_believed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("redis")
    assert main(["doctor", "--pool", "redis://:hunter2@127.0.0.1:1"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "redis://127.0.0.1:1: it cannot be used" in text
    assert "another writer of this pool is believed; seal its values: seal_key_file= in the URL" in text
    assert "hunter2" not in text
    file = home / "keys"
    file.write_text(f"first {HEX}\n")
    file.chmod(0o600)
    assert main(["doctor", "--pool", f"redis://127.0.0.1:1?seal_key_file={file}"]) == 1
    assert "its values are sealed with key first" in " ".join(capsys.readouterr().out.split())
    (answers,) = pools.pool_findings(f"memory:?seal_key_file={file}")
    assert (answers.mark, answers.meaning) == ("ok", "memory answers")
    (wrong,) = pools.pool_findings("memory:?seal_seconds=5")
    assert wrong.mark == "fail"


# ---- the vendor's libraries ----


def doctor_with(names: tuple[str, ...], runtime: str) -> list[dict[str, str]]:
    """Return the findings of a process that has these libraries, which are softnpu."""
    with vendor_names.shared_folder() as folder:
        vendor_names.install(folder, names)
        environment = {**vendor_names.environment(folder), "AIODATADIST_RUNTIME": runtime}
        command = [sys.executable, "-m", "aiodatadist", "doctor", "--json"]
        done = children.run(command, env=environment, capture_output=True, text=True, timeout=60)
    found: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    return found


def test_acl_without_hccl_is_said() -> None:
    first = doctor_with(("libacl_rt.so",), "ascend")[0]
    assert (first["name"], first["mark"]) == ("runtime", "fail")
    assert "libacl_rt.so loads, so ACL is installed, but without HCCL" in first["meaning"]


def test_acl_without_hccl_is_a_warning_where_softnpu_does_the_work() -> None:
    first = doctor_with(("libacl_rt.so",), "auto")[0]
    assert (first["value"], first["mark"]) == ("soft (AIODATADIST_RUNTIME=auto)", "warn")
    assert "libacl_rt.so loads, but HCCL does not: neither libhcomm.so nor libhccl.so" in first["meaning"]


def test_with_the_vendors_runtime_nothing_is_said_of_softnpu() -> None:
    found = doctor_with(vendor_names.NEW, "ascend")
    assert found[0]["value"] == "ascend (AIODATADIST_RUNTIME=ascend)"
    assert [finding for finding in found if "software NPU" in finding["meaning"]] == []


def test_all_functions_are_looked_up() -> None:
    found = next(finding for finding in findings.runtime_findings() if finding.name == "functions")
    assert (found.value, found.mark) == ("144 of 144", "ok")
    assert len(FUNCTIONS) == 144


def test_missing_functions_are_named_with_what_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = open_runtime()
    monkeypatch.setattr(Runtime, "missing_functions", lambda self: ["aclrtCreateNotify", "HcclBatchGet"])
    found = findings.functions(runtime)
    assert (found.value, found.mark) == ("142 of 144", "warn")
    assert (
        "lack aclrtCreateNotify, HcclBatchGet, which EventLayerSynchronizer, every link cannot do without"
        in found.meaning
    )


def test_each_finding_is_one_line_that_wraps_at_80_columns() -> None:
    path = "/a/long/" + 90 * "x"
    text = doctor.lines(
        [Finding("runtime", "none", "ok", "word " * 40), Finding("x", path, "ok", "a path in one piece")]
    )
    assert [line for line in text if len(line) > 80 and path not in line] == []
    assert [line[:5] for line in text if not line.startswith(" ")] == ["ok   ", "ok   ", "no fa"]
