"""Connections for heartbeats: each counts for the link whose token it brings."""

from __future__ import annotations

from typing import Any

import pytest

from aiodatadist._cluster.liveness import Heartbeats
from aiodatadist._wire.messages import AttachHeartbeats
from aiodatadist.errors import LinkError


class Expecting:
    """A link as heartbeats know it before they come."""

    def __init__(self, token: str) -> None:
        self.heartbeat_token = token


def test_heartbeats_are_of_the_link_whose_token_they_bring() -> None:
    heartbeats = Heartbeats(1.0, 3)
    tokens = ["1" * 64, "2" * 64, "3" * 64]
    links: list[Any] = [Expecting(token) for token in tokens]
    try:
        for link in links:
            heartbeats.expect(link)
        with pytest.raises(LinkError, match="a link that does not exist"):
            heartbeats.accept(AttachHeartbeats(token="4" * 64))
        for at in (1, 2, 0):
            assert heartbeats.accept(AttachHeartbeats(token=tokens[at])) is links[at]
            with pytest.raises(LinkError):  # once
                heartbeats.accept(AttachHeartbeats(token=tokens[at]))
    finally:
        heartbeats.close()
