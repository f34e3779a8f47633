"""Covers pd_engine.checkpoint and bundle on files that are wrong: a ModelError that names the
file or the field, whatever stands there.
"""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from pd_engine.bundle import make_bundle
from pd_engine.checkpoint import ModelError, open_checkpoint
from tests.tiny_model import tiny_model_dir


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir(), tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        make_bundle(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    "value", ["</s>", [1, None], {"a": 1}, 1.5, -1, 1 << 40, True, float("inf")]
)
def test_end_tokens_that_are_none(folder: Path, value: object) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=value)
    assert "eos_token_id is " in refused(folder)


@pytest.mark.parametrize("value", ["many", [1], -3, 0.5])
def test_a_vocabulary_without_a_size(folder: Path, value: object) -> None:
    edit(folder / "config.json", vocab_size=value)
    assert "vocab_size is " in refused(folder)


def test_a_model_of_several_kinds_of_input(folder: Path) -> None:
    edit(
        folder / "config.json",
        text_config={"vocab_size": 600, "eos_token_id": [7]},
        vocab_size=None,
    )
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos_token_ids == (7,)
    assert checkpoint.vocab_size == make_bundle(folder).vocab_size == 600
    edit(folder / "config.json", text_config=[1])
    assert "text_config must be an object" in refused(folder)


@pytest.mark.parametrize(
    "named", [["x"], {"a": 1}, {"a": "../x"}, {"a": "/etc/hosts"}, {"a": "\0"}]
)
def test_an_index_that_leads_elsewhere(folder: Path, named: object) -> None:
    edit(folder / "model.safetensors.index.json", weight_map=named)
    assert "names " in refused(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_json_that_is_nested_too_deeply(folder: Path, name: str) -> None:
    (folder / name).write_text('{"a":' * 100_000)
    assert f"{name}: cannot be read" in refused(folder)


@pytest.mark.parametrize(
    "header", ["[" * 100_000, '{"a":{"dtype":"F32","data_offsets":[0,1e999]}}']
)
def test_a_header_of_weights_that_is_none(folder: Path, header: str) -> None:
    content = struct.pack("<Q", len(header)) + header.encode()
    (folder / "model.safetensors").write_bytes(content)
    assert "header cannot be read" in refused(folder)


def test_a_chat_template_that_is_no_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    assert "chat_template.jinja: is not UTF-8" in refused(folder)
