"""The configuration of v1: the same options, with modes off by default, and a pool from the engine's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from aiodatadist._config import llm_config as config
from aiodatadist._config import option_rules as rules
from aiodatadist._config.option_rules import BufferPoolConfig, PoolConfig
from aiodatadist._values.signatures import readable
from aiodatadist.errors import ParamInvalid

PAGE_SHIFT: Final = 10
"""Binary logarithm of the page size of 1 KiB: tensors begin at multiples of 512 bytes, as upstream."""

_IMPLIED_BY: Final = {
    "llm.EnableCacheManager": {"llm.localcommres"},
    "llm.EnableRemoteCacheAccessible": {"llm.localcommres", "llm.transferbackend"},
}
"""Other options, in lower case, that switch a missing mode on."""


@readable
class LLMConfig(config.LLMConfig):
    """Options of a :class:`~aiodatadist.legacy.LLMDataDist`: those of :class:`aiodatadist.LLMConfig`, with both modes off.

    With ``enable_cache_manager`` off, the KvCacheManager mode, the size of the memory pool comes from ``buf_pool_cfg``
    (``buf_pool_size``, or the sum of all ``total_size``); otherwise it is ``mem_utilization`` of
    ``ge.flowGraphMemMaxSize`` bytes; otherwise ``mem_pool_cfg`` applies. It is one pool: size classes are added up.
    ``enable_remote_cache_accessible`` has no effect then. On an NPU ``local_comm_res`` is needed in this mode, too, and
    cannot be in an option dictionary.
    """

    enable_cache_manager: Annotated[bool, rules.flag("enable_cache_manager")] = False
    enable_remote_cache_accessible: Annotated[bool, rules.flag("enable_remote_cache_accessible")] = False

    def __init__(self, **options: Any) -> None:
        modes = {"enable_cache_manager": False, "enable_remote_cache_accessible": False}
        super().__init__(**{**modes, **options})

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """Return the configuration of an option dictionary, like :meth:`aiodatadist.LLMConfig.from_options`.

        Missing modes are off. But ``llm.LocalCommRes`` switches both on, and ``llm.TransferBackend`` remote access.
        """
        if isinstance(options, Mapping):
            given = {key.lower() for key in options if isinstance(key, str)}
            absent = {key: by for key, by in _IMPLIED_BY.items() if key.lower() not in given}
            options = {**options, **{key: "1" for key, by in absent.items() if given & by}}
        return super().from_options(options)


def engine_config(of: config.LLMConfig) -> config.LLMConfig:
    """Return a copy with which the engine works in the KvCacheManager mode.

    Raises:
        ParamInvalid: if the pool is smaller than a page, or there is a ``transfer_backend``, which is for the other
            mode.
    """
    config.check_kept(of)
    if of.transfer_backend is not None:
        raise ParamInvalid(f"transfer_backend is {of.transfer_backend!r}: it needs enable_cache_manager")
    mine = of.model_copy(deep=True)
    mine.enable_cache_manager, mine.enable_remote_cache_accessible = True, False
    mine.host_mem_pool_cfg = None
    nbytes = _pool_bytes(of)
    if nbytes is not None:
        if nbytes < 1 << PAGE_SHIFT:
            raise ParamInvalid(f"the KV pool has {nbytes} bytes: must have at least {1 << PAGE_SHIFT}")
        mine.mem_pool_cfg = PoolConfig(memory_size=nbytes, page_shift=PAGE_SHIFT).model_dump_json()
    return mine


def _pool_bytes(of: config.LLMConfig) -> int | None:
    if of.buf_pool_cfg:
        pool = BufferPoolConfig.parse(of.buf_pool_cfg, "buf_pool_cfg")
        return pool.buf_pool_size or sum(each.total_size for each in pool.buf_cfg or ())
    size = rules.pool_size(of.ge_options)
    return None if size is None else int(size * of.mem_utilization)
