"""The ModelConfig: the KV cache of a model as attributes, as options, and as shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from aiodatadist._config import option_rules as rules
from aiodatadist._config.option_rules import optional
from aiodatadist._values import checks
from aiodatadist._values.descriptors import CacheDesc, DataType
from aiodatadist.errors import ParamInvalid

SHAPES: Final = "llm.RefInputShapes"
DTYPES: Final = "llm.RefInputDtypes"
SEQ_LEN_DIM: Final = "llm.RefInputSeqLenDimIndex"
PAGED: Final = "llm.EnablePagedAttention"
SHARED_PREFIX: Final = "llm.EnableSharedSystemPrefix"
OM_PATHS: Final = "llm.OmCachePath"
IS_FLOW: Final = "llm.IsFlowModel"
FORMAT: Final = "llm.kvTensorFormat"

DYNAMIC: Final = -1
MAX_TENSORS: Final = 4096


def _list_of(name: str, kind: type[Any]) -> BeforeValidator:
    return optional(lambda value: list(checks.sequence(value, name, kind)))


def _seq_len_dim(value: Any) -> int:
    return checks.integer(value, "kv_seq_len_dim_index", checks.INT32)


class ModelConfig(BaseModel):
    """Options of a model. Each may be set; wrong types raise ``TypeError``. None means "not set".

    Attributes:
        kv_shapes: shape of each tensor of the KV cache, ``"2,1024,4,64"``; -1 is a dimension that a request decides.
        kv_dtypes: data type of each tensor.
        kv_seq_len_dim_index: the dimension of the tokens.
        enable_page_attention: if true, the cache is a blocks cache, which ``pull_blocks`` fills.
        enable_shared_system_prefix: if true, ``preload_prompt_prefix`` can be called.
        om_paths, is_flow_model: model files for the vendor's own runner, which is not available here. Kept unused.
        ge_options: further options of the engine; kept unused.
        kv_tensor_format: a letter per dimension, ``"BSND"``: B the batch, S the tokens. ``check_capacity`` needs it.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(validate_assignment=True, extra="forbid")

    kv_shapes: Annotated[list[str] | None, _list_of("kv_shapes", str)] = None
    kv_dtypes: Annotated[list[DataType] | None, _list_of("kv_dtypes", DataType)] = None
    kv_seq_len_dim_index: Annotated[int | None, optional(_seq_len_dim)] = None
    enable_page_attention: Annotated[bool, rules.flag("enable_page_attention")] = False
    enable_shared_system_prefix: Annotated[bool, rules.flag("enable_shared_system_prefix")] = False
    om_paths: Annotated[list[str] | None, _list_of("om_paths", str)] = None
    is_flow_model: Annotated[bool, rules.flag("is_flow_model")] = False
    ge_options: Annotated[dict[str, str], BeforeValidator(rules.ge_options)] = Field(default_factory=dict)
    kv_tensor_format: Annotated[str | None, optional(rules.text("kv_tensor_format"))] = None

    def __init__(self) -> None:
        super().__init__()

    def generate_options(self) -> dict[str, str]:
        """Return a new option dictionary for ``add_model``. Options that are not set are left out."""
        entries = dict(self.ge_options)
        texts = {
            SHAPES: _joined(self.kv_shapes),
            DTYPES: _joined([str(int(each)) for each in self.kv_dtypes] if self.kv_dtypes else None),
            SEQ_LEN_DIM: None if self.kv_seq_len_dim_index is None else str(self.kv_seq_len_dim_index),
            PAGED: str(int(self.enable_page_attention)),
            SHARED_PREFIX: str(int(self.enable_shared_system_prefix)),
            OM_PATHS: _joined(self.om_paths),
            IS_FLOW: str(int(self.is_flow_model)),
            FORMAT: self.kv_tensor_format,
        }
        return {**entries, **{key: text for key, text in texts.items() if text is not None}}


def _joined(parts: Sequence[str] | None) -> str | None:
    return ";".join(parts) if parts else None


@dataclass(frozen=True, slots=True)
class Layout:
    """The KV cache of a model: ``num_tensors`` tensors of one shape, cut along dimension 0.

    Attributes:
        shape: -1 is a dimension that a request decides: the batch, or the tokens.
        seq_dim: the dimension of the tokens; -1 if there is none.
        has_paged_attention: True if dimension 0 is blocks.
        tensor_format: as it was given, or None.
    """

    num_tensors: int
    shape: tuple[int, ...]
    data_type: DataType
    seq_dim: int
    has_paged_attention: bool
    has_prefixes: bool
    tensor_format: str | None

    @classmethod
    def of(cls, model_options: Any) -> Layout:
        """Return the layout that an option dictionary describes. Options that are not about the KV cache are ignored.

        Raises:
            TypeError: if it is not a dict of str to str.
            ParamInvalid: if shapes or types are missing, invalid or different, or dimensions do not fit.
        """
        options: Mapping[str, str] = checks.instance(model_options, "model_options", dict)
        for key, text in options.items():
            checks.instance(text, checks.instance(key, "a key of model_options", str), str)
        shapes = [_shape(text) for text in _wanted(options, SHAPES).split(";")]
        dtypes = [_data_type(text) for text in _wanted(options, DTYPES).split(";")]
        if len(shapes) != len(dtypes) or len(shapes) > MAX_TENSORS:
            raise ParamInvalid(
                f"{len(shapes)} shapes and {len(dtypes)} types: the numbers must be equal, at most {MAX_TENSORS}"
            )
        if len(set(shapes)) > 1 or len(set(dtypes)) > 1:
            raise ParamInvalid(f"{SHAPES} and {DTYPES} name {set(shapes)} and {set(dtypes)}: all must be alike")
        shape, tensor_format = shapes[0], options.get(FORMAT)
        if tensor_format is not None and len(tensor_format) != len(shape):
            raise ParamInvalid(
                f"{FORMAT} is {tensor_format!r}: must have a letter for each of the {len(shape)} dimensions"
            )
        return cls(
            len(shapes), shape, dtypes[0], _seq_dim(options, shape, tensor_format),
            _flag(options, PAGED), _flag(options, SHARED_PREFIX), tensor_format,
        )  # fmt: skip

    @property
    def is_dynamic(self) -> bool:
        """True if a request decides how many tokens a slot has."""
        return self.seq_dim >= 0 and self.shape[self.seq_dim] == DYNAMIC

    @property
    def is_prefix_of_slot(self) -> bool:
        """True if the first tokens of a slot are its first bytes."""
        return self.seq_dim == 1 and not self.has_paged_attention

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one tensor."""
        others = [dim for i, dim in enumerate(self.shape) if i not in {0, self.seq_dim}]
        return prod(others) * self.data_type.itemsize

    @property
    def slot_tokens(self) -> int:
        """Tokens of a slot or a block; 0 if a request decides, or no dimension counts them."""
        return max(0, self.shape[self.seq_dim]) if self.seq_dim >= 1 else 0

    def desc(self, batch: int, tokens: int) -> CacheDesc:
        """Return the description of a cache for this many requests, each of this many tokens if requests decide.

        Raises:
            ParamInvalid: if there are more requests than slots, or a request does not give its number of tokens.
        """
        shape = list(self.shape)
        if shape[0] == DYNAMIC:
            shape[0] = batch
        if batch > shape[0]:
            raise ParamInvalid(f"{batch} requests: the model's batch has {shape[0]} slots")
        if self.is_dynamic:
            if tokens == 0:
                raise ParamInvalid(f"prompt_length is 0: a model with the shape {self.shape} needs it")
            shape[self.seq_dim] = tokens
        elif self.slot_tokens and tokens > self.slot_tokens and not self.has_paged_attention:
            raise ParamInvalid(f"prompt_length is {tokens}: a slot has {self.slot_tokens} tokens")
        return CacheDesc(self.num_tensors, shape, self.data_type, seq_len_dim_index=self.seq_dim)


def _wanted(options: Mapping[str, str], key: str) -> str:
    text = options.get(key)
    if not text:
        raise ParamInvalid(f"model_options has no {key}: must be given")
    return text


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(dim) for dim in text.split(","))
    except ValueError:
        raise ParamInvalid(f"{SHAPES} has {text!r}: must be whole numbers separated by commas") from None
    if any(dim < 1 and dim != DYNAMIC for dim in shape) or shape[1:].count(DYNAMIC) > 1:
        raise ParamInvalid(f"{SHAPES} has {text!r}: dimensions must be above 0, but one after the batch may be -1")
    return shape


def _data_type(text: str) -> DataType:
    try:
        return DataType(int(text))
    except ValueError:
        raise ParamInvalid(f"{DTYPES} has {text!r}: must be the number of a DataType") from None


def _seq_dim(options: Mapping[str, str], shape: tuple[int, ...], tensor_format: str | None) -> int:
    """Return the dimension of the tokens: as given, the dynamic one, or that of the S in the format; otherwise -1."""
    text = options.get(SEQ_LEN_DIM)
    dynamic = shape.index(DYNAMIC, 1) if DYNAMIC in shape[1:] else -1
    if text is None:
        named = (tensor_format or "").upper().find("S", 1)
        return dynamic if dynamic >= 0 else named
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) < len(shape):
        raise ParamInvalid(f"{SEQ_LEN_DIM} is {text!r}: must be a dimension of {shape} after the batch")
    if dynamic not in {-1, int(text)}:
        raise ParamInvalid(f"{SEQ_LEN_DIM} is {text}: dimension {dynamic} of {shape} is the one that a request decides")
    return int(text)


def _flag(options: Mapping[str, str], key: str) -> bool:
    text = options.get(key, "0")
    if text not in {"0", "1"}:
        raise ParamInvalid(f"{key} is {text!r}: must be '0' or '1'")
    return text == "1"
