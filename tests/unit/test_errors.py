"""An exception says what is ruined, why, where, and what to do."""

from __future__ import annotations

import pickle

import pytest

from aiodatadist import errors
from aiodatadist.errors import (
    AuthError,
    DataCorrupted,
    DeviceError,
    IncompatiblePeer,
    LinkClosed,
    LinkError,
    LinkTimeout,
    LLMException,
    LLMStatusCode,
    OutOfMemory,
    ParamInvalid,
    PeerLost,
    ProtocolError,
    RuntimeUnavailable,
    StuckError,
    TransferError,
    TransferTimeout,
)

FAMILY = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LLMException)),
    key=lambda kind: kind.__name__,
)
each_kind = pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("LLM_SUCCESS", 0),
        ("LLM_FAILED", 4294967295),
        ("LLM_WAIT_PROCESS_TIMEOUT", 1343270913),
        ("LLM_KV_CACHE_NOT_EXIST", 1343270914),
        ("LLM_REPEAT_REQUEST", 1343270915),
        ("LLM_REQUEST_ALREADY_COMPLETED", 1343270916),
        ("LLM_PARAM_INVALID", 1343270917),
        ("LLM_ENGINE_FINALIZED", 1343270918),
        ("LLM_NOT_YET_LINK", 1343270919),
        ("LLM_ALREADY_LINK", 1343270920),
        ("LLM_LINK_FAILED", 1343270921),
        ("LLM_UNLINK_FAILED", 1343270922),
        ("LLM_NOTIFY_PROMPT_UNLINK_FAILED", 1343270923),
        ("LLM_CLUSTER_NUM_EXCEED_LIMIT", 1343270924),
        ("LLM_PROCESSING_LINK", 1343270925),
        ("LLM_DEVICE_OUT_OF_MEMORY", 1343270926),
        ("LLM_PREFIX_ALREADY_EXIST", 1343270927),
        ("LLM_PREFIX_NOT_EXIST", 1343270928),
        ("LLM_SEQ_LENOVERLIMIT", 1343270929),
        ("LLM_NO_FREE_BLOCK", 1343270930),
        ("LLM_BLOCKS_OUT_OF_MEMORY", 1343270931),
        ("LLM_EXIST_LINK", 1343270936),
        ("LLM_FEATURE_NOT_ENABLED", 1343270937),
        ("LLM_TIMEOUT", 1343270938),
        ("LLM_LINK_BUSY", 1343270939),
        ("LLM_OUT_OF_MEMORY", 1343270940),
        ("LLM_DEVICE_MEM_ERROR", 507053),
        ("LLM_SUSPECT_REMOTE_ERROR", 507057),
        ("LLM_UNKNOWN_ERROR", -1),
    ],
)
def test_status_codes_have_upstreams_numbers(name: str, number: int) -> None:
    assert LLMStatusCode[name] == number
    assert LLMStatusCode.of(number) is LLMStatusCode[name]


@pytest.mark.parametrize("number", [1, 1343270932, 1343270935, 1343270941, 2**64, -2])
def test_number_without_a_name_is_failed(number: int) -> None:
    assert LLMStatusCode.of(number) is LLMStatusCode.LLM_FAILED


@each_kind
def test_no_exception_ever_carries_success(kind: type[LLMException]) -> None:
    assert kind("x").status_code is kind.default_status
    assert kind("x", status_code=LLMStatusCode.LLM_SUCCESS).status_code is kind.default_status
    assert kind.default_status is not LLMStatusCode.LLM_SUCCESS


@each_kind
def test_everything_is_an_llm_exception_which_is_a_runtime_error(kind: type[LLMException]) -> None:
    assert issubclass(kind, LLMException)
    assert issubclass(kind, RuntimeError)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (OutOfMemory, MemoryError),
        (TransferTimeout, TimeoutError),
        (LinkTimeout, TimeoutError),
        (LinkError, ConnectionError),
        (PeerLost, ConnectionError),
    ],
)
def test_who_expects_a_builtin_exception_gets_it(kind: type[LLMException], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)


@pytest.mark.parametrize(
    ("ruined", "kinds"),
    [
        (TransferError, {TransferError, TransferTimeout, DataCorrupted}),
        (LinkError, {LinkError, PeerLost, LinkClosed, LinkTimeout, AuthError, ProtocolError, IncompatiblePeer}),
        (DeviceError, {DeviceError, RuntimeUnavailable, StuckError}),
    ],
)
def test_the_base_says_what_is_ruined(ruined: type[LLMException], kinds: set[type[LLMException]]) -> None:
    assert {kind for kind in FAMILY if issubclass(kind, ruined)} == kinds


def test_message_says_where_what_why_and_what_to_do() -> None:
    error = ParamInvalid("size is 0: must be above 0", operation="pull_cache", hint="use -1 for all")
    assert str(error) == "pull_cache: size is 0: must be above 0 [LLM_PARAM_INVALID]; use -1 for all"


def test_exception_without_words_names_its_class() -> None:
    assert str(PeerLost()) == "PeerLost [LLM_NOT_YET_LINK]"


@each_kind
def test_everything_survives_a_trip_to_another_process(kind: type[LLMException]) -> None:
    error = kind("what", status_code=LLMStatusCode.LLM_LINK_BUSY, peer=7, operation="pull_blocks", hint="again")
    error.__cause__ = ValueError("why")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.status_code, copy.peer, copy.operation, copy.hint) == (error.status_code, 7, "pull_blocks", "again")


def test_device_error_carries_the_runtimes_number_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(DeviceError("aclrtMalloc", code=507899))).code == 507899


def test_only_what_may_succeed_later_is_retryable() -> None:
    assert {kind.__name__ for kind in FAMILY if kind.retryable} == {
        "CacheNotFound",
        "DataCorrupted",
        "OutOfMemory",
        "TransferTimeout",
    }
