"""How an address of a listener is shown."""

from __future__ import annotations


def host_port(host: str, port: int) -> str:
    """``127.0.0.1:26000``, or ``[::1]:26000``: as ``LLMConfig.listen`` takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
