"""vLLM in the place of the numpy model: a service that is started with ``--vllm MODEL`` becomes vLLM's own server.

It has aiodatadist's connector, and the router asks it as it asks the services beside this file.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from typing import Any


def add_vllm_argument(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--vllm",
        default=None,
        metavar="MODEL",
        help="become vLLM's server; options not known here are vLLM's, and those of blocks and waiting have no effect",
    )


def parse(parser: ArgumentParser, needed: str | None = None) -> Namespace:
    """Parse the options, or replace this process by vLLM.

    Args:
        needed: an option that a service without vLLM does not start without.
    """
    arguments, others = parser.parse_known_args()
    if arguments.vllm is not None:
        command = command_of(arguments, others)
        os.execv(command[0], command)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if needed is not None and not getattr(arguments, needed):
        parser.error(f"--{needed.replace('_', '-')} is needed without --vllm")
    return arguments


def command_of(arguments: Namespace, others: list[str]) -> list[str]:
    """Return the command of ``vllm serve``, by the module behind it."""
    transfer = {
        "kv_connector": "AioDataDistConnector",
        "kv_connector_module_path": "aiodatadist.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": _settings(arguments),
    }
    given = ["--model", arguments.vllm, "--host", arguments.host, "--port", str(arguments.port)]
    start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*start, *given, "--kv-transfer-config", json.dumps(transfer), *others]


def _settings(arguments: Namespace) -> dict[str, Any]:
    """Return the options that the connector also knows, in its own form."""
    settings: dict[str, Any] = {"cluster_id": arguments.cluster_id, "device_id": arguments.device}
    if arguments.kv_listen is not None:
        host, _, port = arguments.kv_listen.rpartition(":")
        settings |= {"host": host.strip("[]"), "port": int(port)}
    if arguments.trust is not None:
        settings["trust"] = arguments.trust
    if arguments.kv_peers:
        settings["peers"] = arguments.kv_peers
    if "lease_seconds" in arguments:
        settings["lease_seconds"] = arguments.lease_seconds
    return settings
