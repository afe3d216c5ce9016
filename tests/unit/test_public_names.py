"""The public names, in a list: one that is removed or renamed fails, and so does one that is new and not listed here."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import aiodatadist
from aiodatadist import errors

PUBLIC: dict[str, str] = {
    "aiodatadist": """
        __version__ AuthError AwaitableLayerSynchronizer BlockLease BlockParts BlockPool BlocksCacheKey Cache CacheDesc
        CacheKey CacheKeyByIdAndIndex CacheManager CacheNotFound CacheTask DataCorrupted DataType DeviceError
        EventLayerSynchronizer FeatureNotEnabled ForkError IncompatiblePeer InternalError LayerDone
        LayerReceiver LayerSynchronizer LeaseEnd LeaseMismatch LeaseTicket LinkChange LinkChanges LinkClosed LinkError
        LinkPhase LinkResults LinkStatistics LinkTimeout LLMClusterInfo LLMConfig LLMDataDist
        LLMException LLMRole LLMStatusCode MemInfo Memtype Notification NotLinked OutOfMemory ParamInvalid
        Peer PeerLost Placement PoolConfig PoolUsage ProtocolError PushType Quotas RegisterMemStatus RelinkPolicy
        RuntimeUnavailable Statistics Status StuckError TakenBlocks TorchNpuLayerSynchronizer TransferConfig TransferError
        TransferPriority TransferReport TransferTimeout TransferWithCacheKeyConfig empty new_lease_name prompt_digest
        torch_empty
    """,
    "aiodatadist.errors": """
        AuthError CacheNotFound DataCorrupted DeviceError explained FeatureNotEnabled ForkError IncompatiblePeer
        InternalError LeaseMismatch LinkClosed LinkError LinkTimeout LLMException LLMStatusCode NotLinked OutOfMemory
        ParamInvalid PeerLost ProtocolError RuntimeUnavailable StuckError TransferError TransferTimeout
    """,
    "aiodatadist.testing": """
        Bandwidth BlockLedger BlockStamp ChaosProxy Cluster cluster_info Corrupt Drop inside Latency LimitData
        linked_pair MisplacedError open_cluster pattern Reorder Repeat ResetPeer Slicer SlowClose soft_counters
        soft_fault soft_faults_cleared soft_hold SoftHold stamp Timeout Toxic verify
    """,
    "aiodatadist.testing.pools": """
        content fetch FullPoolContract MIB new_key PATIENCE PoolContract soon store
    """,
    "aiodatadist.hixl": """
        AsyncConnectStatus Hixl MemDesc MemType NotifyDesc Status status_of TransferOp TransferOpDesc TransferStatus
    """,
    "aiodatadist.blocking.hixl": """
        ALREADY_CONNECTED AsyncConnectStatus AUTO_CONNECT CLIENT_SERVER_COMM CONNECT_FAILED CONNECT_PENDING CONNECTED
        CONNECTING DISCONNECT_PENDING DISCONNECTING FAILED FEATURE_NOT_SUPPORTED FEATURE_SUPPORTED FeatureType
        get_capability GetTransferStatusArgs Hixl MEM_DEVICE MEM_HOST MemDesc MemType NOT_CONNECT NOT_CONNECTED
        NOTIFY_FAILED NotifyDesc OPTION_AUTO_CONNECT OPTION_BUFFER_POOL OPTION_ENABLE_USE_FABRIC_MEM
        OPTION_GLOBAL_RESOURCE_CONFIG OPTION_LOCAL_COMM_RES OPTION_RDMA_SERVICE_LEVEL OPTION_RDMA_TRAFFIC_CLASS
        PARAM_INVALID READ RESOURCE_EXHAUSTED SUCCESS TIMEOUT TransferArgs TransferOp TransferOpDesc TransferResult
        TransferStatus UNSUPPORTED WRITE
    """,
    "aiodatadist.legacy": """
        CapacityState KvCache KvCacheManager LLMConfig LLMDataDist LLMModel LLMReq ModelConfig ModelRunner
        Tensor TensorDesc
    """,
    "aiodatadist.blocking": """
        BlockLease BlocksCacheKey Cache CacheDesc CacheKey CacheKeyByIdAndIndex CacheManager CacheTask CapacityState
        DataType Handle HandleState KvCache KvCacheManager LayerReceiver LayersHandle LayerSynchronizer
        LeaseEnd LeaseTicket LLMClusterInfo LLMConfig LlmConfig LLMDataDist LLMException LLMModel LLMReq LLMRole LLMStatusCode
        MemInfo Memtype ModelConfig ModelRunner Placement PushType QueueFull RegisterMemStatus Stats Status
        Tensor TensorDesc TransferConfig TransferPriority TransferWithCacheKeyConfig
    """,
    "aiodatadist.telemetry": "CacheFigures Call Ended Figures FlowFigures Observer",
    "aiodatadist.telemetry.otel": "SpanObserver",
    "aiodatadist.telemetry.prometheus": "Cache Cluster MetricsCollector",
    "aiodatadist.context_caching": """
        CcCacheConfig CcConfig CcConfig_v1 CcResult CcStatus ContextCache EmsErrorCode
        EmsException EmsForkError EmsInternalError EmsInvalidArgument EmsIoError EmsTimeout HealthGate HealthRules
        KvBufferWrapper KVCacheType KVPool LayerGroup MemoryPool open_pool PrimaryKey Statistics
        Transfer
    """,
    "aiodatadist.context_caching.ems": """
        CcCacheConfig CcConfig CcConfig_v1 CcFuture CcKvOption CcResult CcStatus ContextCache_v1
        ContextCaching Ems EmsConfig EmsErrorCode EmsException EmsForkError EmsInternalError EmsInvalidArgument
        EmsIoError EmsTimeout KvBufferWrapper KVCacheType LayerGroup PrimaryKey
    """,
}
"""Names by module. A name that leaves this list leaves a user's program: it needs a line in CHANGELOG.md."""


def names_of(module: ModuleType) -> set[str]:
    """Return the names in ``__all__``, or else those without an underscore that the file itself defines."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    return {name for node in tree.body for name in defined_by(node) if not name.startswith("_")}


def defined_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_those_of_the_list(name: str) -> None:
    listed, found = set(PUBLIC[name].split()), names_of(importlib.import_module(name))
    assert listed - found == set(), "removed or renamed: callers import these"
    assert found - listed == set(), "new: add it to PUBLIC, or begin it with an underscore"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there(name: str) -> None:
    module = importlib.import_module(name)
    assert [each for each in PUBLIC[name].split() if not hasattr(module, each)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_a_list_of_exports_says_no_name_twice(name: str) -> None:
    exported = list(getattr(importlib.import_module(name), "__all__", ()))
    assert len(set(exported)) == len(exported)


def test_what_is_exported_is_what_is_there() -> None:
    public = {
        name
        for name, value in vars(aiodatadist).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(aiodatadist.__all__) == public | {"__version__"}


@pytest.mark.parametrize("module", ["_device", "_transport", "testing", "_values.descriptors"])
def test_every_room_has_what_it_exports(module: str) -> None:
    room = importlib.import_module(f"aiodatadist.{module}")
    assert [name for name in room.__all__ if not hasattr(room, name)] == []


def test_every_exception_is_exported() -> None:
    kinds = {n for n, k in vars(errors).items() if isinstance(k, type) and issubclass(k, BaseException)}
    assert kinds <= set(aiodatadist.__all__)


def test_typed_marker_is_there() -> None:
    assert (Path(aiodatadist.__file__).parent / "py.typed").is_file()
