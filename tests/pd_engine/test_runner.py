"""Covers pd_engine.runner, model, checkpoint, bundle: tokens equal to transformers'
`generate` in fp32 however a prompt is cut, mixed and placed in the pool; copies, several
samples a row, draws independent of the batch; what is wrong with a model is said.
"""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from pd_engine import assembly
from pd_engine.bundle import make_bundle
from pd_engine.checkpoint import ModelError, open_checkpoint
from pd_engine.model import choose_dtype, prefers_bf16
from pd_engine.runner import Runner
from pd_engine.settings import parse
from pd_engine.types import Batch, Row, Sampled, SampleSpec, Sampling
from tests.pd_engine.families import FAMILIES, greedy, make_model
from tests.tiny_model import CHAT_TEMPLATE, EOS, tiny_model_dir

torch.set_num_threads(1)

BLOCK = 16
POOL_TOKENS = 8192
GREEDY = Sampling(max_tokens=64)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(
        tiny_model_dir(), dtype="float32", block_tokens=BLOCK, kv_cache_tokens=POOL_TOKENS
    )


Generate = Callable[[Sequence[int], int], list[int]]


def reference(folder: Path) -> Generate:
    """transformers' own greedy generation."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    def generate(prompt: Sequence[int], count: int) -> list[int]:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return generate


@pytest.fixture(scope="module")
def generate() -> Generate:
    return reference(tiny_model_dir())


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(3, 512) for i in range(length)]


@dataclass
class Blocks:
    """Hands out blocks in random order."""

    free: list[int]

    @classmethod
    def shuffled(cls, runner: Runner, seed: int = 0) -> "Blocks":
        ids = list(range(runner.num_blocks))
        random.Random(seed).shuffle(ids)
        return cls(ids)

    def take(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // BLOCK))]


@dataclass
class Walk:
    """One sequence on its way through steps."""

    tokens: list[int]
    table: list[int]
    seq_id: int = 0
    choice: int = 0
    sampling: Sampling = GREEDY
    done: int = 0
    out: list[Sampled] = field(default_factory=list)

    def row(self, chunk: int = 10**9) -> Row:
        end = min(len(self.tokens), self.done + chunk)
        spec = SampleSpec(self.choice, len(self.out), self.sampling)
        samples = (spec,) if end == len(self.tokens) else ()
        return Row(self.seq_id, self.tokens[self.done : end], self.done, self.table, samples)

    def absorb(self, row: Row, samples: Sequence[Sampled]) -> None:
        self.done += len(row.token_ids)
        for sampled in samples:
            self.out.append(sampled)
            self.tokens.append(sampled.token)

    @property
    def drawn(self) -> list[int]:
        return [s.token for s in self.out]


def advance(runner: Runner, rows: Sequence[tuple[Walk, int]]) -> None:
    """One step of (walk, chunk) each."""
    made = [(walk, walk.row(chunk)) for walk, chunk in rows]
    output = runner.step(Batch(1, tuple(row for _, row in made)))
    for walk, row in made:
        assert (walk.seq_id in output.samples) == bool(row.samples)
        walk.absorb(row, output.samples.get(walk.seq_id, ()))


def finish(runner: Runner, walk: Walk, count: int, chunk: int = 10**9) -> list[int]:
    while len(walk.out) < count:
        advance(runner, [(walk, chunk)])
    return walk.drawn


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 333])
@pytest.mark.parametrize("chunk", [10**9, 5, BLOCK, 50])
def test_greedy_tokens_equal_generate(
    runner: Runner, generate: Generate, length: int, chunk: int
) -> None:
    ids = prompt(length)
    walk = Walk(list(ids), Blocks.shuffled(runner, length).take(length + 24))
    assert finish(runner, walk, 24, chunk) == generate(ids, 24)


def test_mixed_batches_equal_generate(runner: Runner, generate: Generate) -> None:
    """Sequences that start at different times, whose chunks ride with others' decode rows."""
    blocks = Blocks.shuffled(runner, 1)
    lengths = [1, BLOCK, 70, 200, BLOCK + 1, 40]
    walks = [Walk(prompt(n, n), blocks.take(n + 30), seq_id=n) for n in lengths]
    chooser = random.Random(2)
    for step in range(200):
        live = [w for i, w in enumerate(walks) if step >= 3 * i and len(w.out) < 20]
        if not live:
            break
        chooser.shuffle(live)
        advance(runner, [(walk, chooser.choice([7, BLOCK, 64])) for walk in live])
    for length, walk in zip(lengths, walks, strict=True):
        assert walk.drawn == generate(prompt(length, length), 20)


def test_a_prefix_computed_once_serves_many(runner: Runner, generate: Generate) -> None:
    blocks, ids = Blocks.shuffled(runner, 3), prompt(100, 3)
    first = Walk(list(ids), blocks.take(120))
    finish(runner, first, 4)
    other = ids[: 5 * BLOCK] + prompt(9, 4)
    second = Walk(list(other), first.table[:5] + blocks.take(40), done=5 * BLOCK)
    assert finish(runner, second, 12) == generate(other, 12)


def test_forks_copy_their_last_block_first(runner: Runner, generate: Generate) -> None:
    """n = 3 in one row, then each choice goes on in a copy of the half-full block."""
    blocks, ids = Blocks.shuffled(runner, 5), prompt(BLOCK + 6, 5)
    sampling = Sampling(max_tokens=9, temperature=1.0, seed=4)
    table = blocks.take(len(ids))
    specs = tuple(SampleSpec(c, 0, sampling) for c in range(3))
    first = runner.step(Batch(1, (Row(0, ids, 0, table, specs),))).samples[0]
    assert [s.choice for s in first] == [0, 1, 2]
    assert len({s.token for s in first}) > 1
    walks, copies = [], []
    for choice, sampled in enumerate(first):
        own = blocks.take(40)
        copies.append((table[-1], own[0]))
        walk = Walk([*ids, sampled.token], table[:-1] + own, choice, choice, sampling, len(ids))
        walk.out.append(sampled)
        walks.append(walk)
    rows = [walk.row() for walk in walks]
    output = runner.step(Batch(2, tuple(rows), tuple(copies)))
    for walk, row in zip(walks, rows, strict=True):
        walk.absorb(row, output.samples[walk.seq_id])
        finish(runner, walk, 9)
    for walk in walks:  # the same as alone, in blocks of its own
        alone = Walk(list(ids), Blocks.shuffled(runner, 6).take(60), 0, walk.choice, sampling)
        assert finish(runner, alone, 9, chunk=7) == walk.drawn
    greedy = Walk([*ids, walks[0].drawn[0]], table[:-1] + blocks.take(60), 0, done=BLOCK)
    assert finish(runner, greedy, 9) == generate([*ids, walks[0].drawn[0]], 9)


def test_a_resumed_request_goes_on_as_it_would_have(runner: Runner) -> None:
    sampling = Sampling(max_tokens=20, temperature=0.9, top_p=0.95, seed=8)
    ids = prompt(37, 8)
    whole = Walk(list(ids), Blocks.shuffled(runner, 8).take(80), sampling=sampling)
    finish(runner, whole, 16)
    resumed = Walk([*ids, *whole.drawn[:6]], Blocks.shuffled(runner, 9).take(80), sampling=sampling)
    resumed.out.extend(whole.out[:6])
    assert finish(runner, resumed, 16, chunk=11) == whole.drawn


def test_layers_are_reported_when_their_kv_is_there(runner: Runner) -> None:
    seen: list[tuple[int, int, bool]] = []
    layout, table = runner.layout, Blocks.shuffled(runner, 10).take(20)

    def on_layers(first: int, end: int) -> None:
        start = table[0] * layout.block_bytes + first * layout.layer_bytes
        stop = table[0] * layout.block_bytes + end * layout.layer_bytes
        data = np.frombuffer(runner.kv_buffer[start:stop], dtype=np.float32)
        seen.append((first, end, bool((data != 0).all())))

    runner.kv_buffer[:] = bytes(len(runner.kv_buffer))
    runner.step(Batch(1, (Row(0, prompt(20), 0, table),)), on_layers)
    assert seen == [(0, layout.layers, True)]


def test_blocks_moved_as_bytes_serve_in_another_runner(runner: Runner, generate: Generate) -> None:
    """What a KV transfer does: the receiver decodes from bytes alone."""
    other = Runner(tiny_model_dir(), dtype="float32", block_tokens=BLOCK, kv_cache_tokens=512)
    assert other.layout == runner.layout
    ids, size = prompt(45, 11), runner.layout.block_bytes
    walk = Walk(list(ids), Blocks.shuffled(runner, 11).take(45))
    advance(runner, [(walk, 10**9)])
    table = Blocks.shuffled(other, 12).take(80)
    for source, target in zip(walk.table, table, strict=False):
        other.kv_buffer[target * size : (target + 1) * size] = runner.kv_buffer[
            source * size : (source + 1) * size
        ]
    moved = Walk(walk.tokens, table, done=45, out=walk.out)
    assert finish(other, moved, 10) == generate(ids, 10)


def test_logprobs_are_those_of_the_model(runner: Runner) -> None:
    ids = prompt(30, 13)
    sampling = Sampling(max_tokens=1, logprobs=True, top_logprobs=3)
    walk = Walk(list(ids), Blocks.shuffled(runner).take(30), sampling=sampling)
    advance(runner, [(walk, 10**9)])
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir())
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
    values, best = expected.topk(3)
    assert walk.out[0].logprob == pytest.approx(float(values[0]), abs=1e-4)
    assert [t for t, _ in walk.out[0].top] == best.tolist()


def test_warmup_measures_and_leaves_the_runner_usable(generate: Generate) -> None:
    runner = Runner(tiny_model_dir(), dtype="float32", block_tokens=BLOCK, kv_cache_tokens=BLOCK)
    assert runner.num_blocks == 1
    runner.warmup()
    assert runner.prefill_tokens_per_s > 0
    assert runner.product == f"cpu x{torch.get_num_threads()}"
    walk = Walk(prompt(5), [0])
    assert finish(runner, walk, 8) == generate(prompt(5), 8)


def test_a_pool_larger_than_the_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"of 500000000000 tokens takes \d+ MiB, and \d+ MiB"):
        Runner(tiny_model_dir(), dtype="float32", kv_cache_tokens=500_000_000_000)


def test_a_pool_smaller_than_the_context_is_told_with_the_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only once the model is loaded anybody knows its own limit, or what a share comes to."""
    caplog.set_level("WARNING")
    flags = (
        f"--role both --model {tiny_model_dir()} --served-name m --worker-name w"
        " --host 127.0.0.1 --dtype float32 --kv-transport tcp --kv-cache-tokens 64"
    )
    assembly.load(parse(f"{flags} --max-model-len 65".split()))
    assert "KV cache" not in caplog.text
    assembly.load(parse(f"{flags} --max-model-len 66".split()))
    told = "holds 64 tokens, fewer than the context of 66: longer prompts are refused"
    assert told in caplog.text


def test_bfloat16_runs_and_halves_the_pool() -> None:
    low = Runner(tiny_model_dir(), dtype="bfloat16", kv_cache_tokens=256)
    assert low.layout.dtype == "bfloat16"
    assert low.layout.token_bytes == 2 * 3 * 2 * 16 * 2
    assert len(finish(low, Walk(prompt(20), [2, 1, 0]), 5)) == 5


# ---- other architectures --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_architectures_equal_generate(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    runner = Runner(tmp_path, dtype="float32", kv_cache_tokens=1024)
    ids = prompt(50)
    walk = Walk(list(ids), Blocks.shuffled(runner).take(100))
    drawn = finish(runner, walk, 20, chunk=21)
    assert drawn == greedy(tmp_path, ids, 20)


# ---- what can't be served -------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model to break."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_model_dir(), copy)
    return copy


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        Runner(folder, kv_cache_tokens=64, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "recurrent state"),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 2}, "MLA"),
        ({"model_type": "falcon"}, "attention interface"),
        ({"model_type": "qwen3_next", "num_hidden_layers": 4}, "recurrent state"),
        ({"model_type": "llama4_text", "num_hidden_layers": 2}, "chunked_attention"),
        ({"model_type": "clip"}, "no causal language model"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "both directions"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "both directions"),
        ({"model_type": "roberta", "is_decoder": False}, "both directions"),
        ({"model_type": "made_up"}, "made_up"),
    ],
)
def test_models_of_other_kinds_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    message = refused(tmp_path)
    assert why in message
    assert config["model_type"] in message


@pytest.mark.slow
def test_attention_in_both_directions_is_refused_whatever_says_so(tmp_path: Path) -> None:
    """By the layers themselves, where config.json has no is_decoder."""
    make_model("gemma3_text", tmp_path)
    edit(tmp_path / "config.json", use_bidirectional_attention=True)
    message = refused(tmp_path)
    assert "'gemma3_text' can't be served" in message
    assert "both directions" in message


@pytest.mark.slow
def test_is_decoder_is_asked_only_of_those_that_heed_it(tmp_path: Path) -> None:
    for family in ("bert", "gpt_neox"):
        folder = tmp_path / family
        make_model(family, folder)
        edit(folder / "config.json", is_decoder=family == "bert")
        runner = Runner(folder, dtype="float32", kv_cache_tokens=1024)
        walk = Walk(list(prompt(20)), Blocks.shuffled(runner).take(100))
        assert finish(runner, walk, 5) == greedy(folder, prompt(20), 5)


def test_a_missing_folder_and_a_file_in_its_place(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "no")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "pd_engine.convert" in refused(tmp_path / "m.gguf")


def test_missing_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickles" in refused(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "no *.safetensors" in refused(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "w-1.safetensors"}}')
    assert "w-1.safetensors" in refused(folder)
    (folder / "config.json").write_text("{broken")
    assert "config.json: cannot be read" in refused(folder)
    (folder / "config.json").unlink()
    assert "config.json is missing" in refused(folder)


def test_damaged_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    assert f"it has {len(whole) - 1000} bytes of {len(whole)}" in refused(folder)
    weights.write_bytes(b"\xff" * 64)
    assert "damaged" in refused(folder)
    weights.write_bytes(whole[:8] + b"x" * (len(whole) - 8))
    assert "damaged" in refused(folder)
    weights.write_bytes(b"abc")
    assert "damaged" in refused(folder)


def test_weights_that_do_not_fit(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=4)
    assert "missing keys: model.layers.3" in refused(folder)
    edit(folder / "config.json", num_hidden_layers=3, intermediate_size=64)
    assert "weights" in refused(folder)


def test_quantized_weights(folder: Path) -> None:
    save_file({"w": np.zeros((2, 2), np.int8)}, folder / "model.safetensors")
    assert "I8" in refused(folder)


def test_wrong_settings(folder: Path) -> None:
    assert "dtype 'int3'" in refused(folder, dtype="int3")
    assert "2048 positions" in refused(folder, max_model_tokens=4096)
    assert Runner(folder, kv_cache_tokens=64, max_model_tokens=99).max_model_tokens == 99


def test_a_share_of_memory_that_holds_nothing(folder: Path) -> None:
    with pytest.raises(ModelError, match="holds no KV block"):
        Runner(folder, kv_cache_fraction=1e-12)


# ---- identity, dtype, bundle ----------------------------------------------------------


def test_model_hash_is_that_of_the_contents(folder: Path) -> None:
    first = open_checkpoint(folder).model_hash()
    assert first == open_checkpoint(tiny_model_dir()).model_hash()
    assert first == open_checkpoint(folder).model_hash()
    assert first != open_checkpoint(tiny_model_dir(seed=1)).model_hash()
    edit(folder / "config.json", rope_theta=5e5)
    assert first != open_checkpoint(folder).model_hash()
    shutil.copy(tiny_model_dir() / "config.json", folder / "config.json")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert first != open_checkpoint(folder).model_hash()


def test_auto_dtype_follows_the_machine(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    for flags in ("amx_tile amx_bf16 avx2", "avx512f avx512_bf16"):
        info.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
        assert prefers_bf16(info)
    info.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f\n")
    assert not prefers_bf16(info)
    assert not prefers_bf16(tmp_path / "none")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    expected = torch.bfloat16 if prefers_bf16() else torch.float32
    assert choose_dtype("auto", cpu, torch.float16) == expected
    assert choose_dtype("auto", cuda, torch.float16) == torch.float16
    assert choose_dtype("bfloat16", cpu, torch.float32) == torch.bfloat16


def test_bundle(folder: Path) -> None:
    bundle = make_bundle(folder)
    assert bundle.chat_template == CHAT_TEMPLATE
    assert bundle.special_tokens["eos_token"] == EOS
    assert list(bundle.eos_token_ids) == [2]
    assert (bundle.add_bos, bundle.vocab_size) == (False, 512)
    assert bundle.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert bundle.bundle_hash == make_bundle(tiny_model_dir()).bundle_hash
    (folder / "chat_template.jinja").unlink()
    other = make_bundle(folder)
    assert (other.chat_template, other.bundle_hash != bundle.bundle_hash) == ("", True)


def test_bundle_of_other_layouts(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}],
        bos_token={"content": "<|im_start|>"},
        eos_token="<|endoftext|>",
    )
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    edit(folder / "generation_config.json", eos_token_id=[2, 5])
    bundle = make_bundle(folder)
    assert bundle.chat_template == "d"
    assert bundle.add_bos
    assert list(bundle.eos_token_ids) == [2, 5, 0]


def test_bundle_without_a_usable_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        make_bundle(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        make_bundle(folder)
