"""On which devices the tests run, from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DEVICES = "AIODATADIST_DEVICES"
RESOURCES = "AIODATADIST_LOCAL_COMM_RES"


@dataclass(frozen=True)
class Place:
    """A device of this machine, and the address under which the other end reaches this machine.

    Attributes:
        resource: a file with ``local_comm_res`` for the device; if None, the library makes its own.
    """

    device: int
    host: str = "127.0.0.1"
    resource: Path | None = None

    @property
    def options(self) -> dict[str, object]:
        """Options of an LLMConfig for a cluster here."""
        found: dict[str, object] = {"device_id": self.device, "listen_ip_info": f"{self.host}:0"}
        if self.resource is not None:
            found["local_comm_res"] = self.resource.read_text(encoding="utf-8")
        return found


def places(host: str = "127.0.0.1") -> list[Place]:
    """List the devices of AIODATADIST_DEVICES, ``0,1`` unless set, with the files of AIODATADIST_LOCAL_COMM_RES if given.

    Raises:
        ValueError: if a device is no number, is named twice, or has no file although others have.
    """
    devices = [int(word) for word in os.environ.get(DEVICES, "0,1").split(",")]
    if len(set(devices)) < len(devices):
        raise ValueError(f"{DEVICES} is {devices}: HCCL links different devices only")
    files = [Path(word) for word in os.environ.get(RESOURCES, "").split(",") if word]
    if files and len(files) != len(devices):
        raise ValueError(f"{RESOURCES} names {len(files)} files: {DEVICES} has {len(devices)} devices, one file each")
    given: list[Path | None] = [*files] if files else [None] * len(devices)
    return [Place(device, host, file) for device, file in zip(devices, given, strict=True)]
