"""The devices of a command, and how HCCL finds them: the same options for ``demo`` and the benchmarks."""

from __future__ import annotations

import argparse
import ipaddress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from aiodatadist._cli.kit.errors import wrong_input


class Place(BaseModel):
    """The device of one end, and the given parts of its rank table.

    Attributes:
        device: number of the device in this process.
        device_ip: address of its network card; looked up if empty.
        resource: its ``local_comm_res``; generated if empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: int = 0
    device_ip: str = ""
    resource: str = ""


def add_place_arguments(parser: argparse._ActionsContainer, count: int = 2) -> None:
    """Add ``--device``, ``--device-ip`` and ``--local-comm-res``, each for ``count`` devices."""
    first = ",".join(map(str, range(count)))
    each = "" if count == 1 else ", for each device"
    parser.add_argument("--device", metavar=_of("N", count), help=f"NPUs, or softnpu's devices ({first})")
    parser.add_argument(
        "--device-ip", metavar=_of("IP", count), help=f"address of the NPU's network card{each} (found: docs/npu.md)"
    )
    parser.add_argument(
        "--local-comm-res",
        metavar=_of("FILE", count),
        help=f"the NPU in a rank table, as JSON{each} (made: docs/npu.md)",
    )


def first_place(arguments: argparse.Namespace) -> list[str]:
    """Return the first of these devices, as arguments of a command for one device."""
    given: list[str] = []
    for name in ("device", "device_ip", "local_comm_res"):
        text: str | None = getattr(arguments, name)
        if text is not None:
            given += [_flag(name), text.partition(",")[0]]
    return given


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _of(word: str, count: int) -> str:
    return ",".join([word] * count)


def places(arguments: argparse.Namespace, count: int = 2) -> list[Place]:
    """Return the devices that the arguments name.

    Raises:
        CommandError: if an argument is wrong, or a file cannot be read.
    """
    devices = [_device(word) for word in _words(arguments, "device", count)]
    addresses = [_address(word) for word in _words(arguments, "device_ip", count)]
    resources = [_contents(word) for word in _words(arguments, "local_comm_res", count)]
    if any(addresses) and any(resources):
        raise wrong_input("--device-ip and --local-comm-res say the same: choose one")
    return [
        Place(device=device, device_ip=address, resource=resource)
        for device, address, resource in zip(devices, addresses, resources, strict=True)
    ]


def _words(arguments: argparse.Namespace, name: str, count: int) -> list[str]:
    text: str | None = getattr(arguments, name)
    if text is None:
        return [str(i) if name == "device" else "" for i in range(count)]
    words = text.split(",")
    if len(words) != count:
        wanted = "one" if count == 1 else f"{count}, with commas between them"
        raise wrong_input(f"{_flag(name)} {text} names {len(words)}: must name {wanted}")
    return words


def _device(word: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise wrong_input(f"--device: {word!r} is not the number of a device")
    return int(word)


def _address(word: str) -> str:
    try:
        return word and str(ipaddress.ip_address(word))
    except ValueError:
        raise wrong_input(f"--device-ip: {word!r} is not an IP address") from None


def _contents(name: str) -> str:
    try:
        return name and Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise wrong_input(f"--local-comm-res: cannot read {name}: {error}") from error


async def place_options(place: Place) -> dict[str, Any]:
    """Return the options of an ``LLMConfig`` for a cluster on this device.

    With only an address, the device is asked for the rest.

    Raises:
        LLMException: if the device cannot be opened, or does not know its super pod.
    """
    options: dict[str, Any] = {"device_id": place.device}
    if place.resource:
        options["local_comm_res"] = place.resource
    elif place.device_ip:
        options["local_comm_res"] = await _resource(place)
    return options


async def _resource(place: Place) -> str:
    # Here and not at the top: these open the native libraries, and the parent of the demo needs none.
    from aiodatadist._concurrency.blocking_calls import in_thread  # noqa: PLC0415
    from aiodatadist._device import Device  # noqa: PLC0415
    from aiodatadist._transport.local_device import describe, resource_of  # noqa: PLC0415

    async with await Device.open(place.device) as device:
        found = await in_thread(describe, device.runtime, device.index)
    return resource_of({**found, "device_ip": place.device_ip})
