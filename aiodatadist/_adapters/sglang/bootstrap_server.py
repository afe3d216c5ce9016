"""The server from which decode engines learn the addresses of a prefill engine's ranks."""

from __future__ import annotations

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer

from aiodatadist._adapters.rendezvous import RendezvousServer
from aiodatadist._adapters.sglang.settings import from_environment


class AioDataDistKVBootstrapServer(BaseKVBootstrapServer):  # type: ignore[misc]  # SGLang has no types here
    """A server that listens from its construction to :meth:`close`.

    Raises:
        OSError: if it cannot listen there.
        ParamInvalid: if the keys of the settings cannot be used, or there are none and ``host`` is not a loopback address.
        ValueError: if a setting is wrong.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = RendezvousServer(host, port, from_environment().credential())
        self.port: int = self._server.port

    def close(self) -> None:
        """Stop listening."""
        self._server.close()
