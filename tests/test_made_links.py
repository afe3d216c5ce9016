"""A link that is made keeps nothing of how it was made."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aiodatadist._cluster.pending_client import PendingClient
from aiodatadist._link.control.connection import FirstWords
from aiodatadist._wire.handshake import Handshake
from aiodatadist._wire.key_proof import KeyProof, SessionKeys
from aiodatadist._wire.messages import Accept, Connect, Hello, Hello1, Ready, Welcome
from aiodatadist.testing import cluster_info, inside, open_cluster
from tests.certificates import folder_for
from tests.keys import proving


@pytest.mark.parametrize("mode", ["none", "key", "TLS"])
async def test_nothing_of_a_links_beginning_is_kept(mode: str, tmp_path: Path) -> None:
    """The messages of a handshake would take some 7 KiB of each link, and a part of them is secret."""
    kinds = (
        Handshake,
        KeyProof,
        SessionKeys,
        PendingClient,
        FirstWords,
        Hello,
        Hello1,
        Welcome,
        Connect,
        Accept,
        Ready,
    )

    def options(number: int) -> dict[str, Any]:
        if mode == "TLS":
            return {"trust": folder_for(tmp_path / str(number), number)}
        return proving(b"k" * 32 if mode == "key" else None)

    def kept() -> Counter[str]:
        gc.collect()
        return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds))

    async with open_cluster(1, **options(1)) as prompt, open_cluster(2, device_id=1, **options(2)) as decoder:
        before = kept()
        linked = await decoder.datadist.link_clusters([cluster_info(prompt)], 5000)
        assert linked.errors[0] is None
        links = [one for cluster in (prompt, decoder) for one in inside(cluster.datadist).links.current]
        assert [one.life.is_mutual for one in links] == [True, True]
        assert kept() == before
