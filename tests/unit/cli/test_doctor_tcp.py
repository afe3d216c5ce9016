"""Doctor's findings about TCP: what limits a connection, what seals bytes, and cards that nothing uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiodatadist._cli import main
from aiodatadist._cli.doctor import tcp
from aiodatadist._cli.doctor.finding import Finding


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder for each of the kernel's that are read."""
    for name in ("ipv4", "infiniband"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tcp, "IPV4", tmp_path / "ipv4")
    monkeypatch.setattr(tcp, "INFINIBAND", tmp_path / "infiniband")
    return tmp_path


def found() -> dict[str, Finding]:
    return {each.name: each for each in tcp.tcp_findings()}


def test_this_kernel_is_asked() -> None:
    findings = found()
    assert findings["TCP"].value in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text()
    assert findings["data connections"].value == "4 of a link, 2 threads"


@pytest.mark.parametrize(("name", "advice"), [("bbr", False), ("cubic", True)])
def test_the_congestion_control_is_named(name: str, advice: bool, kernel: Path) -> None:
    (kernel / "ipv4/tcp_congestion_control").write_text(f"{name}\n")
    assert found()["TCP"].value == name
    assert ("sysctl" in found()["TCP"].meaning) is advice


@pytest.mark.parametrize(("most", "mark"), [(6291456, "ok"), (212992, "warn")])
def test_small_buffers_are_a_warning(most: int, mark: str, kernel: Path) -> None:
    (kernel / "ipv4/tcp_rmem").write_text(f"4096\t131072\t{most}\n")
    (kernel / "ipv4/tcp_wmem").write_text("4096\t16384\t8388608\n")
    finding = found()["TCP buffers"]
    assert finding.mark == mark
    assert "one connection moves at most" in finding.meaning


def test_what_cannot_be_read_is_unknown_and_no_failure(kernel: Path) -> None:
    assert {found()[name].value for name in ("TCP", "TCP buffers")} == {"unknown"}


def test_cards_are_named_if_there_are_any(kernel: Path) -> None:
    assert "RDMA" not in found()
    (kernel / "infiniband/mlx5_0").mkdir()
    assert found()["RDMA"].value == "mlx5_0"
    assert "no transport uses these cards" in found()["RDMA"].meaning


def test_without_libcrypto_links_over_tcp_need_trusted_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "LIBCRYPTO", ("libnothing.so",))
    finding = found()["data connections"]
    assert finding.mark == "warn"
    assert "tcp_plain_networks" in finding.meaning


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peer", "nowhere"], "--peer: 'nowhere' is not HOST:PORT"),
        (["--peer", "a:1", "--serve", "1"], "the two ends of a probe"),
        (["--auth-key-file", "/dev/null"], "--auth-key-file is for --peer and --serve"),
        (["--device", "0", "--auth-key-file", "/dev/null"], "--auth-key-file and --device cannot be combined"),
        (["--step", "1"], "--step needs --device"),
    ],
)
def test_arguments_that_do_not_go_together(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
