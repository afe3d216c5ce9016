"""Forms of transfers that came once. Parts of slots may have another size each time, so a way for the first is of no use."""

from __future__ import annotations

from collections.abc import Hashable

MOST = 256
"""The most forms that are remembered. The oldest is forgotten first."""


class SeenOnce:
    """The latest forms of which no short way was made, because they came only once."""

    def __init__(self) -> None:
        self._forms: dict[Hashable, None] = {}

    def has_seen(self, form: Hashable) -> bool:
        """Return True if a form came before, and forget it; otherwise remember it."""
        if form in self._forms:
            del self._forms[form]
            return True
        if len(self._forms) >= MOST:
            del self._forms[next(iter(self._forms))]
        self._forms[form] = None
        return False

    def clear(self) -> None:
        """Forget all forms."""
        self._forms.clear()
