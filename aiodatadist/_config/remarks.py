"""The remarks of a cluster on its options when it starts: on those without effect, and on values that invite failures."""

from __future__ import annotations

from typing import Final

from aiodatadist._config import option_rules as rules
from aiodatadist._config.llm_config import LLMConfig, credential_for, field_of
from aiodatadist._config.trust import NONE, VARIABLE, Untrusted
from aiodatadist._values.durations import suspicion

_SAFE_HEARTBEAT_INTERVAL: Final = 0.5
"""Seconds. Below this, busy machines or lost packets may look like a dead peer."""
_SAFE_SILENCE: Final = 2.0
"""Seconds. TCP needs at least 0.2 to send a lost packet again, and several may be lost in a row."""
_OVER_TCP: Final = ("tcp", "auto")

WITHOUT_EFFECT: Final = {
    "global_resource_config": "it is for engines of aiodatadist.hixl",
    "deploy_res_path": "nothing is deployed to a device here",
    "cluster_info": "listen_ip_info and the constructor say where a cluster listens and what its id is",
    "output_max_size": "outputs of a model runner may have any size",
}
"""Options from a vendor's script that are checked and kept but change nothing, with the reason for each."""


def remarks(config: LLMConfig) -> list[str]:
    """Return a line for each option that was given and changes nothing, and for each whose value invites failures."""
    given = [name for name in WITHOUT_EFFECT if getattr(config, name) is not None]
    lines = [f"{name} has no effect: {WITHOUT_EFFECT[name]}" for name in given]
    lines += [
        f"{name} has no effect: transport is {config.transport!r}, not 'tcp' or 'auto'" for name in _of_tcp(config)
    ]
    others = sorted(key for key in config.ge_options if key.lower() != rules.POOL_SIZE)
    ignored = [f"option {key!r} has no effect: {_why(key)}" for key in others]
    return lines + _beyond_the_manual(config) + ignored + _risks(config)


def _of_tcp(config: LLMConfig) -> list[str]:
    """Return the options for TCP that differ from their defaults although no link can be over TCP."""
    fields = type(config).model_fields
    names = [] if config.transport in _OVER_TCP else [name for name in fields if name.startswith("tcp_")]
    return [name for name in names if getattr(config, name) != fields[name].default]


def _beyond_the_manual(config: LLMConfig) -> list[str]:
    rdma = (
        ("rdma_traffic_class", rules.TRAFFIC_CLASSES, "a multiple of 4 in [0, 255]"),
        ("rdma_service_level", rules.SERVICE_LEVELS, "in [0, 7]"),
    )
    given = [(name, getattr(config, name), allowed, rule) for name, allowed, rule in rdma]
    return [
        f"{name} has no effect: it is {value}, and must be {rule}"
        for name, value, allowed, rule in given
        if value is not None and value not in allowed
    ]


def _why(key: str) -> str:
    """Return the reason why an option without an attribute changes nothing."""
    field = field_of(key)
    if field is not None:
        return f"set {field} instead, or give the dictionary that generate_options() makes"
    return "there is no graph engine here" if key.lower().startswith("ge.") else "it is not known here"


def _risks(config: LLMConfig) -> list[str]:
    """Return a line for each option whose value is allowed but invites failures: its name, and the reason."""
    suspected = suspicion(config.sync_kv_timeout, "sync_kv_timeout")
    lines = [] if suspected is None else [suspected]
    silence = config.heartbeat_interval * (config.heartbeat_misses + 1)
    if config.heartbeat_interval < _SAFE_HEARTBEAT_INTERVAL and silence < _SAFE_SILENCE:
        lines.append(
            f"heartbeat_interval is {config.heartbeat_interval:g} s: below {_SAFE_HEARTBEAT_INTERVAL:g} s links may end if "
            f"packets are lost or machines are busy, after {silence:g} s without a sign of life (docs/links.md has a "
            "table)"
        )
    if config.tcp_plain_networks is not None and config.transport in _OVER_TCP:
        lines.append(
            f"tcp_plain_networks is {config.tcp_plain_networks!r}: processes on the path in these networks can read and "
            "change the bytes of transfers"
        )
    if isinstance(credential_for(config), Untrusted):
        source = "trust" if config.trust == NONE else VARIABLE
        lines.append(f"{source} is {NONE!r}: processes of any user of this machine can link, and read caches")
    return lines
