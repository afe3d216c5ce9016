"""The description of this process's device in a rank table: from ``local_comm_res``, or as found on the machine."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiodatadist._transport.link_kind import A3
from aiodatadist.errors import ParamInvalid

if TYPE_CHECKING:
    from aiodatadist._native.runtime import Runtime

logger = logging.getLogger(__name__)

MAX_VALUE: Final = 127
"""The longest id or address in a rank table, in characters. The limit is ours, far above any real one."""
VERSIONS: Final = ("1.0", "1.2")
GENERATED: Final = "1.3"
"""The version with which upstream's connector asks for a generated description. It may list endpoints."""
HCCN_CONF: Final = Path("/etc/hccn.conf")
"""The file with the addresses of NPUs' network cards, ``address_N=ADDRESS`` by physical id, on the host."""
HCCN_TOOL: Final = "/usr/local/Ascend/driver/tools/hccn_tool"
"""The path at which the driver installs it, which is seldom on PATH."""
HCCN_TOOL_TIMEOUT: Final = 5.0
"""Seconds for ``hccn_tool``, which takes some hundred milliseconds."""

_ANY_ADDRESS = ("192.0.2.1", 9)  # an address for documentation (RFC 5737): no packet is sent there


# ---- what is given ----


def parse_resource(resource: str) -> dict[str, str]:
    """Return the only device of a ``local_comm_res`` of version 1.0 or 1.2, as fields of :class:`Endpoint`.

    Raises:
        ParamInvalid: if it does not describe exactly one device; the message names the place, the value and the rule.
    """
    try:
        table = json.loads(resource)
    except (ValueError, RecursionError) as error:
        raise ParamInvalid(f"local_comm_res is not JSON: {error}") from error
    table = _object(table, "local_comm_res")
    version = _text(table, "version", "local_comm_res", "1.0")
    if version not in VERSIONS:
        raise ParamInvalid(f"local_comm_res.version is {version!r}: must be 1.0 (A2) or 1.2 (A3)")
    status = _text(table, "status", "local_comm_res", "completed")
    if status != "completed":
        raise ParamInvalid(f"local_comm_res.status is {status!r}: must be completed")
    server, where = _only(table, "server_list", "local_comm_res")
    device, at = _only(server, "device", where)
    found = {
        "server_id": _text(server, "server_id", where),
        "host_ip": _address(server, "host_ip", where),
        "device_id": _number(device, "device_id", at, 0, 2**31 - 1),
        "device_ip": _address(device, "device_ip", at),
        "backup_device_ip": _address(device, "backup_device_ip", at),
        "device_port": _number(device, "device_port", at, 1, 65535, ""),
        "super_device_id": _text(device, "super_device_id", at, ""),
        "super_pod_id": "",
    }
    if "super_pod_list" in table:
        pod, place = _only(table, "super_pod_list", "local_comm_res")
        found["super_pod_id"] = _text(pod, "super_pod_id", place)
    lacks = [name for name in ("super_pod_id", "super_device_id") if not found[name]]
    if version == "1.2" and lacks:
        raise ParamInvalid(f"local_comm_res has no {lacks[0]}: version 1.2 requires it")
    return found


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ParamInvalid(f"{where} is {_shown(value)}: must be an object")
    return value


def _only(table: dict[str, Any], name: str, where: str) -> tuple[dict[str, Any], str]:
    """Return the only element of a list, and its place."""
    values = table.get(name)
    if not isinstance(values, list) or len(values) != 1:
        has = f"has {len(values)} elements" if isinstance(values, list) else f"is {_shown(values)}"
        raise ParamInvalid(f"{where}.{name} {has}: must be a list of one, because it describes this device alone")
    at = f"{where}.{name}[0]"
    return _object(values[0], at), at


def _text(table: dict[str, Any], name: str, where: str, default: str | None = None) -> str:
    value = table.get(name, default)
    if value is None and name not in table:
        raise ParamInvalid(f"{where} has no {name}")
    is_plain = isinstance(value, (str, int)) and not isinstance(value, bool)
    if not is_plain or len(str(value)) > MAX_VALUE:
        raise ParamInvalid(f"{where}.{name} is {_shown(value)}: must be text of at most {MAX_VALUE} characters")
    return str(value)


def _number(table: dict[str, Any], name: str, where: str, least: int, most: int, default: str | None = None) -> str:
    text = _text(table, name, where, default)
    if text == default:
        return text
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise ParamInvalid(f"{where}.{name} is {_shown(text)}: must be a number from {least} to {most}")
    return text


def _address(table: dict[str, Any], name: str, where: str) -> str:
    text = _text(table, name, where, "")
    if text:
        try:
            ipaddress.ip_address(text)
        except ValueError:
            raise ParamInvalid(f"{where}.{name} is {_shown(text)}: must be an IP address") from None
    return text


def _shown(value: Any) -> str:
    return repr(value)[:MAX_VALUE]


def check_device(found: dict[str, str], device: int, physical: int | None, *, has_pods: bool) -> None:
    """Check that a given description is this device's.

    Args:
        physical: the physical id that the runtime reports; None if it reports none.
        has_pods: True if the chip is an A3's.

    Raises:
        ParamInvalid: if it is another device's, which HCCL would find at the first link; or if it lacks the super pod,
            without which HCCL treats all servers as one.
    """
    if physical not in {None, int(found["device_id"])}:
        raise ParamInvalid(
            f"local_comm_res describes device {found['device_id']}, but device_id {device} is the physical device {physical}",
            hint="device_id in local_comm_res is the physical id, as npu-smi info shows it",
        )
    if has_pods and not found["super_pod_id"]:
        raise ParamInvalid(
            "local_comm_res has no super_pod_list: HCCL would treat all servers as one super pod",
            hint="on an A3 use version 1.2 with super_pod_list and super_device_id, or omit local_comm_res to generate it",
        )


def asks_to_generate(resource: str) -> bool:
    """Return True if a ``local_comm_res`` is of version 1.3: the manual recommends ``{"version": "1.3"}`` for every chip."""
    try:
        table = json.loads(resource)
    except (ValueError, RecursionError):
        return False
    return isinstance(table, dict) and table.get("version") == GENERATED


# ---- what is found ----


def describe(runtime: Runtime, index: int, resource: str | None = None) -> dict[str, str]:
    """Return a device's fields of :class:`Endpoint`, from ``resource``, or as found. Blocks while ``hccn_tool`` runs.

    A device that is found names its server by the address of its default route, or by its host name. Without an address
    of its own network card, ``device_ip`` is empty: HCCS needs none.

    Raises:
        ParamInvalid: if ``resource`` is wrong, or another device's; or if there is none and the runtime does not know
            an A3's super pod.
    """
    physical = runtime.physical_id(index)
    has_pods = bool(A3.match(runtime.chip))
    if resource and asks_to_generate(resource):
        logger.warning(
            "local_comm_res has version %s: this device's description is generated, and endpoints in local_comm_res have no "
            "effect",
            GENERATED,
        )
    elif resource:
        found = parse_resource(resource)
        if not runtime.is_soft or runtime.soft_strictness:
            check_device(found, index, physical, has_pods=has_pods)
        return found
    if runtime.is_soft:
        address = f"127.0.{index // 250}.{index % 250 + 1}"  # no two devices of a table have the same
        return {"server_id": "127.0.0.1", "device_id": str(index), "device_ip": address}
    physical = index if physical is None else physical
    found = {
        "server_id": server_address() or socket.gethostname()[:MAX_VALUE],
        "device_id": str(physical),
        "device_ip": device_address(physical),
    }
    return {**found, **_super_pod(runtime, index)} if has_pods else found


def _super_pod(runtime: Runtime, index: int) -> dict[str, str]:
    pod = runtime.super_pod(index)
    if pod is None:
        raise ParamInvalid(
            f"device {index} is in a super pod ({runtime.chip}): CANN reports its ids from version 8.5 on",
            hint="set LLMConfig.local_comm_res: version 1.2, with super_pod_list and super_device_id",
        )
    return {"super_pod_id": str(pod[0]), "super_device_id": str(pod[1])}


def resource_of(found: dict[str, str]) -> str:
    """Return the ``local_comm_res`` with these fields, which :func:`parse_resource` reads back."""
    of_device = ("device_id", "device_ip", "backup_device_ip", "device_port", "super_device_id")
    server = {name: found[name] for name in ("server_id", "host_ip") if found.get(name)}
    device = {name: found[name] for name in of_device if found.get(name)}
    table: dict[str, Any] = {
        "version": "1.0",
        "status": "completed",
        "server_count": "1",
        "server_list": [{**server, "device": [device]}],
    }
    if pod := found.get("super_pod_id"):
        table["version"] = "1.2"
        table["super_pod_list"] = [{"super_pod_id": pod, "server_list": [{"server_id": found["server_id"]}]}]
    return json.dumps(table)


def server_address() -> str:
    """Return the address with which this machine reaches others; empty if there is no route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(_ANY_ADDRESS)
        return str(sock.getsockname()[0])
    return ""


def device_address(physical: int, conf: Path = HCCN_CONF) -> str:
    """Return the address of the device's own network card; empty if none can be found."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = re.search(rf"^\s*address_{physical}\s*=\s*(\S+)", conf.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    tool = shutil.which("hccn_tool") or shutil.which(HCCN_TOOL)
    if tool is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            [tool, "-i", str(physical), "-ip", "-g"],
            capture_output=True,
            text=True,
            timeout=HCCN_TOOL_TIMEOUT,
            check=False,
        ).stdout
        found = re.search(r"ipaddr\s*:\s*(\S+)", said)
        return found[1] if found else ""
    return ""
