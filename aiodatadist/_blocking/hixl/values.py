"""The values that only HIXL's calls without await know: what is asked of a request, and what is said of it."""

from __future__ import annotations

from typing import Any

from aiodatadist._hixl.values import Exported, TransferStatus, unsigned

_MOST = (1 << 32) - 1


class FeatureType(Exported):
    """A feature that ``get_capability`` is asked for."""

    AUTO_CONNECT = 0
    CLIENT_SERVER_COMM = 1


class TransferArgs:
    """The arguments of a transfer that is not waited for.

    Attributes:
        user_data: a number that comes back with the result; 0 at first.
    """

    __slots__ = ("_user_data",)

    def __init__(self) -> None:
        self._user_data = 0

    @property
    def user_data(self) -> int:
        return self._user_data

    @user_data.setter
    def user_data(self, value: int) -> None:
        self._user_data = unsigned(value, "user_data")


class GetTransferStatusArgs:
    """The arguments of ``get_all_transfer_status``.

    Attributes:
        max_query_count: the most requests that are listed.
        skip_waiting: True to leave out those that have not ended.
    """

    __slots__ = ("_max_query_count", "_skip_waiting")

    def __init__(self, max_query_count: int = _MOST, skip_waiting: bool = False) -> None:
        self.max_query_count = max_query_count
        self.skip_waiting = skip_waiting

    @property
    def max_query_count(self) -> int:
        return self._max_query_count

    @max_query_count.setter
    def max_query_count(self, value: int) -> None:
        self._max_query_count = unsigned(value, "max_query_count", _MOST + 1)

    @property
    def skip_waiting(self) -> bool:
        return self._skip_waiting

    @skip_waiting.setter
    def skip_waiting(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"skip_waiting is {value!r} of type {type(value).__name__}: must be a bool")
        self._skip_waiting = value


class TransferResult:
    """The state of one request, with its number and its ``user_data``. The state cannot be changed.

    Attributes:
        req: the number of the request; 0 at first.
        user_data: the number that its caller gave; 0 at first.
        status: its state.
    """

    __slots__ = ("_req", "_status", "_user_data")

    def __init__(self) -> None:
        self._req = self._user_data = 0
        self._status = TransferStatus.WAITING

    @property
    def req(self) -> int:
        return self._req

    @req.setter
    def req(self, value: int) -> None:
        self._req = unsigned(value, "req")

    @property
    def user_data(self) -> int:
        return self._user_data

    @user_data.setter
    def user_data(self, value: int) -> None:
        self._user_data = unsigned(value, "user_data")

    @property
    def status(self) -> TransferStatus:
        return self._status

    def __repr__(self) -> str:
        return f"<TransferResult {self._req}: {self._status.name}>"


def result_of(req: int, user_data: int, status: TransferStatus) -> TransferResult:
    """Return the result of a request."""
    result = TransferResult()
    result._req, result._user_data, result._status = req, user_data, status
    return result


def expect(value: Any, name: str, kind: type) -> Any:
    """Return the value. Raises TypeError if it is of another kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}: must be {kind.__name__}")
    return value
