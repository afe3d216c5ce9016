"""The demo whose other half is elsewhere: what is wrong is said in one line before anything starts."""

from __future__ import annotations

import pytest

from aiodatadist._cli import main

PEER = ["--peer", "127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "127.0.0.1:0", *PEER], "--listen and --peer are the two ends of a demo"),
        (["--listen", "nowhere"], "--listen: 'nowhere' is not HOST:PORT"),
        (["--peer", "nowhere:x"], "--peer: 'nowhere:x' is not HOST:PORT"),
        ([*PEER, "--tokens", "8"], "--tokens has no effect with --peer"),
        ([*PEER, "--seed", "0"], "--seed has no effect with --peer"),
        ([*PEER, "--layered"], "--layered has no effect with --peer"),
        ([*PEER, "--prompt", "/dev/null"], "--prompt has no effect with --peer"),
        ([*PEER, "--v1"], "--v1 is a demo on one machine"),
        (["--listen", "127.0.0.1:0", "--port", "0"], "--port is for a demo on one machine"),
        (["--auth-key-file", "/dev/null"], "--auth-key-file is for two machines"),
        ([*PEER, "--device", "0,1"], "--device 0,1 names 2: must name one"),
        (["--context-cache", "memory:", *PEER], "--peer does not go with --context-cache"),
    ],
)
def test_arguments_that_do_not_go_together(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
