"""Connections for heartbeats: each counts for the link whose token, or name, it brings."""

from __future__ import annotations

from typing import Any

import pytest

from aiodatadist._cluster.liveness import Heartbeats
from aiodatadist._wire.key_proof import heartbeat_key
from aiodatadist._wire.proved import Proved
from aiodatadist.errors import LinkError


class Expecting:
    """A link as heartbeats know it before they come."""

    def __init__(self, token: str) -> None:
        self.heartbeat_token = token
        self.proved: Proved | None = None


def test_heartbeats_are_of_the_link_whose_token_they_bring() -> None:
    heartbeats = Heartbeats(1.0, 3)
    tokens = ["1" * 64, "2" * 64, "3" * 64]
    links: list[Any] = [Expecting(token) for token in tokens]
    try:
        for link in links:
            heartbeats.expect(link)
        with pytest.raises(LinkError, match="a link that does not exist"):
            heartbeats.accept("4" * 64)
        for at in (1, 2, 0):
            assert heartbeats.accept(tokens[at]) is links[at]
            with pytest.raises(LinkError):  # once
                heartbeats.accept(tokens[at])
    finally:
        heartbeats.close()


def test_heartbeats_of_a_link_with_a_key_prove_that_links_own_key() -> None:
    heartbeats, links = Heartbeats(1.0, 3), list[Any]()
    try:
        for number in range(2):
            link = Expecting("")
            link.proved = Proved("a key", heartbeat_key(bytes([number]) * 64))
            links.append(link)
            heartbeats.expect(link)  # type: ignore[arg-type]
        keys = [link.proved.heartbeats for link in links]
        assert heartbeats.keys_of(["9" * 64, keys[1].name]) == [keys[1]]
        heartbeats.expect(Expecting("7" * 64))  # type: ignore[arg-type]  # a link without a key, which proves none
        for names in ([], ["9" * 64], ["a key"], ["7" * 64]):
            with pytest.raises(LinkError, match="a link that does not exist"):
                heartbeats.keys_of(names)
        assert heartbeats.accept(keys[1].name) is links[1]
        with pytest.raises(LinkError):  # once
            heartbeats.keys_of([keys[1].name])
    finally:
        heartbeats.close()
