"""A device in a rank table, as the library describes it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from aiodatadist._transport.contract import Endpoint
from aiodatadist._transport.local_device import describe

if TYPE_CHECKING:
    from aiodatadist._cli.probe.bench import Bench


def endpoint_of(bench: Bench) -> Endpoint:
    """Return the endpoint of this process's device.

    Raises:
        ParamInvalid: if the ``local_comm_res`` that was given is wrong, or another device's.
    """
    runtime = bench.calls.runtime
    found = describe(runtime, bench.device, str(bench.options.get("resource", "")))
    return Endpoint("hccl", runtime.name, "", process=os.getpid(), streams=0, **found)
