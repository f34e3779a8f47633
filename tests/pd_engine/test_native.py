"""Covers pd_engine.attention.native, build and csrc/: the compiled attention against
`attend_exact` for random forms, types, windows, soft-caps, sinks, block sizes and mixed
batches; that a query's result depends, bit by bit, neither on its batch nor on threads nor
on how its prompt was cut; what is refused; life without the library or a compiler.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_core.kv import KvLayout
from pd_engine import build
from pd_engine.attention import library
from pd_engine.attention.exact import attend_exact
from pd_engine.attention.library import Missing, Native, load
from pd_engine.attention.native import NativeStep
from pd_engine.attention.pool import KvPool
from pd_engine.attention.rows import Options, RowPlan

CPU = torch.device("cpu")
FOUND = load()

pytestmark = pytest.mark.skipif(
    isinstance(FOUND, Missing), reason=f"compiled attention: {getattr(FOUND, 'reason', '')}"
)


@pytest.fixture(params=["baseline", "avx2", "avx512", "avx512bf16"])
def lib(request: pytest.FixtureRequest) -> Iterator[Native]:
    assert isinstance(FOUND, Native)
    usual = FOUND.variant
    if not FOUND.use(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield FOUND
    FOUND.use(usual)


@pytest.fixture
def threads() -> Iterator[None]:
    """More than one thread, so that items really are shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Form:
    """A model's and a pool's measures."""

    kv_heads: int = 2
    group: int = 3
    dim: int = 16
    block_tokens: int = 4
    dtype: str = "float32"

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Prompt:
    """One row: keys and values of all positions, queries of those from `start` on."""

    query: torch.Tensor  # [heads, tokens, dim]
    key: torch.Tensor  # [kv_heads, start + tokens, dim]
    value: torch.Tensor

    @classmethod
    def random(cls, form: Form, start: int, tokens: int, seed: int) -> "Prompt":
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, form.dtype)

        def normal(heads: int, count: int) -> torch.Tensor:
            # As the models have it: [token, head, dim] in memory.
            shape = (count, heads, form.dim)
            return torch.randn(shape, generator=generator).to(dtype).transpose(0, 1)

        context = start + tokens
        return cls(
            normal(form.heads, tokens) * 2,
            normal(form.kv_heads, context),
            normal(form.kv_heads, context),
        )

    @property
    def tokens(self) -> int:
        return self.query.shape[1]

    @property
    def start(self) -> int:
        return self.key.shape[1] - self.tokens

    def tail(self, tokens: int) -> "Prompt":
        """The same row when all but its last tokens were computed before."""
        return Prompt(self.query[:, -tokens:], self.key, self.value)

    def expected(self, options: Options) -> torch.Tensor:
        """[tokens, heads, dim] by the reference, in float32."""
        query = self.query.float().unflatten(0, (self.key.shape[0], -1))
        back = torch.arange(self.start, self.start + self.tokens)[:, None]
        back = back - torch.arange(self.key.shape[1])[None, :]
        hidden = (back < 0) | (back >= (options.window or self.key.shape[1]))
        sinks = options.sinks
        out = attend_exact(
            query,
            self.key.float(),
            self.value.float(),
            scale=options.scale,
            mask=torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")),
            softcap=options.softcap,
            sinks=None if sinks is None else sinks.view(query.shape[:2]),
        )
        return out.permute(2, 0, 1, 3).flatten(1, 2)


def attend(
    lib: Native, form: Form, prompts: Sequence[Prompt], options: Options, shuffle: int = 0
) -> list[torch.Tensor]:
    """One step of all rows in layer 1 of a pool whose blocks are dealt out at random."""
    layout = KvLayout("hash", form.dtype, form.block_tokens, 3, form.kv_heads, form.dim)
    needs = [layout.blocks_for(p.start + p.tokens) for p in prompts]
    pool = KvPool(layout, sum(needs) + 1, CPU)
    pool.tensor.fill_(float("nan"))  # whatever isn't this row's must not be looked at
    order = torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(shuffle))
    free = iter(order.tolist())
    plans, begin = [], 0
    for prompt, need in zip(prompts, needs, strict=True):
        plan = RowPlan(begin, prompt.tokens, prompt.start, [next(free) for _ in range(need)])
        for position in range(prompt.start):
            place = pool.tensor[plan.blocks[position // form.block_tokens], 1]
            place[0, position % form.block_tokens] = prompt.key[:, position]
            place[1, position % form.block_tokens] = prompt.value[:, position]
        plans.append(plan)
        begin += prompt.tokens
    step = NativeStep(lib, pool, plans)
    key = torch.cat([p.key[:, p.start :] for p in prompts], dim=1)
    value = torch.cat([p.value[:, p.start :] for p in prompts], dim=1)
    query = torch.cat([p.query for p in prompts], dim=1)
    step.write(1, key, value)
    out = step.attend(1, query, key, value, options)
    assert pool.tensor[:, [0, 2]].isnan().all()
    return list(out.split([p.tokens for p in prompts]))


def close(form: Form, found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if form.dtype == "float32" else 2e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


TABLE = {
    # name: (form, rows of (start, tokens), options)
    "decode over several splits": (Form(), [(1300, 1)], Options(0.25)),
    "decode without a group": (
        Form(kv_heads=3, group=1, dim=64),
        [(70, 1), (0, 1)],
        Options(0.125),
    ),
    "a wide group": (Form(kv_heads=1, group=20, dim=8), [(300, 1)], Options(0.3)),
    "a head that fills no vector": (Form(dim=6, block_tokens=3), [(90, 1), (0, 40)], Options(0.4)),
    "one token a block": (Form(block_tokens=1), [(5, 1), (0, 70)], Options(0.25)),
    "a chunk after a long context": (Form(), [(1200, 90)], Options(0.25)),
    "a few drafts": (Form(), [(500, 5), (63, 2)], Options(0.25)),
    "a long prompt": (Form(dim=64, block_tokens=16), [(0, 700)], Options(0.125)),
    "a mixed batch": (Form(), [(100, 1), (0, 200), (64, 33), (0, 1)], Options(0.25)),
    "a window": (Form(), [(700, 1), (300, 100), (0, 5)], Options(0.25, window=67)),
    "a window of one": (Form(), [(700, 1), (65, 90)], Options(0.25, window=1)),
    "soft-cap": (Form(), [(200, 1), (0, 120)], Options(0.25, softcap=3.0)),
    "sinks": (Form(), [(600, 1), (0, 90)], Options(0.25, sinks=torch.linspace(-3, 9, 6))),
    "all of it, bfloat16": (
        Form(dtype="bfloat16", dim=64),
        [(600, 1), (31, 90), (0, 3)],
        Options(0.1, window=40, softcap=20.0, sinks=torch.linspace(-1, 2, 6)),
    ),
    "float16": (Form(dtype="float16"), [(300, 1), (31, 90)], Options(0.25)),
}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("form", "rows", "options"), TABLE.values(), ids=TABLE)
def test_table(lib: Native, form: Form, rows: list[tuple[int, int]], options: Options) -> None:
    prompts = [Prompt.random(form, start, tokens, i) for i, (start, tokens) in enumerate(rows)]
    for prompt, out in zip(prompts, attend(lib, form, prompts, options), strict=True):
        close(form, out, prompt.expected(options))


@st.composite
def forms(draw: st.DrawFn) -> Form:
    return Form(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        dim=draw(st.sampled_from([2, 8, 12, 16, 40, 64, 80, 128])),
        block_tokens=draw(st.sampled_from([1, 2, 5, 16, 100])),
        dtype=draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"])),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("variant", ["baseline", "avx2", "avx512"])
@given(data=st.data())
def test_random_batches(variant: str, data: st.DataObject) -> None:
    assert isinstance(FOUND, Native)
    usual = FOUND.variant
    if not FOUND.use(variant):
        pytest.skip(f"this CPU has no {variant}")
    form = data.draw(forms(), label="form")
    row = st.tuples(st.sampled_from([0, 1, 30, 64, 300]), st.sampled_from([1, 1, 2, 7, 33, 150]))
    rows = data.draw(st.lists(row, min_size=1, max_size=4), label="rows")
    options = Options(
        form.dim**-0.5,
        window=data.draw(st.none() | st.integers(1, 200), label="window"),
        softcap=data.draw(st.none() | st.floats(0.5, 50), label="softcap"),
        sinks=data.draw(st.none() | st.just(torch.linspace(-2, 4, form.heads)), label="sinks"),
    )
    prompts = [Prompt.random(form, start, tokens, i) for i, (start, tokens) in enumerate(rows)]
    try:
        outs = attend(FOUND, form, prompts, options, data.draw(st.integers(0, 9), label="blocks"))
    finally:
        FOUND.use(usual)
    for prompt, out in zip(prompts, outs, strict=True):
        close(form, out, prompt.expected(options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [Options(0.25), Options(0.25, window=70)], ids=["all", "window"]
)
def test_a_result_depends_on_nothing_but_its_row(lib: Native, options: Options) -> None:
    """Bit by bit: alone or among others, with any number of threads, wherever its blocks are."""
    form = Form(dim=64)
    rows = [(900, 1), (0, 300), (130, 77), (40, 3), (5, 1)]
    prompts = [Prompt.random(form, start, tokens, i) for i, (start, tokens) in enumerate(rows)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [attend(lib, form, [p], options)[0] for p in prompts]
        for count, shuffle in ((1, 1), (2, 2), (5, 3)):
            torch.set_num_threads(count)
            together = attend(lib, form, prompts * 9, options, shuffle)
            for a, b in zip(alone * 9, together, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


def test_a_prompt_may_be_cut_anywhere(lib: Native) -> None:
    """Bit by bit the same for chunks of many tokens, whatever came before them."""
    form = Form(dim=64, kv_heads=4)
    whole = Prompt.random(form, 0, 900, 1)
    expected = attend(lib, form, [whole], Options(0.125))[0]
    for tokens in (200, 333, 899):
        tail = attend(lib, form, [whole.tail(tokens)], Options(0.125))[0]
        assert torch.equal(tail, expected[-tokens:])


def test_scores_that_would_overflow(lib: Native) -> None:
    form = Form()
    prompt = Prompt.random(form, 80, 40, 1)
    large = Prompt(prompt.query * 1e4, prompt.key, prompt.value)
    out = attend(lib, form, [large], Options(1.0))[0]
    close(form, out, large.expected(Options(1.0)))
    sinks = Options(0.25, sinks=torch.full((form.heads,), 1e4))
    assert attend(lib, form, [prompt], sinks)[0].eq(0).all()


# ---- what is refused ------------------------------------------------------------------


def step(form: Form, blocks: Sequence[int] = (0, 1), tokens: int = 5) -> NativeStep:
    layout = KvLayout("hash", form.dtype, form.block_tokens, 1, form.kv_heads, form.dim)
    assert isinstance(FOUND, Native)
    return NativeStep(FOUND, KvPool(layout, 2, CPU), [RowPlan(0, tokens, 0, blocks)])


@pytest.mark.parametrize("blocks", [(0, 2), (-1, 0)])
def test_blocks_outside_the_pool_are_refused(blocks: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match="row 0"):
        step(Form(), blocks)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 4, 16), torch.float32),
        ((2, 5, 8), torch.float32),
        ((3, 5, 16), torch.float32),
        ((2, 5, 16), torch.bfloat16),
    ],
)
def test_other_forms_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    good, wrong = torch.zeros(2, 5, 16), torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=r"step's form|pool's"):
        step(Form()).write(0, good, wrong)
    with pytest.raises(ValueError, match=r"step's form|pool's"):
        step(Form()).attend(0, wrong, good, good, Options(1.0))


# ---- life without it ------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Builds go to an empty folder, and nothing is loaded yet."""
    monkeypatch.setattr(build, "_BUILT", tmp_path)
    load.cache_clear()
    yield
    load.cache_clear()


@pytest.mark.usefixtures("elsewhere")
def test_without_a_build_the_reason_says_what_to_do() -> None:
    found = load()
    assert isinstance(found, Missing)
    assert "python -m pd_engine.build" in found.reason


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("content", [b"", b"\x7fELF nonsense"])
def test_a_damaged_library_is_passed_over(content: bytes) -> None:
    build.ATTENTION.path().write_bytes(content)
    found = load()
    assert isinstance(found, Missing)
    assert "cannot be loaded" in found.reason


def test_a_library_with_another_interface_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    load.cache_clear()
    found = load()
    load.cache_clear()
    assert isinstance(found, Missing)
    assert "interface" in found.reason


@pytest.mark.usefixtures("elsewhere")
def test_without_a_compiler_a_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main([]) == 1
    said = capsys.readouterr().err
    assert "no no-such-compiler here" in said
    assert "plain torch" in said


@pytest.mark.usefixtures("elsewhere")
def test_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    false: Any = shutil.which("false")
    monkeypatch.setenv("CXX", false)
    assert build.main([]) == 1
    assert "failed for baseline" in capsys.readouterr().err
    assert isinstance(load(), Missing)
