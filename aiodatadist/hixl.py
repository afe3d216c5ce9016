"""HIXL's interface, awaitable: byte ranges between the registered memory of two engines, by address.

``Hixl`` is an engine over the same links, channels and streams as :class:`aiodatadist.LLMDataDist`::

    async with Hixl("10.0.0.7:26000") as engine:
        await engine.register_mem(MemDesc(address, nbytes), MemType.MEM_DEVICE)
        await engine.connect("10.0.0.8:26000")
        request = engine.transfer("10.0.0.8:26000", TransferOp.READ, [TransferOpDesc(address, remote, nbytes)])
        report = await request

A transfer that was cancelled, has run out of time or was ended by ``disconnect`` writes no byte after it has ended.
:mod:`aiodatadist.blocking.hixl` is the same for code that does not await, with HIXL's statuses as results.
"""

from aiodatadist._hixl.engine import Hixl
from aiodatadist._hixl.statuses import Status, status_of
from aiodatadist._hixl.values import (
    AsyncConnectStatus,
    MemDesc,
    MemType,
    NotifyDesc,
    TransferOp,
    TransferOpDesc,
    TransferStatus,
)

__all__ = [
    "AsyncConnectStatus",
    "Hixl",
    "MemDesc",
    "MemType",
    "NotifyDesc",
    "Status",
    "TransferOp",
    "TransferOpDesc",
    "TransferStatus",
    "status_of",
]
