"""A decode engine that hangs is started again under its cluster id, before the prefill engine has released the old link."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aiodatadist._link.link import Link
from tests import children
from tests.adapters.test_pushes import End

ROOT = Path(__file__).resolve().parents[2]
SAME = 77
QUICK: dict[str, Any] = {"heartbeat_interval": 0.5}
"""The prefill engine notices after 2 s that the old one hangs; until then the new one waits."""

HANGS = """
import sys
from aiodatadist._adapters.peer_links import PeerAddress
from tests.adapters.test_pushes import End
from tests.adapters.test_restarted_decoders import SAME, QUICK
decode = End(1, cluster_id=SAME, **QUICK)
decode.expect("old", PeerAddress.model_validate_json(sys.stdin.readline()), (5, 6))
sys.stdin.readline()
"""


def test_nothing_lands_in_the_new_ones_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    shut, may_shut = Link._shut, threading.Event()

    async def slowly(link: Link) -> None:  # as HcclCommDestroy does it while a peer hangs
        await anyio.to_thread.run_sync(may_shut.wait)
        await shut(link)

    monkeypatch.setattr(Link, "_shut", slowly)
    prefill = End(0, **QUICK)
    with (
        closing(prefill.service),
        children.Popen([sys.executable, "-c", HANGS], stdin=subprocess.PIPE, text=True, cwd=ROOT) as hanging,
    ):
        try:
            assert hanging.stdin is not None
            hanging.stdin.write(f"{prefill.address.model_dump_json()}\n")
            hanging.stdin.flush()
            prefill.until(lambda ended: "old" in ended.wanted)
            hanging.send_signal(signal.SIGSTOP)
            decode = End(1, cluster_id=SAME, **QUICK)
            with closing(decode.service):
                try:
                    decode.expect("new", prefill.address, (0, 1))
                    prefill.until(lambda ended: "new" in ended.wanted)
                    prefill.step("old")
                    prefill.service.pushed("old", "old")
                    prefill.sent("old")
                    assert (decode.holds(5), decode.holds(6)) == ({16 + 5}, {16 + 6})
                finally:
                    may_shut.set()
        finally:
            hanging.kill()
