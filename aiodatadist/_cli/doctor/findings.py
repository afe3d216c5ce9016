"""The checks of ``aiodatadist doctor``. Each yields findings and raises nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import aiodatadist
from aiodatadist._blocking import stand_ins
from aiodatadist._blocking.config import KEY_FILE
from aiodatadist._cli.doctor.finding import Finding, Mark
from aiodatadist._cli.doctor.networks import network_findings
from aiodatadist._cli.doctor.pools import sealing_findings
from aiodatadist._cli.doctor.tcp import tcp_findings
from aiodatadist._cli.kit.numbers import quantity
from aiodatadist._config.certificates import AUTHORITY, CERTIFICATE, Certificates, moment
from aiodatadist._config.certificates import KEY as TLS_KEY
from aiodatadist._config.policy import POLICY, Policy
from aiodatadist._config.secret_files import read_key
from aiodatadist._config.trust import KEYS, NETWORK_BYTES, NONE, VARIABLE, Key, TrustFolder, Untrusted, credential_of
from aiodatadist._config.user_key import HINT, key_path, user_key
from aiodatadist._context_caching.pools.extras import how_to_install
from aiodatadist._context_caching.pools.mooncake import store as mooncake_store
from aiodatadist._native.runtime import ACL_LIBRARIES, COMM_LIBRARIES, FUNCTIONS, Runtime, open_runtime
from aiodatadist._values.foreign import printable
from aiodatadist.errors import LLMException, ParamInvalid

USES = {
    **dict.fromkeys(("aclrtCreateNotify", "aclrtWaitAndResetNotify", "aclrtRecordNotify"), "EventLayerSynchronizer"),
    **dict.fromkeys(
        (
            "HcclBatchGet",
            "HcclBatchPut",
            "HcclCommBindMem",
            "HcclCommPrepare",
            "HcclCommInitClusterInfoMemConfig",
            "HcclRegisterGlobalMem",
        ),
        "every link",
    ),
    "HcclExchangeMemDesc": "link()",
    "aclrtStreamAbort": "cancelling",
}
"""The features that do not work if the libraries lack a function."""


def examine() -> list[Finding]:
    """Return all findings, the most important first."""
    return [finding for check in CHECKS for finding in check()]


# ---- the accelerator runtime ----


def runtime_findings() -> Iterator[Finding]:
    """Yield which runtime was chosen, why, and what it provides."""
    choice = os.environ.get("AIODATADIST_RUNTIME", "auto")
    try:
        runtime = open_runtime()
    except LLMException as error:
        yield Finding("runtime", f"none ({choice})", "fail", f"{error}{_half_of_cann()}")
        return
    yield _chosen(runtime, choice)
    yield Finding("libraries", ", ".join(runtime.libraries), "ok", f"acl API {runtime.version or 'of unknown version'}")
    yield functions(runtime)
    chip = f"{runtime.chip}, " if runtime.chip and not runtime.is_soft else ""
    yield Finding("devices", str(runtime.device_count), "ok", f"{chip}numbered from 0")


def _chosen(runtime: Runtime, choice: str) -> Finding:
    value = f"{runtime.name} (AIODATADIST_RUNTIME={choice})"
    if runtime.name == "ascend":
        return Finding("runtime", value, "ok", "the vendor's libraries load and show a device")
    strict = os.environ.get("SOFTNPU_STRICT")
    manner = f", as strict as {strict}" if strict else ""
    if choice == "soft":
        asked = "the software NPU was asked for: the CPU does the work, on one machine"
        return Finding("runtime", value, "ok", asked + manner)
    mark: Mark = "warn" if _half_of_cann() else "ok"
    return Finding(
        "runtime", value, mark, f"{_why_not_ascend()}, so the software NPU does the work, on one machine{manner}"
    )


def functions(runtime: Runtime) -> Finding:
    missing = runtime.missing_functions()
    value = f"{len(FUNCTIONS) - len(missing)} of {len(FUNCTIONS)}"
    if not missing:
        return Finding("functions", value, "ok", "all that aiodatadist declares")
    lost = sorted(USES[name] for name in missing if name in USES)
    without = (
        f", which {', '.join(dict.fromkeys(lost))} cannot do without" if lost else ", which aiodatadist can do without"
    )
    return Finding("functions", value, "warn", f"the libraries lack {', '.join(missing)}{without}; newer CANN has them")


def _why_not_ascend() -> str:
    """Return what the loader says about the vendor's libraries."""
    acl, hccl = _loadable(ACL_LIBRARIES), _loadable(COMM_LIBRARIES)
    if not acl:
        return f"neither {' nor '.join(ACL_LIBRARIES)} can be loaded"
    if not hccl:
        return f"{acl} loads, but HCCL does not: neither {' nor '.join(COMM_LIBRARIES)} can be loaded"
    return f"{acl} and {hccl} load but show no device"


def _half_of_cann() -> str:
    """Return a warning if there is ACL without HCCL, otherwise an empty string."""
    acl = _loadable(ACL_LIBRARIES)
    if not acl or _loadable(COMM_LIBRARIES):
        return ""
    return f"; {acl} loads, so ACL is installed, but without HCCL: install CANN's toolkit, or source its set_env.sh"


def _loadable(names: Iterable[str]) -> str:
    """Return the first library that loads, or an empty string."""
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    return ""


# ---- the machine ----


def _is_ascend() -> bool:
    """Return True if the vendor's runtime was chosen. Softnpu's requirements do not matter then."""
    try:
        return open_runtime().name == "ascend"
    except LLMException:
        return False


def shared_memory_findings() -> Iterator[Finding]:
    """Yield if memfds, softnpu's device memory, can be created, and if they are backed by huge pages."""
    if not _is_ascend():
        yield from _memfd_findings()
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("/dev/shm", "missing", "warn", f"{error.strerror}: not needed here, but by torch and others")
    else:
        free, size = quantity(shm.f_bavail * shm.f_frsize), quantity(shm.f_blocks * shm.f_frsize)
        yield Finding("/dev/shm", f"{free} of {size} free", "ok", "not used by aiodatadist; torch and others do")


def _memfd_findings() -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("aiodatadist-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (OSError, AttributeError) as error:
        yield Finding("memfd", "no", "fail", f"the software NPU cannot share memory between processes: {error}")
    else:
        yield Finding("memfd", "yes", "ok", "the software NPU's device memory; not limited by /dev/shm")
    setting = chosen_word("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if setting in ("always", "within_size", "advise"):
        yield Finding("shm huge pages", setting, "ok", "large allocations of the software NPU get 2 MiB pages")
    else:
        yield Finding(
            "shm huge pages",
            setting or "unknown",
            "warn",
            "copies of the software NPU are slower; as root: "
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )


def limit_findings() -> Iterator[Finding]:
    """Yield the limits of this process."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < 1024
    meaning = "each link needs a few" + (f"; raise it with ulimit -n (up to {_limit(most)})" if few else "")
    yield Finding("open files", _limit(files), "warn" if few else "ok", meaning)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = "unlimited" if locked == resource.RLIM_INFINITY else quantity(locked)
    if not _is_ascend():
        meaning = "the software NPU locks none; RDMA between machines needs it unlimited"
        yield Finding("locked memory", size, "ok", meaning)
    elif locked == resource.RLIM_INFINITY:
        yield Finding("locked memory", size, "ok", "registering memory with HCCL pins it")
    else:
        yield Finding("locked memory", size, "warn", "registering memory with HCCL pins it: ulimit -l unlimited")


def kernel_findings() -> Iterator[Finding]:
    """Yield if processes may access each other's memory."""
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except OSError:
        yield Finding("ptrace scope", "no Yama", "ok", "not needed; engines that copy across processes (CMA) work")
        return
    meaning = (
        "engines that copy across processes (CMA) work" if scope == "0" else "CMA engines such as UCX's do not work"
    )
    yield Finding("ptrace scope", scope, "ok", f"not needed by aiodatadist; {meaning}")


def cpu_findings() -> Iterator[Finding]:
    """Yield how many cores this process may use, and how much memory there is."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    value = f"{usable} of {present}"
    if usable == 1:
        yield Finding("CPUs", value, "warn", "copies and computing take turns: transfers cannot be hidden behind work")
    else:
        yield Finding("CPUs", value, "ok", "copies run beside computing")
    total, available = _memory()
    scarce = available < 512 << 20
    meaning = "of the host" if _is_ascend() else "device memory of the software NPU comes out of this"
    meaning = "the demo needs about 512 MiB" if scarce else meaning
    yield Finding("memory", f"{quantity(available)} of {quantity(total)} free", "warn" if scarce else "ok", meaning)


def trust_findings() -> Iterator[Finding]:
    """Yield which key proves a cluster that is given none, and who may link to it. No key is created, or shown."""
    credential = credential_of(None, None)
    try:
        if isinstance(credential, Untrusted):
            meaning = "processes of any user of this machine can link; without the variable, only this user's"
            yield Finding("trust", f"{VARIABLE}={NONE}", "warn", meaning)
        elif isinstance(credential, TrustFolder):
            yield from _of_folder(credential)
        else:
            yield _of_this_user(key_path(os.environ))
    except ParamInvalid as error:
        if isinstance(credential, TrustFolder):
            meaning = f"clusters without their own key do not start: {error}"
            yield Finding("trust", f"{VARIABLE}={os.environ[VARIABLE]}", "fail", meaning)
        else:
            yield Finding("trust", "no key", "warn", f"links fail without one, or trust or auth_key: {error}")
    if os.environ.get(KEY_FILE):
        yield _of_key_file(Path(os.environ[KEY_FILE]))


def _of_folder(credential: TrustFolder) -> Iterator[Finding]:
    """Yield the findings for a folder of trust and its policy. Raises ParamInvalid if it cannot be used."""
    proof, policy = credential.proof(), credential.policy()
    if isinstance(proof, Certificates):
        yield _of_certificates(proof, credential.path, time.time())
    else:
        yield _of_keys(proof, credential.path)
    if policy is not None:
        keys = None if isinstance(proof, Certificates) else {key.name for key in proof}
        yield _of_policy(policy, credential.path / POLICY, keys)


def _of_keys(proof: Iterable[Key], folder: Path) -> Finding:
    first, *others = (key.name for key in proof)
    accepted = f"; {', '.join(others)} is accepted, too" if others else ""
    value = f"key {first} of {folder / KEYS} ({_mode(folder / KEYS)})"
    return Finding("trust", value, "ok", f"from {VARIABLE}; clusters with the same key link, on any machine{accepted}")


def _of_policy(policy: Policy, path: Path, keys: Collection[str] | None) -> Finding:
    """Return the finding for a policy. It warns of rules that fit no peer.

    Args:
        keys: the names of the keys that peers may prove; None if they prove certificates.
    """
    count, named = len(policy.clusters), [rule.match.key for rule in policy.clusters]
    meaning = f"{count} rule{' says' if count == 1 else 's say'} what peers may do"
    if not policy.private_memory:
        meaning += "; it opens no ordinary memory of a process to peers on softnpu"
    others = sum((name is None) is (keys is not None) for name in named)
    if others:
        kind = "keys" if keys is None else "certificates"
        meaning += f"; {others} {'is' if others == 1 else 'are'} for {kind}, which this folder does not prove"
    absent = [printable(name) for name in named if name is not None and keys is not None and name not in keys]
    if absent:
        meaning += f"; {KEYS} has no key {absent[0]}, so its rule fits no peer"
    return Finding("policy", str(path), "warn" if others or absent else "ok", meaning)


def _of_key_file(path: Path) -> Finding:
    """Return the finding for the key file of ``aiodatadist.blocking``, which nothing else reads."""
    name = "auth key file"
    try:
        size = len(read_key(path, f"the file of {KEY_FILE}"))
    except ParamInvalid as error:
        return Finding(name, f"{KEY_FILE}={path}", "fail", f"clusters of aiodatadist.blocking do not start: {error}")
    meaning = f"from {KEY_FILE}: the key of clusters of aiodatadist.blocking, instead of the one above"
    if size < NETWORK_BYTES:
        meaning += f"; it has {size} bytes, and must have at least {NETWORK_BYTES} beyond loopback addresses"
    return Finding(name, f"{path} ({_mode(path)})", "ok" if size >= NETWORK_BYTES else "warn", meaning)


def _of_certificates(certificates: Certificates, folder: Path, now: float) -> Finding:
    """Return the finding for the certificate in a folder of trust. It warns if a tenth of the time or less is left."""
    clusters = "no cluster" if certificates.names is None else certificates.names.clusters()
    left, lifetime = certificates.expires - now, certificates.expires - certificates.begins
    key = folder / TLS_KEY
    value = f"certificate {printable(certificates.name)} of {folder / CERTIFICATE} ({TLS_KEY} has {_mode(key)})"
    meaning = (
        f"from {VARIABLE}; for {printable(clusters)}; it expires on {moment(certificates.expires)}; clusters with "
        f"certificates of an authority in {AUTHORITY} link, on any machine"
    )
    if left > lifetime / 10:
        return Finding("trust", value, "ok", meaning)
    return Finding(
        "trust",
        value,
        "warn",
        f"{meaning}; it should have been replaced by now: no new link is made once it has expired",
    )


def _of_this_user(path: Path) -> Finding:
    """Return the finding for this user's own key. Raises ParamInvalid if it cannot be used."""
    meaning = "only processes of this user link, on loopback addresses; other machines need trust or auth_key"
    if os.path.lexists(path):
        user_key(path)
        return Finding("trust", f"this user's key {path} ({_mode(path)})", "ok", meaning)
    above = next(folder for folder in path.parents if folder.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        raise ParamInvalid(f"this user's key cannot be created as {str(path)!r}: {above} is not writable", hint=HINT)
    return Finding("trust", f"this user's key {path}, which the first cluster creates", "ok", meaning)


def _mode(path: Path) -> str:
    return f"mode {stat.S_IMODE(path.stat().st_mode):04o}"


# ---- the software ----


def version_findings() -> Iterator[Finding]:
    """Yield the versions of Python and of the packages that matter."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("Python", platform.python_version(), "ok", f"{sys.implementation.name} on {system}")
    installed = package("aiodatadist", missing="not installed: runs from a checkout", mark="ok")
    yield Finding("aiodatadist", aiodatadist.__version__, "ok", installed.meaning)
    for name in ("anyio", "cffi", "pydantic"):
        yield package(name, missing=f"pip install {name}", mark="fail")
    yield package("numpy", missing="CacheManager.arrays and the demo need it: pip install numpy", mark="warn")
    yield package("uvloop", missing=f"optional: a faster event loop; {how_to_install('uvloop')}", mark="ok")
    yield package("torch-npu", missing="optional: tensors on an NPU", mark="ok")


def vendor_findings() -> Iterator[Finding]:
    """Yield whose ``llm_datadist`` and ``hixl`` a script gets that imports them. Neither is imported."""
    for name in ("llm_datadist", "hixl"):
        yield _package_of_the_vendor(name)


def _package_of_the_vendor(name: str) -> Finding:
    under = "under 'python -m aiodatadist.blocking run' a script gets ours"
    if stand_ins.is_ours(name):
        return Finding(name, "ours", "ok", "this process runs under 'python -m aiodatadist.blocking run'")
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # half of a package
        spec = None
    if spec is None:
        return Finding(name, "not installed", "ok", under)
    where = printable(spec.origin or "without a file")
    return Finding(name, "the vendor's", "ok", f"{where}: a script that is run by itself gets it; {under}")


def engine_findings() -> Iterator[Finding]:
    """Yield which pools of ContextCaching besides the embedded one can be opened here. No server is contacted."""
    pools = "redis:// and rediss:// pools"
    missing = f"optional: {pools}; {how_to_install('redis')}"
    yield package("redis", "redis-py", found=f"{pools}, with a server to talk to", missing=missing, mark="ok")
    yield _mooncake()
    if _is_there("redis", "mooncake"):
        yield package("xxhash", missing="the engine's pools do not work without it: pip install xxhash", mark="warn")
    else:
        yield package("xxhash", missing="optional: comes with the extra of an engine", mark="ok")


def _mooncake() -> Finding:
    if not _is_there("mooncake"):
        missing = f"optional: mooncake:// pools; {how_to_install('mooncake')}"
        return Finding("mooncake", "not installed", "ok", missing)
    try:
        mooncake_store.load()
    except ImportError as error:
        return Finding("mooncake", "does not load", "warn", str(error))
    return Finding("mooncake", "loads", "ok", "mooncake:// pools, with a master to talk to")


def _is_there(*modules: str) -> bool:
    return any(find_spec(module) is not None for module in modules)


def package(name: str, shown: str = "", *, found: str = "installed", missing: str, mark: Mark) -> Finding:
    try:
        return Finding(shown or name, metadata.version(name), "ok", found)
    except metadata.PackageNotFoundError:
        return Finding(shown or name, "not installed", mark, missing)


# ---- helpers ----


def chosen_word(path: str) -> str:
    """Return the word in brackets in a sysfs file such as ``always [madvise] never``, or an empty string without the file."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def _memory() -> tuple[int, int]:
    """Return the total bytes of memory, and those available without swapping."""
    rows = dict(row.split(":") for row in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    total, available = (int(rows[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return total, available


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    runtime_findings,
    shared_memory_findings,
    limit_findings,
    kernel_findings,
    cpu_findings,
    network_findings,
    tcp_findings,
    trust_findings,
    sealing_findings,
    version_findings,
    vendor_findings,
    engine_findings,
)
