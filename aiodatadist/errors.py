"""All errors of this library, grouped by the largest thing that is ruined.

=====================  ===========================================  ===========================================
class                  what is ruined                               what to do
=====================  ===========================================  ===========================================
``ParamInvalid`` ...   this call: nothing was started               correct the arguments or the order of calls
``TransferError`` ...  this transfer: its destination is undefined  retry it
``LinkError`` ...      this link: other links are unaffected        link again
``DeviceError``        this device: nothing on it can be trusted    restart the process
``InternalError``      this library's own rules                     please report it
=====================  ===========================================  ===========================================

All of them are :class:`LLMException`, which is LLM-DataDist's own exception, and carry its ``status_code``.
"""

from __future__ import annotations

import copy
import errno
import resource
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Self

_BASE = 0x5010B000  # every library code is this plus a small number


class LLMStatusCode(IntEnum):
    """The status codes of LLM-DataDist, with its numbers."""

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = _BASE + 1
    LLM_KV_CACHE_NOT_EXIST = _BASE + 2
    LLM_REPEAT_REQUEST = _BASE + 3
    LLM_REQUEST_ALREADY_COMPLETED = _BASE + 4
    LLM_PARAM_INVALID = _BASE + 5
    LLM_ENGINE_FINALIZED = _BASE + 6
    LLM_NOT_YET_LINK = _BASE + 7
    LLM_ALREADY_LINK = _BASE + 8
    LLM_LINK_FAILED = _BASE + 9
    LLM_UNLINK_FAILED = _BASE + 10
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = _BASE + 11
    LLM_CLUSTER_NUM_EXCEED_LIMIT = _BASE + 12
    LLM_PROCESSING_LINK = _BASE + 13
    LLM_DEVICE_OUT_OF_MEMORY = _BASE + 14
    LLM_PREFIX_ALREADY_EXIST = _BASE + 15
    LLM_PREFIX_NOT_EXIST = _BASE + 16
    LLM_SEQ_LENOVERLIMIT = _BASE + 17
    LLM_NO_FREE_BLOCK = _BASE + 18
    LLM_BLOCKS_OUT_OF_MEMORY = _BASE + 19
    LLM_EXIST_LINK = _BASE + 24
    LLM_FEATURE_NOT_ENABLED = _BASE + 25
    LLM_TIMEOUT = _BASE + 26
    LLM_LINK_BUSY = _BASE + 27
    LLM_OUT_OF_MEMORY = _BASE + 28
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1

    @classmethod
    def of(cls, code: int) -> LLMStatusCode:
        """Return the member with this number, or ``LLM_FAILED`` for an unknown number, as upstream does."""
        try:
            return cls(code)
        except ValueError:
            return cls.LLM_FAILED


class LLMException(RuntimeError):
    """Base of everything this library raises on purpose, apart from ``TypeError`` and ``ValueError`` for bad arguments.

    Attributes:
        status_code: the reason, as LLM-DataDist numbers it; never ``LLM_SUCCESS``.
        peer: cluster id of the other end, or None.
        operation: the call that failed, for instance ``"init"``; None if the caller knows it anyway, as with transfers.
        hint: what to do next, or None. The message contains it, too.
        landed_blocks: after a failed ``pull_leased``, the number of destination blocks, from the first, that are intact
            all the same.
        retryable: True if the same call may succeed later without further steps. This includes a broken link that this
            end makes again (``LLMConfig.relink``).
    """

    default_status: LLMStatusCode = LLMStatusCode.LLM_FAILED
    retryable: bool = False

    def __init__(
        self,
        *args: Any,
        status_code: LLMStatusCode | None = None,
        peer: int | None = None,
        operation: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(*args)
        # A peer may claim LLM_SUCCESS for its error: it counts as not given.
        self._status_code = status_code or self.default_status
        self.peer = peer
        self.operation = operation
        self.hint = hint
        self.landed_blocks: int = 0

    @property
    def status_code(self) -> LLMStatusCode:
        return self._status_code

    def with_status(self, status_code: LLMStatusCode) -> Self:
        """Return a copy with another status code, for an interface that documents that code for the error."""
        other = copy.copy(self)
        other._status_code = status_code
        return other

    def __str__(self) -> str:
        what = super().__str__() or self.__class__.__name__
        where = f"{self.operation}: " if self.operation else ""
        advice = f"; {self.hint}" if self.hint else ""
        return f"{where}{what} [{self._status_code.name}]{advice}"


# ---- this call: nothing was started ----


class ParamInvalid(LLMException):
    """An argument breaks a rule. The message names the value, the limit and the rule."""

    default_status = LLMStatusCode.LLM_PARAM_INVALID


class CacheNotFound(LLMException):
    """There is no such cache or key, here or at the peer."""

    default_status = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    retryable = True


class LeaseMismatch(CacheNotFound):
    """The owner refused a pull of kept blocks: its lease has other blocks, or those of another prompt.

    The bytes must not be used. The lease continues, for a peer that knows its blocks and its prompt.
    """

    retryable = False


class NotLinked(LLMException):
    """There is no usable link to the cluster."""

    default_status = LLMStatusCode.LLM_NOT_YET_LINK


class FeatureNotEnabled(LLMException):
    """An option that this call needs is off, or the runtime lacks the function."""

    default_status = LLMStatusCode.LLM_FEATURE_NOT_ENABLED


class OutOfMemory(LLMException, MemoryError):
    """A pool or the device has no room. The message names free, largest and pinned bytes."""

    default_status = LLMStatusCode.LLM_OUT_OF_MEMORY
    retryable = True


class ForkError(LLMException):
    """The object was made before ``os.fork()`` and is used in the child. Start processes with spawn."""


# ---- this transfer ----


class TransferError(LLMException):
    """The transfer failed; the contents of its destination are undefined. The link still works."""


class TransferTimeout(TransferError, TimeoutError):
    """The transfer exceeded its time limit. It was stopped, and none of its bytes can land any longer."""

    default_status = LLMStatusCode.LLM_TIMEOUT
    retryable = True


class DataCorrupted(TransferError):
    """Checksums found bytes that changed in transit. The link still works.

    Destination blocks that are not in ``blocks`` are intact. The message names the first few damaged ones. After a
    layered transfer this holds for the layer that the message names, and for those before it.

    Attributes:
        blocks: the damaged blocks of the destination; for a contiguous cache the batch slot.
        digests: for each of them, the CRC-32C at the source and at the destination, over all tensors of the transfer.
    """

    retryable = True

    def __init__(
        self, *args: Any, blocks: Sequence[int] = (), digests: Sequence[tuple[int, int]] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.blocks: tuple[int, ...] = tuple(blocks)
        self.digests: tuple[tuple[int, int], ...] = tuple(digests)


# ---- this link ----


class LinkError(LLMException, ConnectionError):
    """A link could not be established, or was lost. Its transfers fail with this error; other links are unaffected.

    Attributes:
        is_proved: True if the cluster asked for has proved what the message says of it. If False, any process that
            answers at its address may have caused the failure, so relinking continues.
    """

    default_status = LLMStatusCode.LLM_LINK_FAILED
    is_proved: bool = False


class PeerLost(LinkError):
    """The peer's process died, or its connection broke without a good-bye. With one, :class:`LinkClosed` is raised."""

    default_status = LLMStatusCode.LLM_NOT_YET_LINK


class LinkClosed(LinkError):
    """The link was unlinked, by this end or by the peer."""

    default_status = LLMStatusCode.LLM_NOT_YET_LINK


class LinkTimeout(LinkError, TimeoutError):
    """The link was not established in time."""

    default_status = LLMStatusCode.LLM_TIMEOUT


class AuthError(LinkError):
    """The peer could not prove that it has the key, or this end could not."""


class ProtocolError(LinkError):
    """The peer sent something that the protocol does not allow, or that this end does not understand."""

    default_status = LLMStatusCode.LLM_PARAM_INVALID


class IncompatiblePeer(LinkError):
    """The two ends cannot work together. The message names the values that differ."""

    default_status = LLMStatusCode.LLM_PARAM_INVALID


# ---- this device, and us ----


class DeviceError(LLMException):
    """A call into the accelerator's runtime failed. ``code`` is the runtime's own number."""

    def __init__(self, *args: Any, code: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.code = code


class RuntimeUnavailable(DeviceError):
    """The accelerator's runtime could not be opened. The message names the libraries that were tried."""


class StuckError(DeviceError):
    """The device did not release memory when it was asked to. That memory must never be used again."""


class InternalError(LLMException):
    """A rule inside this library was broken. Please report it."""


# ---- words ----


def explained(error: OSError) -> str:
    """Return what the operating system refused, and the limit if the process has no file descriptor left."""
    words = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        return f"{words}: RLIMIT_NOFILE is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
    return words
