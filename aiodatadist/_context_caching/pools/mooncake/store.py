"""Mooncake's store object: one for the process, because its threads, ports and settings are the process's.

Every pool that is opened in the process shares it; the last to be closed closes it.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
import time
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from aiodatadist._context_caching.pools.contract import PoolUnreachable
from aiodatadist._context_caching.pools.extras import how_to_install
from aiodatadist.errors import ParamInvalid

ENVIRONMENT: Final = {
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",  # by default a hanging peer blocks a call for 30 seconds
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_LOG_LEVEL": "ERROR",  # its log goes to this process's standard error
}
"""Variables that are set when Mooncake is loaded, unless they are set already."""

NODE_GONE: Final = -800
NOT_FOUND: Final = -704
NOT_READY: Final = -703
MISSES: Final = frozenset({NOT_READY, NOT_FOUND, -707, -710, -712, NODE_GONE})
OWNER_GONE: Final = MISSES - {NOT_READY, NOT_FOUND}
"""Misses of keys that the master may continue to list."""
NO_ROOM: Final = -200
LOST_KEYS: Final = 1 << 16
"""Most unreadable keys that are remembered."""
WRONG_LENGTH: Final = -600
NO_MASTER: Final = frozenset({-900, -901, -1010})


class Settings(NamedTuple):
    """The settings of a process's store object. ``segment``: bytes that this process lends to the pool."""

    host: str
    master: str
    segment: int
    protocol: str
    device: str

    def described(self, *names: str) -> str:
        """Return the settings with these names, or all, in words."""
        return ", ".join(
            f"{name} {value!r}" for name, value in self._asdict().items() if name in (names or self._fields)
        )


def load() -> Any:
    """Return Mooncake's module, with our defaults in the environment.

    Raises:
        ImportError: if a package or library is missing; the message names it.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"MooncakePool needs the package mooncake-transfer-engine-non-cuda, or another build of it ({error}): "
            f"{how_to_install('mooncake')}"
        ) from error
    except ImportError as error:
        library = str(error).partition(":")[0]
        package = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}.get(
            library
        )
        advice = f"apt-get install {package}" if package else "is this the build for this machine?"
        raise ImportError(f"Mooncake cannot be loaded ({error}): {advice}") from error


class Lost:
    """Keys that are listed and cannot be read: each for some seconds, and the last ``LOST_KEYS`` at most."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[str, float] = {}  # in order of age: the oldest is dropped first

    def add(self, keys: Iterable[str]) -> None:
        until = time.monotonic() + self._seconds
        for key in keys:
            self._until.pop(key, None)
            self._until[key] = until
        while len(self._until) > LOST_KEYS:
            del self._until[next(iter(self._until))]

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._until.pop(key, None)

    def __contains__(self, key: str) -> bool:
        return self._until.get(key, -math.inf) > time.monotonic()


class Shared:
    """The process's store object and its users."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.store: Any = None
        self.settings: Settings | None = None
        self.users = 0


shared = Shared()


def borrow(settings: Settings) -> Any:
    """Return the store object, set up. Blocks.

    Raises:
        ImportError: see :func:`load`.
        ParamInvalid: if another pool of this process uses it with other settings.
        PoolUnreachable: if the master refuses.
    """
    with shared.lock:
        if shared.store is None:
            shared.store, shared.settings = _set_up(settings), settings
        elif settings != shared.settings:
            theirs = shared.settings or settings
            names = [name for name in settings._fields if getattr(settings, name) != getattr(theirs, name)]
            raise ParamInvalid(
                f"this process has a Mooncake store with {theirs.described(*names)}, and there is only one: it cannot have "
                f"{settings.described(*names)}, too"
            )
        shared.users += 1
        return shared.store


def _set_up(settings: Settings) -> Any:
    store = load().MooncakeDistributedStore()
    code = store.setup(
        settings.host, "P2PHANDSHAKE", settings.segment, 0, settings.protocol, settings.device, settings.master
    )
    if code != 0:
        store.close()
        raise PoolUnreachable(
            f"Mooncake's set-up failed with code {code} ({settings.described()}): start this process with "
            "MC_LOG_LEVEL=INFO in its environment, and Mooncake says why on standard error"
        )
    return store


def give_back() -> None:
    """Close the store object if this was its last user. Blocks, then for about a second."""
    with shared.lock:
        shared.users -= 1
        if shared.users == 0:
            store, shared.store, shared.settings = shared.store, None, None
            store.close()
