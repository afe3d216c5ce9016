"""A wrong prompt is one clear line; a right one says where it comes from and whether it was cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiodatadist._cli import main
from aiodatadist._cli.demo import prompt
from aiodatadist._cli.demo.prompt import LIMIT, load_prompt, shown
from aiodatadist._cli.kit.errors import CommandError


def test_short_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_bytes(b"once\xff\n")
    loaded = load_prompt(path)
    assert loaded.text == b"once\xff\n"
    assert loaded.describe() == f"{path}, 6 bytes"


def test_long_file_is_cut_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"x" * (LIMIT + 10))
    loaded = load_prompt(path)
    assert len(loaded.text) == LIMIT
    assert f"the first {LIMIT} of {LIMIT + 10} bytes" in loaded.describe()


def test_endless_file_is_cut_and_no_size_is_claimed() -> None:
    loaded = load_prompt(Path("/dev/zero"))
    assert loaded.text == bytes(LIMIT)
    assert loaded.describe() == f"/dev/zero, the first {LIMIT} bytes (the demo reads no more)"


@pytest.mark.parametrize("kind", ["missing", "folder", "empty"])
def test_wrong_file_is_one_line_with_its_name_and_exit_code_2(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    assert main(["demo", "--prompt", str(path)]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.count("\n") == 1
    assert str(path) in errors
    assert "--prompt FILE" in errors


def test_default_is_the_readme_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "README.md").write_text("# the project\n")
    monkeypatch.setattr(prompt, "CHECKOUT", tmp_path)
    assert load_prompt(None).text == b"# the project\n"


def test_default_without_a_checkout_is_the_installed_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt, "CHECKOUT", tmp_path)
    monkeypatch.setattr(prompt, "installed_description", lambda: b"what the package says of itself")
    assert load_prompt(None).text == b"what the package says of itself"


def test_no_readme_anywhere_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "CHECKOUT", tmp_path)
    monkeypatch.setattr(prompt, "installed_description", lambda: b"")
    with pytest.raises(CommandError, match="--prompt FILE") as caught:
        load_prompt(None)
    assert caught.value.exit_code == 2


def test_shown_text_is_one_line_of_printable_ascii() -> None:
    every_byte = bytes(range(256)).decode("latin-1")
    text = shown(every_byte)
    assert text.isascii()
    assert text.isprintable()
    assert shown("plain text") == "plain text"
