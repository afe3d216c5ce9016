"""HIXL for code that does not await: the names, parameters and statuses of the package ``hixl``.

The engine is that of :mod:`aiodatadist.hixl`, on an event loop in a thread that the first ``initialize`` starts and the last
``finalize`` ends. ``python -m aiodatadist.blocking run script.py`` runs a script that imports ``hixl``, unchanged.

Each call returns a status, and raises nothing for what happens while it runs. The log has the reason of a status that is
not SUCCESS.
"""

from typing import Final

from aiodatadist._blocking.hixl.engine import Hixl, get_capability
from aiodatadist._blocking.hixl.values import FeatureType, GetTransferStatusArgs, TransferArgs, TransferResult
from aiodatadist._blocking.last_resort import install as _show_warnings
from aiodatadist._hixl import options as _options
from aiodatadist._hixl.statuses import Status as _Status
from aiodatadist._hixl.values import (
    AsyncConnectStatus,
    MemDesc,
    MemType,
    NotifyDesc,
    TransferOp,
    TransferOpDesc,
    TransferStatus,
)

_show_warnings()

SUCCESS: Final = int(_Status.SUCCESS)
PARAM_INVALID: Final = int(_Status.PARAM_INVALID)
TIMEOUT: Final = int(_Status.TIMEOUT)
NOT_CONNECTED: Final = int(_Status.NOT_CONNECTED)
ALREADY_CONNECTED: Final = int(_Status.ALREADY_CONNECTED)
NOTIFY_FAILED: Final = int(_Status.NOTIFY_FAILED)
UNSUPPORTED: Final = int(_Status.UNSUPPORTED)
RESOURCE_EXHAUSTED: Final = int(_Status.RESOURCE_EXHAUSTED)
FAILED: Final = int(_Status.FAILED)

OPTION_ENABLE_USE_FABRIC_MEM: Final = _options.FABRIC
OPTION_RDMA_TRAFFIC_CLASS: Final = _options.TRAFFIC_CLASS
OPTION_RDMA_SERVICE_LEVEL: Final = _options.SERVICE_LEVEL
OPTION_BUFFER_POOL: Final = _options.BUFFER_POOL
OPTION_GLOBAL_RESOURCE_CONFIG: Final = _options.RESOURCES
OPTION_AUTO_CONNECT: Final = _options.AUTO_CONNECT
OPTION_LOCAL_COMM_RES: Final = _options.LOCAL_COMM_RES

FEATURE_SUPPORTED: Final = 1
FEATURE_NOT_SUPPORTED: Final = 0

MEM_DEVICE: Final = MemType.MEM_DEVICE
MEM_HOST: Final = MemType.MEM_HOST
READ: Final = TransferOp.READ
WRITE: Final = TransferOp.WRITE
NOT_CONNECT: Final = AsyncConnectStatus.NOT_CONNECT
CONNECT_PENDING: Final = AsyncConnectStatus.CONNECT_PENDING
CONNECTING: Final = AsyncConnectStatus.CONNECTING
CONNECTED: Final = AsyncConnectStatus.CONNECTED
CONNECT_FAILED: Final = AsyncConnectStatus.CONNECT_FAILED
DISCONNECT_PENDING: Final = AsyncConnectStatus.DISCONNECT_PENDING
DISCONNECTING: Final = AsyncConnectStatus.DISCONNECTING
AUTO_CONNECT: Final = FeatureType.AUTO_CONNECT
CLIENT_SERVER_COMM: Final = FeatureType.CLIENT_SERVER_COMM

__all__ = [
    "ALREADY_CONNECTED",
    "AUTO_CONNECT",
    "CLIENT_SERVER_COMM",
    "CONNECTED",
    "CONNECTING",
    "CONNECT_FAILED",
    "CONNECT_PENDING",
    "DISCONNECTING",
    "DISCONNECT_PENDING",
    "FAILED",
    "FEATURE_NOT_SUPPORTED",
    "FEATURE_SUPPORTED",
    "MEM_DEVICE",
    "MEM_HOST",
    "NOTIFY_FAILED",
    "NOT_CONNECT",
    "NOT_CONNECTED",
    "OPTION_AUTO_CONNECT",
    "OPTION_BUFFER_POOL",
    "OPTION_ENABLE_USE_FABRIC_MEM",
    "OPTION_GLOBAL_RESOURCE_CONFIG",
    "OPTION_LOCAL_COMM_RES",
    "OPTION_RDMA_SERVICE_LEVEL",
    "OPTION_RDMA_TRAFFIC_CLASS",
    "PARAM_INVALID",
    "READ",
    "RESOURCE_EXHAUSTED",
    "SUCCESS",
    "TIMEOUT",
    "UNSUPPORTED",
    "WRITE",
    "AsyncConnectStatus",
    "FeatureType",
    "GetTransferStatusArgs",
    "Hixl",
    "MemDesc",
    "MemType",
    "NotifyDesc",
    "TransferArgs",
    "TransferOp",
    "TransferOpDesc",
    "TransferResult",
    "TransferStatus",
    "get_capability",
]
