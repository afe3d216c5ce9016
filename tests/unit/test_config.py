"""Configuration: refused where it is said, and the same on both sides of the option dictionary."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretBytes

from aiodatadist import FeatureNotEnabled, LLMConfig, LlmConfig, LLMException, LLMStatusCode, ParamInvalid
from aiodatadist.config import MAX_LOCAL_COMM_RES, parse_address
from aiodatadist.transport import TRANSPORTS

INT32 = st.integers(0, 2**31 - 1)

configurations = st.fixed_dictionaries(
    {},
    optional={
        "device_id": INT32,
        "listen_ip_info": st.sampled_from(["127.0.0.1:0", "0.0.0.0:26000", "[::1]:65535", "not an address"]),
        "sync_kv_timeout": st.integers(1, 2**31 - 1),
        "enable_cache_manager": st.booleans(),
        "enable_remote_cache_accessible": st.booleans(),
        "link_total_time": st.integers(0, 2**32 - 1),
        "link_retry_count": st.integers(1, 100),
        "local_comm_res": st.sampled_from(["", "{}", '{"version": "1.0"}']),
    },
)


def test_spellings_of_the_class_are_one_class() -> None:
    assert LlmConfig is LLMConfig


def test_defaults_are_those_of_the_one_sided_mode() -> None:
    assert LLMConfig().generate_options() == {
        "ge.exec.deviceId": "0",
        "llm.SyncKvCacheWaitTime": "1000",
        "llm.EnableCacheManager": "1",
        "llm.EnableRemoteCacheAccessible": "1",
        "llm.LinkTotalTime": "0",
        "llm.LinkRetryCount": "1",
    }


@given(configurations)
def test_options_and_back_is_the_same_configuration(values: dict[str, Any]) -> None:
    config = LLMConfig(**values)
    options = config.generate_options()
    assert all(isinstance(text, str) for text in options.values())
    assert LLMConfig.from_options(options) == config
    assert LLMConfig.from_options({key.upper(): text for key, text in options.items()}) == config


@given(configurations)
def test_set_later_is_the_same_as_set_at_once(values: dict[str, Any]) -> None:
    config = LLMConfig()
    for name, value in values.items():
        setattr(config, name, value)
    assert config == LLMConfig(**values)


def test_dictionary_is_a_fresh_one_each_time() -> None:
    config = LLMConfig()
    config.generate_options()["llm.LinkRetryCount"] = "7"
    assert config.generate_options()["llm.LinkRetryCount"] == "1"


def test_empty_address_is_no_address_and_empty_resource_is_said() -> None:
    options = LLMConfig(listen_ip_info="", local_comm_res="").generate_options()
    assert "llm.listenIpInfo" not in options
    assert options["llm.LocalCommRes"] == ""


def test_one_device_in_a_list_is_that_device() -> None:
    assert LLMConfig(**_any(device_id=[3])).device_id == 3
    assert LLMConfig(**_any(device_id=(3,))).device_id == 3


def test_milliseconds_may_be_digits() -> None:
    assert LLMConfig(**_any(sync_kv_timeout="250")).generate_options()["llm.SyncKvCacheWaitTime"] == "250"


def test_listen_is_another_name_of_listen_ip_info() -> None:
    assert LLMConfig(**_any(listen="127.0.0.1:26000")).listen_ip_info == "127.0.0.1:26000"


@pytest.mark.parametrize("name", ["listen_ip_info", "local_comm_res", "auth_key"])
def test_what_is_unset_by_default_can_be_unset(name: str) -> None:
    assert getattr(LLMConfig(**_any(**{name: None})), name) is None


WRONG_TYPES: list[tuple[str, object]] = [
    ("device_id", "0"),
    ("device_id", None),
    ("device_id", ["0"]),
    ("device_id", 1.0),
    ("listen_ip_info", 26000),
    ("sync_kv_timeout", 1.5),
    ("sync_kv_timeout", None),
    ("enable_cache_manager", 1),
    ("enable_remote_cache_accessible", "1"),
    ("link_total_time", "1"),
    ("link_total_time", 1.0),
    ("link_retry_count", None),
    ("local_comm_res", {}),
    ("transport", 1),
    ("auth_key", 1),
]

BROKEN_RULES = [
    ("device_id", -1, "device_id is -1: it has to be at least 0"),
    ("device_id", [0, 1], "device_id is [0, 1]: exactly one"),
    ("device_id", [], "device_id is []: exactly one"),
    ("sync_kv_timeout", 0, "sync_kv_timeout is 0: it has to be above 0"),
    ("sync_kv_timeout", "0", "sync_kv_timeout is 0: it has to be above 0"),
    ("sync_kv_timeout", "abc", "sync_kv_timeout is 'abc': it has to be digits"),
    ("sync_kv_timeout", "-1", "sync_kv_timeout is '-1': it has to be digits"),
    ("sync_kv_timeout", "", "sync_kv_timeout is '': it has to be digits"),
    ("link_total_time", -1, "link_total_time is -1: it has to be in [0, 4294967295]"),
    ("link_total_time", 2**32, "link_total_time is 4294967296: it has to be in [0, 4294967295]"),
    ("link_retry_count", 0, "link_retry_count is 0: it has to be in [1, 100]"),
    ("link_retry_count", 101, "link_retry_count is 101: it has to be in [1, 100]"),
    ("local_comm_res", "{", "local_comm_res is not JSON"),
    ("local_comm_res", "[" * 60000, "local_comm_res is not JSON"),
    ("local_comm_res", " " * (MAX_LOCAL_COMM_RES + 1), "local_comm_res has 65537 characters: the limit is 65536"),
    ("transport", "tcp", "transport is 'tcp': there are hccl, loopback"),
    ("auth_key", b"", "auth_key is empty: a key has at least 1 byte"),
    ("auth_key", SecretBytes(b""), "auth_key is empty"),
]

OUTSIDE_THE_C_TYPE = [
    ("device_id", 2**31, "device_id is 2147483648: the int32 range"),
    ("sync_kv_timeout", 2**31, "sync_kv_timeout is 2147483648: the int32 range"),
    ("sync_kv_timeout", "2147483648", "sync_kv_timeout is 2147483648: the int32 range"),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_wrong_type_is_a_type_error_that_names_the_option(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        LLMConfig(**_any(**{name: value}))


@pytest.mark.parametrize(("name", "value", "words"), BROKEN_RULES)
def test_broken_rule_is_param_invalid_with_value_and_limit(name: str, value: object, words: str) -> None:
    with pytest.raises(LLMException) as caught:
        LLMConfig(**_any(**{name: value}))
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "value", "words"), OUTSIDE_THE_C_TYPE)
def test_integer_outside_its_c_type_is_a_value_error(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLMConfig(**_any(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"), WRONG_TYPES + [case[:2] for case in BROKEN_RULES] + [case[:2] for case in OUTSIDE_THE_C_TYPE]
)
def test_refused_setting_changes_nothing(name: str, value: object) -> None:
    config = LLMConfig(device_id=1, sync_kv_timeout=250, listen_ip_info="127.0.0.1:1", local_comm_res="{}")
    before = config.model_copy()
    with pytest.raises((TypeError, ValueError, LLMException)):
        setattr(config, name, value)
    assert config == before


def test_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="lisen"):
        LLMConfig(**_any(lisen="127.0.0.1:0"))


@pytest.mark.parametrize("key", ["llm.DeviceId", "ge.exec.deviceId", "LLM.DEVICEID"])
def test_device_has_several_spellings_without_case(key: str) -> None:
    assert LLMConfig.from_options({key: "3"}).device_id == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"llm.Nonsense": "1"}, "option 'llm.Nonsense' is not known"),
        ({"llm.DeviceId": "one"}, "option 'llm.DeviceId' is 'one': it has to be a number"),
        ({"ge.exec.deviceId": "0;1"}, "option 'ge.exec.deviceId' is '0;1': it has to be a number"),
        ({"llm.LinkRetryCount": "9" * 5000}, "it has to be a number"),
        ({"llm.LinkRetryCount": "101"}, "link_retry_count is 101: it has to be in [1, 100]"),
        ({"llm.EnableCacheManager": "true"}, "option 'llm.EnableCacheManager' is 'true': it has to be '0' or '1'"),
        ({"llm.SyncKvCacheWaitTime": "abc"}, "sync_kv_timeout is 'abc': it has to be digits"),
    ],
)
def test_wrong_option_is_param_invalid_and_names_key_and_value(options: dict[str, str], words: str) -> None:
    with pytest.raises(ParamInvalid) as caught:
        LLMConfig.from_options(options)
    assert words in str(caught.value)


@pytest.mark.parametrize("options", [None, [("llm.DeviceId", "1")], {"llm.DeviceId": 1}, {1: "1"}])
def test_options_are_a_dictionary_of_strings(options: Any) -> None:
    with pytest.raises(TypeError):
        LLMConfig.from_options(options)


# ---- where to listen ----


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:26000", ("127.0.0.1", 26000)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_address_is_ip_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "x") == address


@pytest.mark.parametrize(
    "text",
    ["", ":", "127.0.0.1", "127.0.0.1:", ":1", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:1:2", "localhost:1",
     "::1:80", "[::1]80", "[127.0.0.1]:1", "127.0.0.1: 1", "127.0.0.1:1.0", "127.0.0.1:" + "9" * 5000, "127.0.0.1:٣"],
)  # fmt: skip
def test_anything_else_is_no_address(text: str) -> None:
    with pytest.raises(
        ParamInvalid, match=r"^x is .*: it has to be ip:port or \[ipv6\]:port with a port in \[0, 65535\]"
    ):
        parse_address(text, "x")


@given(st.text("0123456789.:[]af%", max_size=20) | st.builds("{}:{}".format, st.ip_addresses(), st.integers(-1, 70000)))
def test_any_text_is_an_address_or_param_invalid(text: str) -> None:
    try:
        host, port = parse_address(text, "x")
    except ParamInvalid:
        return
    assert ipaddress.ip_address(host)
    assert 0 <= port < 2**16


def test_network_address_needs_a_key() -> None:
    with pytest.raises(ParamInvalid, match="listening on a network needs auth_key"):
        _ = LLMConfig(listen_ip_info="0.0.0.0:1").listen_address
    assert LLMConfig(**_any(listen_ip_info="0.0.0.0:1", auth_key=b"secret")).listen_address == ("0.0.0.0", 1)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.1.2.3:1", "[::1]:1"])
def test_loopback_address_needs_no_key(text: str) -> None:
    assert LLMConfig(listen_ip_info=text).listen_address is not None


@pytest.mark.parametrize("text", [None, ""])
def test_without_an_address_nobody_listens(text: str | None) -> None:
    assert LLMConfig(listen_ip_info=text).listen_address is None


# ---- the rest ----


def test_modes_that_are_not_there_yet_say_so() -> None:
    LLMConfig().check_mode()
    for config in (LLMConfig(enable_cache_manager=False), LLMConfig(enable_remote_cache_accessible=False)):
        with pytest.raises(FeatureNotEnabled, match="is not available"):
            config.check_mode()


@pytest.mark.parametrize("key", ["secret", b"secret", SecretBytes(b"secret")])
def test_key_is_bytes_and_never_shown(key: object) -> None:
    config = LLMConfig(**_any(auth_key=key))
    assert config.auth_key is not None
    assert config.auth_key.get_secret_value() == b"secret"
    assert "secret" not in repr(config) + str(config.generate_options())


def test_key_of_a_wrong_type_is_not_shown_either() -> None:
    with pytest.raises(TypeError) as caught:
        LLMConfig(**_any(auth_key=["secret"]))
    assert "secret" not in str(caught.value)


def test_every_transport_can_be_configured() -> None:
    for name in TRANSPORTS:
        assert LLMConfig(**_any(transport=name)).transport == name


def test_resource_of_the_largest_size_is_accepted() -> None:
    text = json.dumps({"x": ""})
    assert LLMConfig(local_comm_res=text + " " * (MAX_LOCAL_COMM_RES - len(text))).local_comm_res is not None


def _any(**values: Any) -> dict[str, Any]:
    """Arguments that the type checker would refuse."""
    return values
