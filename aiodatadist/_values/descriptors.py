"""Names and descriptions of caches. Values only: nothing here owns memory or talks to a peer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Any, Final, TypeVar, overload

from aiodatadist._values import checks
from aiodatadist.errors import LLMStatusCode, ParamInvalid

UNSET: Final = 2**64 - 1
"""A request or prefix id that names nothing."""

T = TypeVar("T")


class LLMRole(IntEnum):
    """The role of a cluster. Informational: any role may pull from and push to any other."""

    PROMPT = 1
    DECODER = 2
    MIX = 3

    def __str__(self) -> str:
        return f"LLMRole.{self.name}"


class Placement(IntEnum):
    """The memory in which the tensors of a cache live: pinned host memory, or device memory."""

    HOST = 0
    DEVICE = 1

    def __str__(self) -> str:
        return f"Placement.{self.name}"


class RegisterMemStatus(IntEnum):
    """The state of a link's memory registration."""

    OK = 0
    PREPARING = 1
    FAILED = 2


class Memtype(IntEnum):
    """The memory kinds of :class:`MemInfo`. The numbers are the reverse of :class:`Placement`'s."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class PushType(IntEnum):
    """The ways in which a push can name its target; kept for compatibility."""

    NO_CACHE_KEY = 0
    BLOCKS_CACHE_KEY = 1
    CACHE_KEY_BY_ID = 2


class DataType(IntEnum):
    """Element types, with LLM-DataDist's numbers. ``itemsize`` is in bytes."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27

    @property
    def itemsize(self) -> int:
        return _ITEM_SIZES[self]


def type_name(number: int) -> str:
    """Return the name of a peer's element type, which may be unknown here."""
    return DataType(number).name if number in set(DataType) else f"of element type {number}"


_ITEM_SIZES: Final = {
    DataType.DT_FLOAT: 4, DataType.DT_FLOAT16: 2, DataType.DT_INT8: 1, DataType.DT_INT32: 4, DataType.DT_UINT8: 1,
    DataType.DT_INT16: 2, DataType.DT_UINT16: 2, DataType.DT_UINT32: 4, DataType.DT_INT64: 8, DataType.DT_UINT64: 8,
    DataType.DT_DOUBLE: 8, DataType.DT_BOOL: 1, DataType.DT_STRING: 16, DataType.DT_BF16: 2,
}  # fmt: skip

MAX_DIMENSIONS: Final = 31


class CacheDesc:
    """The shape of a cache: ``num_tensors`` tensors, each of ``shape`` elements of ``data_type``.

    Tensors are cut along dimension 0, into batch slots or into blocks. ``batch_dim_index`` is kept for compatibility,
    and must be 0 for transfers.

    Args:
        num_tensors: the number of tensors, in the order K0, V0, K1, V1, ...
        shape: 1 to 31 dimensions.
        placement: the memory in which the tensors live.
        seq_len_dim_index: informational; -1 or a dimension.
        kv_tensor_format: informational, for instance ``"BSH"``.
    """

    __slots__ = (
        "_batch_dim_index",
        "_data_type",
        "_kv_tensor_format",
        "_num_tensors",
        "_placement",
        "_seq_len_dim_index",
        "_shape",
    )

    def __init__(
        self,
        num_tensors: int,
        shape: list[int] | tuple[int, ...],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        self._num_tensors = checks.integer(num_tensors, "num_tensors", checks.UINT32)
        checks.sequence(shape, "shape", int)
        for dim in shape:
            checks.integer(dim, "shape", checks.INT64)
        self._shape = shape
        self._data_type = checks.instance(data_type, "data_type", DataType)
        self._placement = checks.instance(placement, "placement", Placement)
        self._batch_dim_index = checks.integer(batch_dim_index, "batch_dim_index", checks.INT32)
        if not 0 <= batch_dim_index < len(shape):
            raise ParamInvalid(f"batch_dim_index is {batch_dim_index}: shape {shape} has {len(shape)} dimensions")
        self._seq_len_dim_index = checks.integer(seq_len_dim_index, "seq_len_dim_index", checks.INT32)
        if not -1 <= seq_len_dim_index < len(shape):
            raise ParamInvalid(f"seq_len_dim_index is {seq_len_dim_index}: must be -1 or a dimension of {shape}")
        if kv_tensor_format is not None:
            checks.instance(kv_tensor_format, "kv_tensor_format", str)
        self._kv_tensor_format = kv_tensor_format

    @property
    def num_tensors(self) -> int:
        return self._num_tensors

    @property
    def shape(self) -> list[int] | tuple[int, ...]:
        return self._shape

    @property
    def data_type(self) -> DataType:
        return self._data_type

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def batch_dim(self) -> int:
        """The dimension along which tensors are cut; ``batch_dim_index``."""
        return self._batch_dim_index

    @property
    def batch_size(self) -> int:
        """The number of batch slots, or of blocks."""
        return self._shape[self._batch_dim_index]

    @property
    def seq_len_dim_index(self) -> int:
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        return self._kv_tensor_format

    @property
    def size(self) -> int:
        """Bytes of one tensor.

        Raises:
            ParamInvalid: if a dimension is not positive, or the product does not fit int64.
        """
        if len(self._shape) > MAX_DIMENSIONS or min(self._shape) <= 0:
            raise ParamInvalid(f"shape is {self._shape}: must have 1 to {MAX_DIMENSIONS} dimensions, all above 0")
        size = math.prod(self._shape) * self._data_type.itemsize
        if size >= 2**63:
            raise ParamInvalid(f"shape {self._shape} of {self._data_type.name} has {size} bytes: the limit is 2**63-1")
        return size

    @property
    def stride(self) -> int:
        """Bytes of one batch slot or block: a tensor divided by ``shape[0]``."""
        return self.size // self._shape[0]

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Change one dimension of ``shape``, which must be a list.

        Raises TypeError if ``shape`` is a tuple, ParamInvalid if there is no such dimension.
        """
        checks.integer(dim_index, "dim_index", checks.INT32)
        checks.integer(dim_value, "dim_value", checks.INT64)
        if not isinstance(self._shape, list):
            raise TypeError("shape is a tuple, which cannot change: make the CacheDesc with a list")
        if not 0 <= dim_index < len(self._shape):
            raise ParamInvalid(f"dim_index is {dim_index}: shape {self._shape} has {len(self._shape)} dimensions")
        self._shape[dim_index] = dim_value

    def _key(self) -> tuple[Any, ...]:
        return (self._num_tensors, tuple(self._shape), self._data_type, self._placement)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheDesc) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"CacheDesc({self._num_tensors}, {list(self._shape)}, {self._data_type.name}, {self._placement})"


def _reads_slots(kind: type[T]) -> type[T]:
    """Let each property that returns the slot of its name read it in C, because each transfer reads several of them."""
    for name, value in list(vars(kind).items()):
        if isinstance(value, property) and f"_{name}" in vars(kind):
            setattr(kind, name, property(attrgetter(f"_{name}"), doc=value.__doc__))
    return kind


class CacheHome:
    """The owner of caches: one cluster, from ``init`` to ``finalize``."""

    __slots__ = ("cluster_id",)

    def __init__(self, cluster_id: int) -> None:
        self.cluster_id: int = cluster_id


@_reads_slots
class Cache:
    """A cache that this cluster holds. Made by a cache manager; dropping the object frees nothing.

    It belongs to the cluster that made it until that is finalized, and no other cluster accepts it. An object that is
    made by hand must have the id and addresses of a cache of the cluster to which it is passed.
    """

    __slots__ = ("_cache_desc", "_cache_id", "_home", "_is_blocks_cache", "_tensor_addrs")

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: Sequence[int],
        is_blocks_cache: bool,
        home: CacheHome | None = None,
    ) -> None:
        self._home = home
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._tensor_addrs = list(tensor_addrs)
        self._is_blocks_cache = is_blocks_cache

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """Return a blocks cache over the caller's host memory, for ``swap_blocks`` only; its id is -1.

        Raises TypeError, ValueError or ParamInvalid if an argument is wrong.
        """
        checks.instance(cache_desc, "cache_desc", CacheDesc)
        checks.sequence(addrs, "addrs", int)
        if cache_desc.placement is not Placement.HOST:
            raise ParamInvalid(f"a CPU cache needs Placement.HOST, not {cache_desc.placement}")
        if len(addrs) != cache_desc.num_tensors:
            raise ParamInvalid(f"{len(addrs)} addresses for {cache_desc.num_tensors} tensors")
        for i, address in enumerate(addrs):
            if checks.integer(address, f"addrs[{i}]", checks.UINT64) == 0:
                raise ParamInvalid(f"addrs[{i}] is 0: no tensor starts there")
        return cls(-1, cache_desc, addrs, True)

    @property
    def cache_id(self) -> int:
        """The id, with which a peer may name the cache; -1 if it has none."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """The shape of the cache."""
        return self._cache_desc

    @property
    def home(self) -> CacheHome | None:
        """The cluster that owns the cache; None if the object was made by hand."""
        return self._home

    @property
    def tensor_addrs(self) -> list[int]:
        """Start address of each tensor; empty once the cache has been deallocated."""
        return self._tensor_addrs

    def _empty(self) -> None:
        """Forget the addresses: the registry calls this when the cache has been deallocated."""
        self._tensor_addrs = []

    @property
    def is_blocks_cache(self) -> bool:
        """True if the cache is cut into blocks, not into batch slots."""
        return self._is_blocks_cache

    def __repr__(self) -> str:
        kind = "blocks" if self._is_blocks_cache else "contiguous"
        return f"<Cache {self._cache_id} {kind} {self._cache_desc}>"


def forget_addresses(cache: Cache) -> None:
    """Forget the addresses of a cache that has been deallocated."""
    cache._empty()


class _Key:
    """Equality, hash and repr of the three kinds of keys."""

    __slots__: tuple[str, ...] = ()

    def _values(self) -> tuple[int | None, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, _Key) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self).__name__, *self._values()))

    def __repr__(self) -> str:
        pairs = zip(self.__slots__, self._values(), strict=True)
        body = ", ".join(f"{name[1:]}={value}" for name, value in pairs if value is not None)
        return f"{type(self).__name__}({body})"


def _bind(call: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a key's positional and keyword arguments by name. ``prompt_cluster_id`` is another name of ``cluster_id``."""
    if len(args) > len(names):
        raise ParamInvalid(f"{call} takes at most {len(names)} arguments: {len(args)} were given")
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        plain = "cluster_id" if name == "prompt_cluster_id" else name
        if plain not in names:
            raise ParamInvalid(f"{call} has no argument {name!r}")
        given.setdefault(plain, value)
    return given


@_reads_slots
class CacheKey(_Key):
    """The name of one batch slot: ``CacheKey(cluster_id, req_id, model_id=0, prefix_id=2**64-1, for_cluster=None)``.

    With a ``prefix_id`` it names a shared prefix, otherwise a request. A ``req_id`` of 2**64-1 without a prefix is a
    placeholder that binds nothing. ``cluster_id`` is the peer to pull from; it is ignored when a cache is made. With
    ``for_cluster``, which counts only when a cache is made, no other cluster finds or consumes the slot by this key.
    """

    __slots__ = ("_cluster_id", "_req_id", "_model_id", "_prefix_id", "_for_cluster")  # noqa: RUF023 - the order of the arguments

    @overload
    def __init__(
        self, cluster_id: int, req_id: int, model_id: int = 0, prefix_id: int = UNSET, *, for_cluster: int | None = None
    ) -> None: ...
    @overload
    def __init__(
        self,
        *,
        prompt_cluster_id: int,
        req_id: int,
        model_id: int = 0,
        prefix_id: int = UNSET,
        for_cluster: int | None = None,
    ) -> None: ...
    def __init__(self, *args: int, for_cluster: int | None = None, **kwargs: int) -> None:
        given = _bind("CacheKey", ("cluster_id", "req_id", "model_id", "prefix_id"), args, kwargs)
        if "cluster_id" not in given or "req_id" not in given:
            raise ParamInvalid("CacheKey needs cluster_id (or prompt_cluster_id) and req_id")
        self._cluster_id = checks.integer(given["cluster_id"], "cluster_id", checks.UINT64)
        self._req_id = checks.integer(given["req_id"], "req_id", checks.UINT64)
        self._model_id = checks.integer(given.get("model_id", 0), "model_id", checks.UINT64)
        self._prefix_id = checks.integer(given.get("prefix_id", UNSET), "prefix_id", checks.UINT64)
        self._for_cluster = None if for_cluster is None else checks.integer(for_cluster, "for_cluster", checks.UINT64)

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """The ``cluster_id``, by its older name."""
        return self._cluster_id

    @property
    def req_id(self) -> int:
        return self._req_id

    @property
    def model_id(self) -> int:
        return self._model_id

    @property
    def prefix_id(self) -> int:
        return self._prefix_id

    @property
    def for_cluster(self) -> int | None:
        """The only cluster that may use the slot by this key; None if each may."""
        return self._for_cluster

    @property
    def is_prefix(self) -> bool:
        """True if the key names a shared prefix."""
        return self._prefix_id != UNSET

    @property
    def is_placeholder(self) -> bool:
        """True if the key names nothing, and binds nothing."""
        return self._req_id == UNSET and self._prefix_id == UNSET


@_reads_slots
class CacheKeyByIdAndIndex(_Key):
    """The name of one batch slot by the owner's cache id."""

    __slots__ = ("_cluster_id", "_cache_id", "_batch_index")  # noqa: RUF023 - the order of the arguments

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        self._cluster_id = checks.integer(cluster_id, "cluster_id", checks.UINT64)
        self._cache_id = checks.integer(cache_id, "cache_id", checks.INT64)
        self._batch_index = checks.integer(batch_index, "batch_index", checks.UINT32)

    @property
    def cluster_id(self) -> int:
        """The cluster that owns the cache."""
        return self._cluster_id

    @property
    def cache_id(self) -> int:
        """The id of the cache at its owner."""
        return self._cache_id

    @property
    def batch_index(self) -> int:
        """The batch slot."""
        return self._batch_index


@_reads_slots
class BlocksCacheKey(_Key):
    """The name of a whole blocks cache: ``BlocksCacheKey(cluster_id, model_id=0)``. One per model id and cluster."""

    __slots__ = ("_cluster_id", "_model_id")

    @overload
    def __init__(self, cluster_id: int, model_id: int = 0) -> None: ...
    @overload
    def __init__(self, *, prompt_cluster_id: int, model_id: int = 0) -> None: ...
    def __init__(self, *args: int, **kwargs: int) -> None:
        given = _bind("BlocksCacheKey", ("cluster_id", "model_id"), args, kwargs)
        if "cluster_id" not in given:
            raise ParamInvalid("BlocksCacheKey needs cluster_id (or prompt_cluster_id)")
        self._cluster_id = checks.integer(given["cluster_id"], "cluster_id", checks.UINT64)
        self._model_id = checks.integer(given.get("model_id", 0), "model_id", checks.UINT64)

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """The ``cluster_id``, by its older name."""
        return self._cluster_id

    @property
    def model_id(self) -> int:
        return self._model_id


class MemInfo:
    """A range of memory that was repaired, for ``remap_registered_memory``."""

    __slots__ = ("_addr", "_mem_type", "_size")

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        self._mem_type = checks.instance(mem_type, "mem_type", Memtype)
        self._addr = checks.instance(addr, "addr", int)
        self._size = checks.instance(size, "size", int)

    @property
    def mem_type(self) -> Memtype:
        """The kind of memory."""
        return self._mem_type

    @property
    def addr(self) -> int:
        """The address of the first byte."""
        return self._addr

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._size


class Status:
    """A status code, with :meth:`is_ok`."""

    __slots__ = ("_status",)

    def __init__(self, status: LLMStatusCode) -> None:
        self._status = checks.instance(status, "status", LLMStatusCode)

    @property
    def status_code(self) -> LLMStatusCode:
        """The code itself."""
        return self._status

    def is_ok(self) -> bool:
        return self._status is LLMStatusCode.LLM_SUCCESS


def check_cache_key(cache_key: CacheKey) -> None:
    """Raise ParamInvalid unless exactly one of ``req_id`` and ``prefix_id`` is valid, as a key that is pulled needs."""
    if (cache_key.req_id == UNSET) == (cache_key.prefix_id == UNSET):
        raise ParamInvalid(f"{cache_key}: exactly one of req_id and prefix_id must be below 2**64-1")


__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "DataType",
    "LLMRole",
    "MemInfo",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "Status",
]
