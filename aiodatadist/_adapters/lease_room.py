"""The part of a KV cache that peers may occupy. Pure: an engine asks it before it keeps blocks, or awaits them.

Without a limit, requests whose blocks no peer fetches would fill the cache, each for ``lease_seconds``, and so would
requests whose blocks no peer sends, each for ``pull_seconds``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

MAX_CLIENT = 256
"""Characters of a client's name that are compared."""


class LeaseRoom:
    """The blocks of one KV cache that are kept for peers, or those that are awaited from peers.

    A block that several requests share counts once: it is free when the last of them has ended.

    Args:
        blocks: number of blocks of the KV cache.
        share: the part of them that may be kept, from 0 to 1.
        client_share: the part of them that may be kept for requests of one client; None for no such limit.
    """

    def __init__(self, blocks: int, share: float, client_share: float | None = None) -> None:
        self._most = int(blocks * share)
        self._is_limited = self._most < blocks
        self._most_of_one = self._most if client_share is None else int(blocks * client_share)
        self._kept: Counter[int] = Counter()
        self._kept_of: dict[str, Counter[int]] = {}
        self._requests: dict[str, tuple[str, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        """Return the number of blocks that are kept."""
        return len(self._kept)

    def __contains__(self, request: str) -> bool:
        """Return True if blocks of this request are kept."""
        return request in self._requests

    def fits(self, count: int) -> bool:
        """Return True if ``count`` blocks more may be kept, even if no other request has them.

        Always True if all blocks may be kept: then the engine itself lets requests wait until blocks are free.
        """
        return not self._is_limited or len(self._kept) + count <= self._most

    def take(self, request: str, blocks: Iterable[int], client: str = "") -> bool:
        """Count a request's blocks as kept. Return False, and count nothing, if that exceeds a limit.

        Args:
            client: the client that sent the request, if the engine knows it. No limit applies to an unknown
                client alone.
        """
        self.give_back(request)
        numbers, client = tuple(set(blocks)), client[:MAX_CLIENT]
        if _with(self._kept, numbers) > self._most:
            return False
        own = self._kept_of.get(client, Counter())
        if client and _with(own, numbers) > self._most_of_one:
            return False
        self._kept.update(numbers)
        if client:
            own.update(numbers)
            self._kept_of[client] = own
        self._requests[request] = client, numbers
        return True

    def give_back(self, request: str) -> None:
        """Count a request's blocks as no longer kept. No effect if they were not."""
        client, numbers = self._requests.pop(request, ("", ()))
        _without(self._kept, numbers)
        own = self._kept_of.get(client)
        if own is not None:
            _without(own, numbers)
            if not own:
                del self._kept_of[client]


def _with(kept: Counter[int], numbers: tuple[int, ...]) -> int:
    """Return how many blocks would be kept with these."""
    return len(kept) + sum(number not in kept for number in numbers)


def _without(kept: Counter[int], numbers: tuple[int, ...]) -> None:
    for number in numbers:
        if kept[number] > 1:
            kept[number] -= 1
        else:
            del kept[number]
