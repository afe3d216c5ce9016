"""Engines whose blocks have the same shape and other numbers are told apart, by name, before a byte moves."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from aiodatadist import new_lease_name
from aiodatadist._adapters import meaning
from aiodatadist._adapters.regions import MAX_LAYOUT, MAX_WORD
from aiodatadist._adapters.settings import Settings
from aiodatadist._adapters.sglang import identity as sglang_identity
from aiodatadist._adapters.vllm import identity as vllm_identity
from tests.adapters.test_block_service import LAYOUT, PROMPT, End, order
from tests.adapters.test_pushes import LAYOUT as PUSH_LAYOUT
from tests.adapters.test_pushes import End as PushEnd


def vllm_config(**changes: Any) -> Any:
    """Return a configuration like vLLM's, with the fields that are read here."""
    hf = SimpleNamespace(rope_theta=10000.0, rope_scaling=None)
    model = SimpleNamespace(model="org/model", revision=None, dtype="torch.bfloat16", quantization=None, hf_config=hf)
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
        attention_config=SimpleNamespace(backend=None),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    for path, value in changes.items():
        *parts, last = path.split("__")
        target: Any = config
        for part in parts:
            target = getattr(target, part)
        setattr(target, last, value)
    return config


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "other weights": ("model", {"model_config__model": "org/other"}),
    "another revision": ("model", {"model_config__revision": "v2"}),
    "another folder": ("model", {"model_config__model": "/models/a/model"}),
    "another type": ("model_dtype", {"model_config__dtype": "torch.float16"}),
    "quantised": ("quantization", {"model_config__quantization": "awq"}),
    "fp8_e4m3": ("cache_dtype", {"cache_config__cache_dtype": "fp8_e4m3"}),
    "fp8_e5m2": ("cache_dtype", {"cache_config__cache_dtype": "fp8_e5m2"}),
    "an attention": ("attention", {"attention_config__backend": SimpleNamespace(name="TRITON_ATTN")}),
    "longer positions": ("rope", {"model_config__hf_config__rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "other frequencies": ("rope", {"model_config__hf_config__rope_theta": 500000.0}),
    "adapters": ("lora", {"lora_config": SimpleNamespace(lora_dtype="auto")}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_vllm_may_have_otherwise_is_named(change: tuple[str, dict[str, Any]]) -> None:
    name, changes = change
    plain, other = (vllm_identity.meaning_of(vllm_config(**words), None) for words in ({}, changes))
    found = meaning.differences(plain, other)
    assert {name} <= found.keys() <= {name, "cache_dtype"}, "an automatic type of the cache is that of the model"
    assert not meaning.differences(plain, other, meaning.NAMES)
    assert set(plain) == set(meaning.NAMES)
    assert len(plain) + 8 <= MAX_LAYOUT
    assert all(len(word) <= MAX_WORD and word.isprintable() for word in other.values())


def test_two_kinds_of_eight_bit_floats_differ() -> None:
    kinds = [vllm_config(cache_config__cache_dtype=kind) for kind in ("fp8", "fp8_e4m3", "fp8_e5m2")]
    alias, one, other = (vllm_identity.meaning_of(config, None) for config in kinds)
    assert alias == one
    assert meaning.differences(one, other) == {"cache_dtype": ("fp8_e4m3", "fp8_e5m2")}


def test_the_same_positions_in_words_of_two_versions() -> None:
    older = SimpleNamespace(rope_theta=10000.0, rope_scaling={"type": "yarn", "factor": 4.0})
    newer = SimpleNamespace(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0})
    assert meaning.rope(older) == meaning.rope(newer) != meaning.rope(SimpleNamespace(rope_theta=10000.0))
    assert meaning.rope(SimpleNamespace(text_config=newer)) == meaning.rope(newer)
    assert meaning.rope(None).startswith("default")


def test_the_attention_of_a_workers_layers() -> None:
    def layer(name: str, **others: Any) -> Any:
        return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name), **others)

    def broken() -> Any:
        raise RuntimeError("not yet")

    layers = {"0": layer("CPU_ATTN"), "1": layer("CPU_ATTN"), "2": SimpleNamespace(get_attn_backend=broken)}
    config = vllm_config(compilation_config__static_forward_context=layers)
    said = vllm_identity.meaning_of(config, None)
    assert vllm_identity.with_layers(said, config) == {**said, "attention": "CPU_ATTN"}
    config.cache_config.kv_cache_layout = "HND"  # as newer versions say it
    assert vllm_identity.with_layers(said, config)["attention"] == "CPU_ATTN HND"
    assert vllm_identity.with_layers(said, vllm_config()) == said


def test_a_folder_is_not_told_to_clients() -> None:
    config = vllm_config(model_config__model="/home/user/secret project/llama")
    said = vllm_identity.meaning_of(config, None)["model"]
    assert said.startswith("llama #")
    assert "secret" not in said
    assert vllm_identity.meaning_of(config, "mine")["model"] == "mine"


@pytest.mark.parametrize("text", ["short", "x" * MAX_WORD, "x" * 1000, "new\nline", "\x1b[31m" + "x" * 100])
def test_words_fit_a_layout_and_differ(text: str) -> None:
    assert len(meaning.word(text)) <= MAX_WORD
    assert meaning.word(text).isprintable()
    assert meaning.word(text) != meaning.word(text + "!")


def test_only_minor_versions_of_an_engine_differ() -> None:
    assert meaning.engine("vllm", "0.31.2") == meaning.engine("vllm", "0.31.0rc1+cpu") == "vllm 0.31"
    assert meaning.engine("vllm", "0.32.0") == "vllm 0.32"
    assert meaning.engine("vllm", "") == "vllm"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model", {"model_path": "org/other"}),
        ("model", {"revision": "v2"}),
        ("quantization", {"quantization": "awq"}),
        ("cache_dtype", {"kv_cache_dtype": "fp8_e5m2"}),
        ("attention", {"attention_backend": "triton"}),
        ("rope", {"json_model_override_args": '{"rope_scaling": {"factor": 4}}'}),
        ("lora", {"enable_lora": True}),
    ],
)
def test_what_sglang_may_have_otherwise_is_named(name: str, changes: dict[str, Any]) -> None:
    words = {"model_path": "org/model", "dtype": "bfloat16", "kv_cache_dtype": "auto"}
    plain = sglang_identity.meaning_of(SimpleNamespace(), SimpleNamespace(**words), None)
    other = sglang_identity.meaning_of(SimpleNamespace(), SimpleNamespace(**{**words, **changes}), None)
    assert meaning.differences(plain, other).keys() == {name}
    assert set(plain) == set(meaning.NAMES)


# ---- between two engines ----

HERE, THERE = {"model": "org/model", "cache_dtype": "fp8_e4m3"}, {"model": "org/other", "cache_dtype": "fp8_e5m2"}


def test_a_pull_is_refused_in_one_line_and_moves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(link_seconds=5, patience_seconds=2)
    owner, puller = End(0, settings, {**LAYOUT, **THERE}), End(1, settings, {**LAYOUT, **HERE})
    with closing(owner.service), closing(puller.service):
        lease = new_lease_name()
        owner.service.keep("r", lease, [3, 9], PROMPT)
        puller.service.pull(order("r", lease, owner.address))
        assert puller.until("received", "r").failed == {"r": (0, 1)}
        assert puller.holds(0) == {16}
        lines = [each.getMessage() for each in caplog.records if "fp8_e5m2" in each.getMessage()]
        assert len(lines) == 1
        assert "cache_dtype is fp8_e4m3 here and fp8_e5m2 at " in lines[0]
        assert "model is org/model here and org/other at " in lines[0]


def test_an_engine_that_does_not_say_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(link_seconds=5, patience_seconds=2)
    owner, puller = End(0, settings, LAYOUT), End(1, settings, {**LAYOUT, **HERE})
    with closing(owner.service), closing(puller.service):
        lease = new_lease_name()
        owner.service.keep("r", lease, [3, 9], PROMPT)
        puller.service.pull(order("r", lease, owner.address))
        assert puller.until("received", "r").failed == {"r": (0, 1)}
        assert "model is org/model here and None at " in caplog.text


def test_a_difference_that_is_accepted_is_none() -> None:
    settings = Settings(link_seconds=5, patience_seconds=2, accept_differences=("model", "cache_dtype"))
    owner, puller = End(0, settings, {**LAYOUT, **THERE}), End(1, settings, {**LAYOUT, **HERE})
    with closing(owner.service), closing(puller.service):
        lease = new_lease_name()
        owner.service.keep("r", lease, [3, 9], PROMPT)
        puller.service.pull(order("r", lease, owner.address))
        assert puller.until("received", "r").failed == {}
        assert puller.holds(0) == {3}


@pytest.mark.parametrize("accepted", [(), ("model", "cache_dtype")])
def test_a_push(accepted: tuple[meaning.Meaning, ...], caplog: pytest.LogCaptureFixture) -> None:
    prefill = PushEnd(0, {**PUSH_LAYOUT, **HERE}, accept_differences=accepted)
    decode = PushEnd(1, {**PUSH_LAYOUT, **THERE}, accept_differences=accepted)
    with closing(prefill.service), closing(decode.service):
        decode.expect("r", prefill.address)
        prefill.step("r")
        prefill.service.pushed("r", "p")
        failed = decode.received("r").failed
        prefill.sent("p")
    assert bool(failed) is not bool(accepted)
    refused = "cache_dtype is fp8_e4m3 at the prefill engine and fp8_e5m2 at the decode engine"
    assert (refused in caplog.text) is not bool(accepted)


def test_sizes_cannot_be_accepted() -> None:
    for name in ("dtype", "block_shape", "anything"):
        with pytest.raises(ValidationError, match="accept_differences"):
            Settings.model_validate({"accept_differences": [name]})
    with pytest.raises(ValidationError, match="model_id"):
        Settings(model_id="")
