"""Steps 1, 2 and 10: the libraries, the device, its place in a rank table."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from aiodatadist._cli.probe.endpoint import endpoint_of
from aiodatadist._cli.probe.step import outcome
from aiodatadist._native.library import ffi, ring
from aiodatadist._native.runtime import ACL_REPEAT_INITIALIZE, FUNCTIONS
from aiodatadist.errors import ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._cli.probe.bench import Bench
    from aiodatadist._cli.probe.report import Outcome

NO_CONTEXT = ring.ACL_ERROR_RT_CONTEXT_NULL
DRIVER = Path("/usr/local/Ascend/driver/version.info")
TOOLKIT_FILES = ("version.cfg", "opp/version.info", "compiler/version.info", "runtime/version.info")


def load(bench: Bench) -> Outcome:
    """Load the libraries, look all functions up, and initialise twice."""
    runtime = bench.calls.runtime
    missing = runtime.missing_functions()
    first = bench.calls.code("aclInit", ffi.NULL)
    second = bench.calls.code("aclInit", ffi.NULL)
    count = ffi.new("uint32_t *")
    bench.calls.ok("aclrtGetDeviceCount", count)
    found = f"{len(FUNCTIONS) - len(missing)} of {len(FUNCTIONS)} functions, aclInit {first} then {second}"
    return outcome(
        not missing and (first, second) == (0, ACL_REPEAT_INITIALIZE),
        f"{found}, {count[0]} devices" + (f"; missing: {', '.join(missing)}" if missing else ""),
        acl=_acl_version(bench),
        cann=_cann_version(),
        driver=_version_in(DRIVER) or "unknown",
        chip=runtime.chip or "unknown",
        missing=" ".join(missing),
        devices=str(count[0]),
        libraries=", ".join(Path(name).name for name in runtime.libraries),
    )


def _acl_version(bench: Bench) -> str:
    version = ffi.new("int32_t[3]")
    code = bench.calls.code("aclrtGetVersion", version, version + 1, version + 2)
    return "unknown" if code else ".".join(map(str, version))


def _cann_version() -> str:
    for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        for file in TOOLKIT_FILES if os.environ.get(name) else ():
            if version := _version_in(Path(os.environ[name], file)):
                return version
    return "unknown"


def _version_in(file: Path) -> str:
    """Return the first version that is named in a file of CANN."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"(?i)version[^=\n]*=\s*\[?(?:[^\n\[\]:]*:)?\s*([\w.+-]+)", text)
    return found[1] if found else ""


def take_device(bench: Bench) -> Outcome:
    """Take the device and its physical id, use its context in a second thread, and call in one without a context."""
    bench.open()
    physical = bench.calls.runtime.physical_id(bench.device)
    context = bench.context()
    without: list[int] = []
    within: list[int] = []

    def other_thread() -> None:
        stream = ffi.new("aclrtStream *")
        without.append(bench.calls.code("aclrtCreateStream", stream, note="in a thread without a context"))
        within.append(bench.calls.code("aclrtSetCurrentContext", context))
        within.append(bench.calls.code("aclrtCreateStream", stream, note="in a second thread, with the context"))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    return outcome(
        without == [NO_CONTEXT] and within == [0, 0],
        f"physical id {physical}; a call without context {without}, with it {within}",
    )


def own_place(bench: Bench) -> Outcome:
    """Return the library's rank table entry for this device."""
    bench.open()
    try:
        found = endpoint_of(bench)
    except ParamInvalid as error:
        return outcome(False, f"the rank table would be wrong: {error}")
    lacks = [] if found.device_ip else ["no device_ip: RoCE needs one (hccn_tool -i N -ip -g, or /etc/hccn.conf)"]
    return outcome(not lacks, "; ".join(lacks) or "server, physical device id and address are there")
