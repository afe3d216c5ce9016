"""The accelerator runtime: the vendor's libraries, or softnpu.

One runtime serves a whole process, because the vendor's initialisation does. The environment variable
``AIODATADIST_RUNTIME`` chooses it: ``ascend``, ``soft``, or ``auto`` (the default: the vendor's libraries if they load
and show a device, otherwise softnpu).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from aiodatadist._native.library import DECLARED, SOFTNPU, Handle, ffi, know_functions, ring, ring_copy
from aiodatadist.errors import (
    DeviceError,
    FeatureNotEnabled,
    LLMException,
    LLMStatusCode,
    OutOfMemory,
    ParamInvalid,
    RuntimeUnavailable,
    StuckError,
    TransferError,
    TransferTimeout,
)

RuntimeName = Literal["ascend", "soft"]

# This order works on every CANN version: 8.5 split the libraries, older ones have only the second name of each pair.
ACL_LIBRARIES = ("libacl_rt.so", "libascendcl.so")
COMM_LIBRARIES = ("libhcomm.so", "libhccl.so")
P2P_LIBRARIES = ("libhccl.so",)

# cffi offers every number of our headers as an attribute of any library that it opened with them.
ACL_TIMEOUTS = frozenset(
    {
        ring.ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
        ring.ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
        ring.ACL_ERROR_RT_WAIT_TIMEOUT,
        ring.ACL_ERROR_RT_TASK_TIMEOUT,
    }
)
ACL_OUT_OF_MEMORY = frozenset(
    {
        ring.ACL_ERROR_RT_MEMORY_ALLOCATION,
        207018,  # ACL_ERROR_RT_DEVICE_OOM of the vendor's headers; ours lack it
        ring.ACL_ERROR_BAD_ALLOC,
    }
)
ACL_BAD_ARGUMENT = frozenset(
    {
        ring.ACL_ERROR_INVALID_PARAM,
        ring.ACL_ERROR_RT_PARAM_INVALID,
        ring.ACL_ERROR_RT_INVALID_DEVICEID,
        ring.ACL_ERROR_RT_ADDR_UNALIGNED,
        ring.ACL_ERROR_RT_INVALID_MEMORY_TYPE,
        ring.ACL_ERROR_RT_INVALID_HANDLE,
        ring.ACL_ERROR_MEMORY_ADDRESS_UNALIGNED,
        ring.ACL_ERROR_INVALID_RESOURCE_HANDLE,
    }
)
ACL_UNSUPPORTED = frozenset(
    {ring.ACL_ERROR_API_NOT_SUPPORT, ring.ACL_ERROR_FEATURE_UNSUPPORTED, ring.ACL_ERROR_RT_FEATURE_NOT_SUPPORT}
)
ACL_CAPTURED = frozenset(
    {
        ring.ACL_ERROR_RT_STREAM_CAPTURED,
        ring.ACL_ERROR_RT_EVENT_CAPTURED,
        ring.ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
    }
)
OUTSIDE_CAPTURE = (
    "record and transfer outside the captured region, or report the layer from the host: "
    "AwaitableLayerSynchronizer.ready()"
)
ACL_REPEAT_INITIALIZE = ring.ACL_ERROR_REPEAT_INITIALIZE

FUNCTIONS = tuple(sorted(name for name in DECLARED if name.startswith(("acl", "Hccl"))))
"""The vendor's functions that are declared; libraries of an older CANN lack some."""

HCCL_NAMES = {
    **ffi.typeof("HcclResult").elements,
    ring.HCCL_E_OPRETRY_FAIL: "HCCL_E_OPRETRY_FAIL",
    ring.HCCL_E_OOM: "HCCL_E_OOM",
}


def acl_error(call: str, code: int, words: str) -> LLMException:
    """Return the exception for a failed ``acl*`` call. This is the only table of these codes."""
    text = f"{call} returned {code}" + (f": {words}" if words else "")
    if code in ACL_TIMEOUTS:
        return TransferTimeout(text)
    if code in ACL_OUT_OF_MEMORY:
        return OutOfMemory(text)
    if code in ACL_BAD_ARGUMENT:
        return ParamInvalid(text)
    if code in ACL_UNSUPPORTED:
        return FeatureNotEnabled(text)
    if code in (LLMStatusCode.LLM_DEVICE_MEM_ERROR, LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR):
        return TransferError(text, status_code=LLMStatusCode(code))
    return DeviceError(text, code=code, hint=OUTSIDE_CAPTURE if code in ACL_CAPTURED else None)


def hccl_error(call: str, code: int, words: str) -> LLMException:
    """Return the exception for a failed ``Hccl*`` call. This is the only table of these codes."""
    text = f"{call} returned {code} ({HCCL_NAMES.get(code, 'unknown')})" + (f": {words}" if words else "")
    if code == ring.HCCL_E_PARA:
        return ParamInvalid(text)
    if code == ring.HCCL_E_TIMEOUT:
        return TransferTimeout(text)
    if code == ring.HCCL_E_MEMORY:
        return OutOfMemory(text)
    if code == ring.HCCL_E_NOT_SUPPORT:
        return FeatureNotEnabled(text)
    if code == ring.HCCL_E_REMOTE:
        return TransferError(text, status_code=LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR)
    return TransferError(text)


def completion_error(completion: Any) -> LLMException:
    """Return the exception for a ring completion that is neither done nor cancelled."""
    words = decode(completion.message)
    if completion.state == ring.RING_REFUSED:
        what = "not completed" if completion.bytes else "not begun"
        return DeviceError(f"{what}: the device has not released an earlier transfer of this stream")
    if completion.state == ring.RING_STUCK:
        return StuckError(_why_stuck(completion, words))
    if completion.state == ring.RING_TIMED_OUT:
        elapsed = (completion.finished_ns - completion.started_ns) / 1e9
        return TransferTimeout(
            f"stopped after {elapsed:.3f} s with {completion.bytes} bytes landed",
            hint="if the call sets no limit, LLMConfig.sync_kv_timeout does, in milliseconds",
        )
    make = hccl_error if completion.origin == ring.RING_HCCL else acl_error
    what = f"step {completion.step} of the transfer"
    if completion.origin == ring.RING_WORK:
        what = f"waiting for {what}, or for other work in the same device context,"
    error = make(what, completion.code, words)
    # A complaint of the device's is not the caller's mistake: bytes may have been moved.
    if isinstance(error, ParamInvalid):
        return TransferError(*error.args, status_code=error.status_code)
    return error


def _why_stuck(completion: Any, words: str) -> str:
    text = "the device did not let go of the transfer's memory, not even after an abort"
    if completion.abort_code:
        text = (
            f"the device did not let go of the transfer's memory, and aclrtStreamAbort returned {completion.abort_code}"
        )
    if completion.abort_code in ACL_UNSUPPORTED:
        text += " (this chip cannot abort a stream; A2, A3 and 950 can)"
    if completion.code:
        return f"{text} (it began with {completion.code}: {words})"
    return f"{text}: {words}" if words else text


def decode(text: Any) -> str:
    """Return the newest of the vendor's lines, because older ones belong to other calls."""
    words = "" if text == ffi.NULL else bytes(ffi.string(text)).decode(errors="replace").strip()
    return words.partition("\n")[0]


class _Symbols:
    """Functions by name, each looked up at its first call, so that a missing one is not an error at load time."""

    def __init__(self, paths: Mapping[str, Any]) -> None:
        self._libraries = paths
        for library in paths.values():
            know_functions(library)

    def has(self, name: str) -> bool:
        return any(hasattr(library, name) for library in self._libraries.values())

    def __getattr__(self, name: str) -> Any:
        for library in self._libraries.values():
            try:
                function = getattr(library, name)
            except AttributeError:
                continue
            setattr(self, name, function)
            return function
        raise FeatureNotEnabled(
            f"{name} is in none of {', '.join(self._libraries)}", hint="a newer CANN release may have it"
        )


@dataclass(eq=False)
class Runtime:
    """An opened accelerator runtime.

    Attributes:
        name: ``"ascend"`` or ``"soft"``.
        libraries: the libraries that were opened, in that order.
        version: the version of the acl API, as the runtime reports it.
        device_count: the number of devices that this process can see.
    """

    name: RuntimeName
    acl: Any
    hccl: Any
    libraries: list[str]
    version: str = ""
    device_count: int = 0
    pid: int = field(default_factory=os.getpid)

    # ---- calling ----

    def check(self, call: str, code: int) -> None:
        """Raise the error that ``code`` of the ``acl*`` function ``call`` means, if any.

        Reads this thread's message, so call it at once.
        """
        if code != 0:
            raise acl_error(call, code, self.recent_words())

    def check_hccl(self, call: str, code: int) -> None:
        """Raise likewise for an ``Hccl*`` function."""
        if code != 0:
            raise hccl_error(call, code, self.recent_words())

    def recent_words(self) -> str:
        return decode(self.acl.aclGetRecentErrMsg())

    @property
    def is_soft(self) -> bool:
        return self.name == "soft"

    @cached_property
    def chip(self) -> str:
        """The vendor's name of the chip, for instance Ascend910B3. Empty if the runtime does not say."""
        name = self.acl.aclrtGetSocName()
        return "" if name == ffi.NULL else bytes(ffi.string(name)).decode(errors="replace")

    @cached_property
    def soft_strictness(self) -> int:
        """The hardware that softnpu imitates: 0 none, 1 HCCS, 2 RoCE, 3 HCCS of an A3."""
        return int(self.acl.softnpu_strictness())

    @cached_property
    def soft_copiers(self) -> int:
        """The number of softnpu's threads that share a large copy."""
        return int(self.acl.softnpu_copiers())

    # ---- devices and contexts ----

    def physical_id(self, index: int) -> int | None:
        """Return the id of the card on this machine, or None if the runtime does not say (CANN before 8.5).

        ASCEND_RT_VISIBLE_DEVICES and containers number cards differently.
        """
        found = ffi.new("int32_t *")
        try:
            code = self.acl.aclrtGetPhyDevIdByLogicDevId(index, found)
        except FeatureNotEnabled:
            return None
        self.check("aclrtGetPhyDevIdByLogicDevId", code)
        return int(found[0])

    def super_pod(self, index: int) -> tuple[int, int] | None:
        """Return an A3's super pod, and the device in it; None if the runtime does not say (CANN before 8.5)."""
        value, found = ffi.new("int64_t *"), []
        for which in (ring.ACL_DEV_ATTR_SUPER_POD_ID, ring.ACL_DEV_ATTR_SUPER_POD_DEVIDE_ID):
            try:
                code = self.acl.aclrtGetDeviceInfo(index, which, value)
            except FeatureNotEnabled:
                return None
            self.check("aclrtGetDeviceInfo", code)
            found.append(int(value[0]))
        return found[0], found[1]

    def acquire_device(self, index: int) -> Handle:
        """Take a reference on a device; return its default context. The thread's own context stays as it was."""
        if not 0 <= index < self.device_count:
            raise ParamInvalid(f"device {index} does not exist: the {self.name} runtime shows {self.device_count}")
        with self._kept_context():
            self.check("aclrtSetDevice", self.acl.aclrtSetDevice(index))
            context = ffi.new("aclrtContext *")
            self.check("aclrtGetCurrentContext", self.acl.aclrtGetCurrentContext(context))
            return context[0]

    def release_device(self, index: int) -> None:
        with self._kept_context():
            self.check("aclrtResetDevice", self.acl.aclrtResetDevice(index))

    @contextmanager
    def _kept_context(self) -> Iterator[None]:
        before = ffi.new("aclrtContext *")
        had = self.acl.aclrtGetCurrentContext(before) == 0
        try:
            yield
        finally:
            if had:
                self.acl.aclrtSetCurrentContext(before[0])

    @contextmanager
    def context(self, context: Handle) -> Iterator[None]:
        """Make a context current in this thread inside this ``with`` block."""
        with self._kept_context():
            self.check("aclrtSetCurrentContext", self.acl.aclrtSetCurrentContext(context))
            yield

    @property
    def has_notifies(self) -> bool:
        """True with CANN 8.5 and later, and softnpu."""
        return all(self.acl.has(name) for name in ("aclrtCreateNotify", "aclrtWaitAndResetNotify", "aclrtRecordNotify"))

    def is_captured(self, stream: Handle) -> bool:
        """Return True if what is submitted to the stream becomes part of a graph, to run when that is replayed.

        The stream's context must be current. False if CANN is older than 8.5.
        """
        status, graph = ffi.new("aclmdlRICaptureStatus *"), ffi.new("aclmdlRI *")
        try:
            code = self.acl.aclmdlRICaptureGetInfo(stream, status, graph)
        except FeatureNotEnabled:
            return False
        self.check("aclmdlRICaptureGetInfo", code)
        return bool(status[0] != ring.ACL_MODEL_RI_CAPTURE_STATUS_NONE)

    def missing_functions(self) -> list[str]:
        """Return the declared functions that none of the libraries has."""
        return [name for name in FUNCTIONS if not (self.acl if name.startswith("acl") else self.hccl).has(name)]

    # ---- the ring's view of it ----

    @cached_property
    def ring_driver(self) -> Handle:
        """The vendor's calls as a ``ring_driver``; kept alive with this object."""
        names = {
            "set_context": "aclrtSetCurrentContext", "get_context": "aclrtGetCurrentContext",
            "create_stream": "aclrtCreateStreamWithConfig", "destroy_stream": "aclrtDestroyStream",
            "abort_stream": "aclrtStreamAbort", "sync_stream": "aclrtSynchronizeStreamWithTimeout",
            "query_stream": "aclrtStreamQuery", "query_event": "aclrtQueryEventStatus", "wait_event": "aclrtStreamWaitEvent",
            "create_event": "aclrtCreateEventExWithFlag", "destroy_event": "aclrtDestroyEvent",
            "record_event": "aclrtRecordEvent", "sync_event": "aclrtSynchronizeEventWithTimeout",
            "copy_async": "aclrtMemcpyAsync", "recent_error": "aclGetRecentErrMsg",
        }  # fmt: skip
        driver = ffi.new("ring_driver *")
        for slot, name in names.items():
            setattr(driver, slot, self._pointer(self.acl, name))
        driver.copy = ring_copy
        if self.is_soft:
            driver.run_here = self._pointer(self.acl, "softnpu_run_here")
        if self.has_notifies:
            driver.wait_notify = self._pointer(self.acl, "aclrtWaitAndResetNotify")
            driver.record_notify = self._pointer(self.acl, "aclrtRecordNotify")
        driver.get = self._pointer(self.hccl, "HcclBatchGet")
        driver.put = self._pointer(self.hccl, "HcclBatchPut")
        return driver

    @staticmethod
    def _pointer(symbols: _Symbols, name: str) -> Handle:
        for library in symbols._libraries.values():
            try:
                return ffi.addressof(library, name)
            except AttributeError:
                continue
        raise FeatureNotEnabled(f"{name} is in none of {', '.join(symbols._libraries)}")


DEVICE_FILES = Path("/dev")

_lock = threading.Lock()
_opened: Runtime | None = None


def open_runtime() -> Runtime:
    """Return the process's runtime; the first call opens and initialises it.

    That may take seconds on an NPU: call it in a thread.

    Raises:
        RuntimeUnavailable: if the requested runtime cannot be opened, or shows no device.
        ParamInvalid: if ``AIODATADIST_RUNTIME`` is not auto, ascend or soft.
    """
    global _opened  # noqa: PLW0603 - one per process, as the vendor's own initialisation
    with _lock:
        if _opened is None:
            _opened = _open(os.environ.get("AIODATADIST_RUNTIME", "auto"))
        return _opened


def load_runtime(name: RuntimeName) -> Runtime:
    """Return a runtime that is not initialised, for diagnosis: nothing was called, and no device was looked for.

    Raises:
        RuntimeUnavailable: if a library cannot be loaded.
    """
    return _load_ascend() if name == "ascend" else _load_soft()


def _open(choice: str) -> Runtime:
    if choice == "ascend":
        return _start(_load_ascend())
    if choice == "soft":
        return _start(_load_soft())
    if choice != "auto":
        raise ParamInvalid(f"AIODATADIST_RUNTIME is {choice!r}: must be auto, ascend or soft")
    try:
        return _start(_load_ascend())
    except RuntimeUnavailable as error:
        if nodes := npu_nodes():
            raise RuntimeUnavailable(
                f"this machine has NPUs ({', '.join(nodes)}), but they cannot be used: {error.args[0]}",
                hint="source CANN's set_env.sh; AIODATADIST_RUNTIME=soft runs without the NPUs",
            ) from error
        return _start(_load_soft())


def npu_nodes() -> list[str]:
    """Return the device files of NPUs, by which ``auto`` knows that a machine has some."""
    return sorted(str(path) for path in DEVICE_FILES.glob("davinci[0-9]*"))


def _dlopen(names: tuple[str, ...], flags: int = 0) -> tuple[str, Any]:
    """Open the first of these libraries that exists, for good: a vendor library's threads may outlast the interpreter."""
    tried = []
    for name in names:
        try:
            return name, ffi.dlopen(name, ffi.RTLD_NOW | ffi.RTLD_NODELETE | flags)
        except OSError as error:
            tried.append(str(error))
    raise RuntimeUnavailable("; ".join(tried), hint="is CANN installed, and its lib64 on LD_LIBRARY_PATH?")


def _load_ascend() -> Runtime:
    acl_name, acl = _dlopen(ACL_LIBRARIES)
    comm_name, comm = _dlopen(COMM_LIBRARIES, ffi.RTLD_GLOBAL)
    p2p_name, p2p = _dlopen(P2P_LIBRARIES)
    hccl = _Symbols({comm_name: comm, p2p_name: p2p})
    return Runtime("ascend", _Symbols({acl_name: acl}), hccl, [acl_name, comm_name, p2p_name])


def _load_soft() -> Runtime:
    try:
        library = ffi.dlopen(str(SOFTNPU))
    except OSError as error:
        raise RuntimeUnavailable(
            f"softnpu: {error}", hint="reinstall aiodatadist; its native part is missing"
        ) from error
    symbols = _Symbols({SOFTNPU.name: library})
    return Runtime("soft", symbols, symbols, [str(SOFTNPU)])


def _start(runtime: Runtime) -> Runtime:
    code = runtime.acl.aclInit(ffi.NULL)
    if code not in (0, ACL_REPEAT_INITIALIZE):
        raise RuntimeUnavailable(f"aclInit returned {code}: {runtime.recent_words()}", code=code)
    count = ffi.new("uint32_t *")
    code = runtime.acl.aclrtGetDeviceCount(count)
    if code != 0 or count[0] == 0:
        raise RuntimeUnavailable(f"the {runtime.name} runtime shows no device (code {code}): {runtime.recent_words()}")
    runtime.device_count = count[0]
    version = ffi.new("int32_t[3]")
    if runtime.acl.aclrtGetVersion(version, version + 1, version + 2) == 0:
        runtime.version = ".".join(map(str, version))
    return runtime
