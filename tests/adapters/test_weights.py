"""Weights that changed in place are other weights: two engines of one folder, started before and after an update."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiodatadist._adapters import meaning, weights
from aiodatadist._adapters.sglang import identity as sglang_identity
from aiodatadist._adapters.vllm import identity as vllm_identity
from tests.adapters.test_meaning import vllm_config

TENSORS = {f"layers.{number}.weight": bytes([number]) * 300 for number in range(40)}


def write(file: Path, tensors: dict[str, bytes]) -> None:
    """Write a safetensors file."""
    header, begin = {"__metadata__": {"format": "pt"}}, 0
    for name, content in tensors.items():
        place = {"dtype": "U8", "shape": [len(content)], "data_offsets": [begin, begin + len(content)]}
        header[name] = place  # type: ignore[assignment]
        begin += len(content)
    said = json.dumps(header).encode()
    file.write_bytes(len(said).to_bytes(8, "little") + said + b"".join(tensors.values()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "current"
    made.mkdir()
    (made / "config.json").write_text("{}")
    for number in range(2):
        write(made / f"model-{number}.safetensors", TENSORS)
    return made


def names(folder: Path) -> tuple[str, str]:
    """Return what a vLLM and an SGLang engine say that are started now."""
    config = vllm_config(model_config__model=str(folder))
    server = SimpleNamespace(model_path=str(folder), dtype="bfloat16")
    return (
        vllm_identity.meaning_of(config, None)["model"],
        sglang_identity.meaning_of(SimpleNamespace(), server, None)["model"],
    )


@pytest.mark.parametrize("changed", ["layers.0.weight", "layers.17.weight", "layers.39.weight"])
def test_an_update_in_the_same_folder_is_another_model(folder: Path, changed: str) -> None:
    """The blocks of the old weights were used with the new ones, without a word in either log."""
    before = names(folder)
    assert names(folder) == before
    write(folder / "model-1.safetensors", {**TENSORS, changed: b"\xff" * 300})
    assert not set(names(folder)) & set(before)
    write(folder / "model-1.safetensors", TENSORS)
    assert names(folder) == before


def test_equal_weights_in_two_places_have_one_name_that_says_no_path(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "secret project" / "current")
    assert names(copy) == names(folder)
    assert names(copy)[0].startswith("current #")
    (folder / "model-1.safetensors").unlink()
    assert names(copy) != names(folder)


def test_weights_in_other_formats(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\0" * 100_000)
    found = {names(folder)}
    (folder / "pytorch_model.bin").write_bytes(b"\1" * 100_000)
    found.add(names(folder))
    file = folder.parent / "one.gguf"
    file.write_bytes(b"GGUF" * 1000)
    found.add(names(file))
    file.write_bytes(b"GGUF" * 999 + b"gguf")
    assert len(found | {names(file)}) == 4


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 7, b"\xff" * 8, (1 << 62).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null", (9).to_bytes(8, "little") + b'{"a": 12}', b"\x05" + b"\0" * 7 + b"{nope",
        (50_000).to_bytes(8, "little") + b"[" * 50_000,
        (31).to_bytes(8, "little") + b'{"a": {"data_offsets": [-9,0]}}',
        b"\x1e" + b"\0" * 7 + b'{"a": {"data_offsets": ["x"]}}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_safetensors_has_a_digest_of_its_own(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    digest = weights.digest_of_weights(str(tmp_path))
    assert digest is not None
    file.write_bytes(content + b"\1" * 100)
    assert weights.digest_of_weights(str(tmp_path)) != digest


@pytest.mark.parametrize(
    "place", ["~no-such-user/model", "org/model", "", "/", "/nowhere", "\0", "s3://bucket/model", "x" * 5000]
)
def test_what_is_no_folder_of_weights_is_named_as_it_is_written(place: str) -> None:
    assert weights.digest_of_weights(place) is None
    assert meaning.model_name(place, None) == meaning.model_name(place, None)


def test_samples_are_few_in_however_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SAMPLES", 20)
    for number in range(4):
        write(tmp_path / f"model-{number}.safetensors", TENSORS)
    for each in tmp_path.iterdir():
        with each.open("rb") as file:
            assert len(list(weights.samples(file, each.stat().st_size, 5))) == 5
    assert weights.digest_of_weights(str(tmp_path)) is not None


def test_a_hub_s_commit_is_part_of_the_name() -> None:
    """A branch such as ``main`` has other weights after an update."""
    said = [
        vllm_identity.meaning_of(vllm_config(model_config__hf_config___commit_hash=commit), None)["model"]
        for commit in (None, "1" * 40, "2" * 40)
    ]
    assert said[0] == "org/model"
    assert len(set(said)) == 3
