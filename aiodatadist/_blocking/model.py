"""The LLMModel without await."""

from __future__ import annotations

from typing import Any, Final

from aiodatadist._blocking.facade import blocking
from aiodatadist._blocking.runner import Given, call
from aiodatadist._concurrency.loop_thread import LoopThread
from aiodatadist._legacy import model as awaitable
from aiodatadist.legacy import LLMReq


class LLMModel:
    """A model, from ``LLMDataDist.add_model`` until its cluster is finalized. Usable from any thread but the loop's own.

    Rules, statuses and the state after a failure are those of :class:`aiodatadist.legacy.LLMModel`.
    """

    def __init__(self, thread: LoopThread, inner: awaitable.LLMModel) -> None:
        self._thread = thread
        self._inner = inner

    @property
    def model_id(self) -> int:
        """The number of the model in its keys."""
        return self._inner.model_id

    pull_kv: Final = blocking(awaitable.LLMModel.pull_kv)
    merge_kv: Final = blocking(awaitable.LLMModel.merge_kv)
    pull_blocks: Final = blocking(awaitable.LLMModel.pull_blocks)
    release_prompt_prefix: Final = blocking(awaitable.LLMModel.release_prompt_prefix)

    def predict(self, llm_req: LLMReq | list[LLMReq] | tuple[LLMReq, ...], inputs: Any, **kwargs: Any) -> Any:
        """Run the model over the KV cache of these requests, and return what it returns. Errors as in the awaitable one.

        ``run_model`` is called in a worker thread, with the caller's context variables. It may call anything of this
        LLMDataDist except ``finalize`` and ``close``. What it raises is raised here, SystemExit included.

        A thread cannot be interrupted: after an interrupt this waits until ``run_model`` has returned, and raises the
        interrupt then. Keys and slots are as before, and on PROMPT the cache has been released.
        """
        given = Given(inputs, kwargs)
        return call(self._thread, lambda: self._inner.predict(llm_req, given)).value

    def preload_prompt_prefix(self, llm_req: LLMReq, inputs: Any, **kwargs: Any) -> None:
        """Run the model once on PROMPT, like :meth:`predict`, and keep the cache as prefix ``llm_req.prefix_id``.

        Errors as in the awaitable one. After an error or an interrupt there is no such prefix.
        """
        given = Given(inputs, kwargs)
        call(self._thread, lambda: self._inner.preload_prompt_prefix(llm_req, given))

    def __repr__(self) -> str:
        return f"<blocking LLMModel {self.model_id}>"
