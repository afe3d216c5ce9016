"""Where decode engines learn the addresses of a prefill engine's ranks."""

from __future__ import annotations

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer

from aiodatadist.adapters.rendezvous import RendezvousServer


class AioDataDistKVBootstrapServer(BaseKVBootstrapServer):  # type: ignore[misc]  # SGLang has no types here
    """Listens from its construction to :meth:`close`. Raises OSError: it cannot listen there."""

    def __init__(self, host: str, port: int) -> None:
        self._server = RendezvousServer(host, port)
        self.port = self._server.port

    def close(self) -> None:
        self._server.close()
