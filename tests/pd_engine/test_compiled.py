"""Covers pd_engine.compiled and csrc/linear.h, norm.h: packed linear layers and norms against
torch's for forms, types and instruction sets; that a row's result doesn't depend on its
batch, bit by bit, for layers and for a whole model; what is left alone; the plain way.
"""

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from pd_engine import pages
from pd_engine.attention.library import Missing, Native, load
from pd_engine.compiled import Compiled, CompiledNorm, CompiledRotary, PackedLinear, compile_model
from pd_engine.model import torch_multiplies_bf16
from pd_engine.runner import Runner
from pd_engine.types import Batch, Row, SampleSpec, Sampling
from tests.tiny_model import tiny_model_dir

FOUND = load()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

needs_library = pytest.mark.skipif(
    isinstance(FOUND, Missing), reason=f"compiled code: {getattr(FOUND, 'reason', '')}"
)


@pytest.fixture(params=["baseline", "avx2", "avx512", "avx512bf16"])
def lib(request: pytest.FixtureRequest) -> Iterator[Native]:
    if isinstance(FOUND, Missing):
        pytest.skip(FOUND.reason)
    usual = FOUND.variant
    if not FOUND.use(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield FOUND
    FOUND.use(usual)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def a_linear(inner: int, outer: int, bias: bool, dtype: torch.dtype) -> torch.nn.Linear:
    layer = torch.nn.Linear(inner, outer, bias=bias, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(random(outer, inner, seed=1, dtype=dtype) * inner**-0.5)
    if layer.bias is not None:
        layer.bias.copy_(random(outer, seed=2, dtype=dtype))
    return layer


def packed(lib: Native, layer: torch.nn.Linear) -> PackedLinear:
    model = torch.nn.Sequential(layer)
    assert compile_model(model, lib) == Compiled(1, 0, 0)
    made = model[0]
    assert isinstance(made, PackedLinear)
    return made


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (7, 5), (64, 48), (300, 100), (1000, 49)])
def test_packed_linear(lib: Native, dtype: torch.dtype, bias: bool, inner: int, outer: int) -> None:
    layer = a_linear(inner, outer, bias, dtype)
    weight, offset = layer.weight.float(), None if layer.bias is None else layer.bias.float()
    made = packed(lib, layer)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for rows in (1, 2, 3, 4, 5, 9, 16, 17, 125):
        x = random(rows, inner, seed=rows, dtype=dtype)
        expected = linear(x.float(), weight, offset)
        torch.testing.assert_close(made(x).float(), expected, atol=tolerance, rtol=tolerance)


def test_inputs_of_other_forms(lib: Native) -> None:
    layer = a_linear(24, 40, True, torch.float32)
    weight, bias = layer.weight.clone(), layer.bias.clone()
    made = packed(lib, layer)
    wide = random(3, 50, 30)
    for x in (wide[:, :, 6:], wide[:, :24].transpose(1, 2), wide[:, 2:3, 6:], random(24)):
        torch.testing.assert_close(made(x), linear(x, weight, bias), atol=1e-5, rtol=1e-5)
    assert made(random(0, 24)).shape == (0, 40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_result_is_its_own(lib: Native, dtype: torch.dtype) -> None:
    """Bit by bit the same alone, in any batch, with any number of threads."""
    made = packed(lib, a_linear(700, 130, True, dtype))
    x = random(261, 700, dtype=dtype)
    whole = made(x)
    before = torch.get_num_threads()
    try:
        for rows in (1, 2, 3, 5, 8, 9, 31, 130):
            torch.set_num_threads(1 + rows % 3)
            for first in range(0, 261, rows):
                assert torch.equal(made(x[first : first + rows]), whole[first : first + rows])
    finally:
        torch.set_num_threads(before)


class LlamaRMSNorm(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(weight), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class GemmaRMSNorm(LlamaRMSNorm):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        self.eps = self.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class OddRMSNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [5, 64, 577])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_norms(lib: Native, dtype: torch.dtype, dim: int, kind: type[LlamaRMSNorm]) -> None:
    norm = kind(random(dim, dtype=dtype))
    model = torch.nn.Sequential(norm)
    assert compile_model(model, lib) == Compiled(0, 1, 0)
    assert isinstance(model[0], CompiledNorm)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    for x in (random(1, dim, dtype=dtype), random(2, 70, 3, dim, dtype=dtype).transpose(1, 2)):
        torch.testing.assert_close(model[0](x), norm(x), atol=tolerance, rtol=tolerance)


# ---- rotation ---------------------------------------------------------------------------


def rotary_of(family: str) -> Any:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return module.apply_rotary_pos_emb


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "dim", "rotary"), [("llama", 64, 64), ("llama", 6, 6), ("phi3", 16, 12)]
)
def test_rotary(lib: Native, dtype: torch.dtype, family: str, dim: int, rotary: int) -> None:
    original = rotary_of(family)
    made = CompiledRotary(lib, original)
    for tokens in (1, 3, 200):
        # As models have them: [token, head, dim] in memory.
        q = random(1, tokens, 6, dim, dtype=dtype).transpose(1, 2)
        k = random(1, tokens, 2, dim, seed=1, dtype=dtype).transpose(1, 2)
        cos, sin = (random(1, tokens, rotary, seed=i, dtype=dtype) for i in (2, 3))
        found, wanted = made(q, k, cos, sin), original(q, k, cos, sin)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def test_rotations_of_other_forms_take_the_original_way(lib: Native) -> None:
    original = rotary_of("llama")
    made = CompiledRotary(lib, original)
    q, k, cos, sin = (random(2, 3, 5, 8, seed=i) for i in range(4))
    both = made(q, k, cos[:, 0], sin[:, 0]), original(q, k, cos[:, 0], sin[:, 0])
    for found, wanted in zip(*both, strict=True):
        assert torch.equal(found, wanted)


@needs_library
def test_other_models_of_the_process_keep_their_rotation() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    before = rotary_of("llama")
    runner = tiny(compiled=True)
    assert rotary_of("llama") is before
    layer: Any = next(m for m in runner._model.module.modules() if isinstance(m, LlamaAttention))
    replaced = layer.forward.__func__.__globals__["apply_rotary_pos_emb"]
    assert isinstance(replaced, CompiledRotary)
    assert "forward" not in vars(type(layer)(layer.config, 0))


def test_what_is_left_alone(lib: Native) -> None:
    class Own(torch.nn.Linear):
        pass

    kept = (
        OddRMSNorm(random(8)),
        torch.nn.LayerNorm(8),
        Own(8, 8),
        torch.nn.Linear(8, 8, dtype=torch.float64),
    )
    model = torch.nn.Sequential(*kept)
    assert compile_model(model, lib) == Compiled(0, 0, 0)
    assert all(a is b for a, b in zip(model, kept, strict=True))
    both = torch.nn.Sequential(torch.nn.Linear(8, 8))
    assert compile_model(both, lib, linears=False) == Compiled(0, 0, 0)


def test_whose_bfloat16_torch_knows_better(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    for flags, expected in (("avx2 amx_bf16", True), ("avx512_bf16", False), ("avx2", False)):
        info.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
        assert torch_multiplies_bf16(info) is expected
    info.write_text("processor : 0\nFeatures\t: fp asimd bf16\n")
    assert torch_multiplies_bf16(info)
    assert not torch_multiplies_bf16(tmp_path / "none")


# ---- a whole model --------------------------------------------------------------------


def batch(*rows: tuple[int, int]) -> Batch:
    """Rows of (start, tokens), each in blocks of its own; all ask for a token."""
    made = []
    for i, (start, tokens) in enumerate(rows):
        blocks = tuple(range(10 * i, 10 * i + 10))
        ids = [(start + j * 7 + i * 31) % 500 for j in range(tokens)]
        spec = SampleSpec(0, 0, Sampling(max_tokens=1, logprobs=True, top_logprobs=4))
        made.append(Row(i, ids, start, blocks, (spec,)))
    return Batch(1, tuple(made))


def tiny(compiled: bool) -> Runner:
    return Runner(tiny_model_dir(), dtype="float32", kv_cache_tokens=2000, compiled=compiled)


@needs_library
def test_logits_of_a_row_do_not_depend_on_its_batch() -> None:
    runner = tiny(compiled=True)
    rows = ((0, 100), (0, 33), (0, 1), (0, 150))
    runner.step(batch(*rows))
    decode = batch(*((tokens, 1) for _, tokens in rows))
    together = runner.step(decode).samples
    mixed = runner.step(Batch(2, (*decode.rows[:3], batch(*rows).rows[3]))).samples
    for row in decode.rows[:3]:
        alone = runner.step(Batch(3, (row,))).samples
        assert alone[row.seq_id] == together[row.seq_id] == mixed[row.seq_id]


def test_without_the_library_the_engine_says_so_and_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "load", lambda: Missing("not built; do this and that"))
    with caplog.at_level(logging.WARNING):
        runner = tiny(compiled=True)
    assert "not built; do this and that" in caplog.text
    assert runner.attention == "plain torch"
    assert runner.step(batch((0, 20))).samples[0]


@needs_library
def test_plain_and_compiled_agree() -> None:
    steps = [batch((0, 90), (0, 3)), batch((90, 1), (3, 20)), batch((91, 1), (23, 1))]
    plain, compiled = tiny(compiled=False), tiny(compiled=True)
    assert compiled.attention.startswith("compiled")
    for step in steps:
        a, b = plain.step(step).samples, compiled.step(step).samples
        for seq_id, samples in a.items():
            assert samples[0].token == b[seq_id][0].token
            assert samples[0].logprob == pytest.approx(b[seq_id][0].logprob, abs=1e-4)
