"""Covers pd_engine.attention: the paged step, in plain torch and compiled for each instruction
set that this CPU has, against attention written out densely, for prefill, chunks, decode,
mixed batches, windows, soft-caps and sinks; the mask tables; the pool's layout, copies and
reports of finished layers. test_native.py goes further into the compiled way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_core.kv import KvLayout
from pd_engine.attention.library import Native, load
from pd_engine.attention.paged import PagedAttention, PagedStep
from pd_engine.attention.plain import QUERY_TILE, CausalMasks
from pd_engine.attention.pool import KvPool
from pd_engine.attention.rows import Options
from pd_engine.types import Row

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4
SCALE = 0.3

torch.set_num_threads(1)

Way = Native | None


@pytest.fixture(scope="module", params=["plain", "baseline", "avx2", "avx512"])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """How attention is computed: None is plain torch, else the library for a kind of CPU."""
    if request.param == "plain":
        yield None
        return
    native = load()
    if not isinstance(native, Native):
        pytest.skip(f"compiled attention: {native.reason}")
    usual = native.variant
    if not native.use(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield native
    native.use(usual)


def layout(layers: int = 2, dtype: str = "float32") -> KvLayout:
    return KvLayout("hash", dtype, BLOCK, layers, KV_HEADS, DIM)


@dataclass
class Sequence_:
    """A sequence's whole query, key and value, and where its blocks are."""

    query: torch.Tensor  # [HEADS, T, DIM]
    key: torch.Tensor  # [KV_HEADS, T, DIM]
    value: torch.Tensor
    blocks: list[int]

    @classmethod
    def random(cls, tokens: int, blocks: list[int], seed: int) -> "Sequence_":
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int) -> torch.Tensor:
            return torch.randn(heads, tokens, DIM, generator=generator)

        return cls(normal(HEADS), normal(KV_HEADS), normal(KV_HEADS), blocks)

    def row(self, seq_id: int, start: int, tokens: int) -> Row:
        return Row(seq_id, [0] * tokens, start, self.blocks)


def dense(sequence: Sequence_, options: Options) -> torch.Tensor:
    """[T, HEADS, DIM]: every key under an explicit mask, in float64."""
    key, value = (
        t.double().repeat_interleave(HEADS // KV_HEADS, 0) for t in (sequence.key, sequence.value)
    )
    scores = torch.einsum("htd,hsd->hts", sequence.query.double(), key) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    back = torch.arange(key.shape[1])[:, None] - torch.arange(key.shape[1])[None, :]
    hidden = (back < 0) | (back >= (options.window or key.shape[1]))
    exp = torch.exp(scores.masked_fill(hidden, float("-inf")))
    total = exp.sum(-1, keepdim=True)
    if options.sinks is not None:
        total = total + torch.exp(options.sinks.double())[:, None, None]
    return torch.einsum("hts,hsd->thd", exp / total, value)


def run_step(
    attention: PagedAttention,
    parts: Sequence[tuple[Sequence_, int, int]],
    options: Options,
    layer: int = 1,
) -> list[torch.Tensor]:
    """One step of (sequence, start, tokens) each -> each one's output."""
    rows = [s.row(i, start, tokens) for i, (s, start, tokens) in enumerate(parts)]
    step = PagedStep(attention, rows)

    def flat(name: str) -> torch.Tensor:
        return torch.cat([getattr(s, name)[:, b : b + n] for s, b, n in parts], dim=1)

    out = step.attend(layer, flat("query"), flat("key"), flat("value"), options)
    return list(out.split([tokens for _, _, tokens in parts]))


OPTIONS = {
    "plain": Options(SCALE),
    "window": Options(SCALE, window=5),
    "softcap": Options(SCALE, softcap=2.0),
    "sinks": Options(SCALE, sinks=torch.linspace(-1, 1, HEADS)),
    "all": Options(SCALE, window=7, softcap=1.5, sinks=torch.linspace(-1, 1, HEADS)),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 23])
def test_any_chunking_equals_dense_attention(way: Way, options: Options, chunk: int) -> None:
    sequence = Sequence_.random(23, [9, 2, 7, 0, 5, 3], seed=chunk)
    pool = PagedAttention(KvPool(layout(), 10, CPU), way)
    parts = []
    for start in range(0, 23, chunk):
        parts += run_step(pool, [(sequence, start, min(chunk, 23 - start))], options)
    torch.testing.assert_close(
        torch.cat(parts).double(), dense(sequence, options), atol=1e-5, rtol=1e-5
    )


@given(data=st.data())
def test_rows_of_a_mixed_batch_do_not_disturb_each_other(way: Way, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4), label="lengths")
    order = data.draw(st.permutations(range(24)), label="blocks")
    options = OPTIONS[data.draw(st.sampled_from(sorted(OPTIONS)), label="options")]
    sequences, pool = [], PagedAttention(KvPool(layout(), 24, CPU), way)
    for i, length in enumerate(lengths):
        sequences.append(Sequence_.random(length, order[i * 5 : (i + 1) * 5], seed=i))
    done = [0] * len(sequences)
    outs: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        live = [i for i, n in enumerate(lengths) if done[i] < n]
        sizes = [data.draw(st.integers(1, lengths[i] - done[i]), label="chunk") for i in live]
        step = [(sequences[i], done[i], size) for i, size in zip(live, sizes, strict=True)]
        for i, size, out in zip(live, sizes, run_step(pool, step, options), strict=True):
            outs[i].append(out)
            done[i] += size
    for sequence, parts in zip(sequences, outs, strict=True):
        torch.testing.assert_close(
            torch.cat(parts).double(), dense(sequence, options), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("window", [None, 300])
def test_a_chunk_longer_than_a_tile(way: Way, window: int | None) -> None:
    tokens = QUERY_TILE + 70
    sequence = Sequence_.random(tokens, list(range(tokens // BLOCK + 1, -1, -1)), seed=1)
    pool = PagedAttention(KvPool(layout(), len(sequence.blocks), CPU), way)
    options = Options(SCALE, window)
    first = run_step(pool, [(sequence, 0, 30)], options)
    rest = run_step(pool, [(sequence, 30, tokens - 30)], options)
    torch.testing.assert_close(
        torch.cat(first + rest).double(), dense(sequence, options), atol=1e-5, rtol=1e-5
    )


def test_masks_are_views_of_one_table() -> None:
    masks = CausalMasks(torch.float32, CPU)
    mask = masks.tile(3, 2, None)
    seen = mask == 0
    assert seen.tolist() == [
        [True, True, True, False, False],
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]
    assert masks.tile(3, 5, None).untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()
    assert (masks.tile(2, 3, 2) == 0).tolist() == [
        [False, False, True, True, False],
        [False, False, False, True, True],
    ]
    far = masks.tile(1, 5 * QUERY_TILE, None)
    assert far.shape == (1, 5 * QUERY_TILE + 1)
    assert (far == 0).all()


def test_the_pool_has_the_layout_that_travels(way: Way) -> None:
    pool = KvPool(layout(), 4, CPU)
    sequence = Sequence_.random(6, [3, 1], seed=2)
    run_step(PagedAttention(pool, way), [(sequence, 0, 6)], OPTIONS["plain"], layer=1)
    assert pool.buffer is not None
    assert pool.buffer.nbytes == 4 * layout().block_bytes
    flat = torch.frombuffer(pool.buffer, dtype=torch.float32)
    blocks = flat.view(4, 2, 2, BLOCK, KV_HEADS, DIM)
    for position in range(6):
        at = blocks[sequence.blocks[position // BLOCK], 1, :, position % BLOCK]
        torch.testing.assert_close(at[0], sequence.key[:, position], atol=0, rtol=0)
        torch.testing.assert_close(at[1], sequence.value[:, position], atol=0, rtol=0)
    assert blocks[:, 0].eq(0).all()
    assert blocks[[0, 2]].eq(0).all()
    assert blocks[1, 1, :, 2:].eq(0).all()


def test_blocks_are_copied_in_order() -> None:
    pool = KvPool(layout(), 3, CPU)
    pool.tensor.copy_(torch.arange(3).view(3, 1, 1, 1, 1, 1).expand_as(pool.tensor))
    pool.copy_blocks([(2, 0), (1, 2), (0, 1)])
    assert [int(pool.tensor[i].unique()) for i in range(3)] == [2, 2, 1]


def test_finished_layers_are_reported_by_groups(way: Way) -> None:
    reports: list[tuple[int, int]] = []
    pool = KvPool(layout(layers=7), 2, CPU)
    sequence = Sequence_.random(2, [0], seed=3)
    step = PagedStep(
        PagedAttention(pool, way),
        [sequence.row(0, 0, 2)],
        lambda first, end: reports.append((first, end)),
        layer_group=3,
    )
    for layer in range(7):
        step.attend(layer, sequence.query, sequence.key, sequence.value, OPTIONS["plain"])
        written = pool.tensor[0, layer, 0, :2]
        torch.testing.assert_close(written, sequence.key.transpose(0, 1), atol=0, rtol=0)
    assert reports == [(0, 3), (3, 6), (6, 7)]


@pytest.mark.parametrize(("start", "tokens", "blocks"), [(0, 5, 1), (8, 1, 2), (0, 0, 1)])
def test_a_row_that_does_not_fit_its_blocks_is_refused(
    start: int, tokens: int, blocks: int
) -> None:
    row = Row(7, [0] * tokens, start, list(range(blocks)))
    with pytest.raises(ValueError, match="sequence 7"):
        PagedStep(PagedAttention(KvPool(layout(), 4, CPU), None), [row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision_stays_close(way: Way, dtype: torch.dtype) -> None:
    sequence = Sequence_.random(12, [0, 1, 2], seed=4)
    name = str(dtype).removeprefix("torch.")
    attention = PagedAttention(KvPool(layout(dtype=name), 3, CPU), way)
    low = Sequence_(
        sequence.query.to(dtype), sequence.key.to(dtype), sequence.value.to(dtype), [0, 1, 2]
    )
    outs = []
    for start, tokens in ((0, 5), (5, 6), (11, 1)):
        step = PagedStep(attention, [low.row(0, start, tokens)])
        cut = slice(start, start + tokens)
        part = (low.query[:, cut], low.key[:, cut], low.value[:, cut])
        outs.append(step.attend(0, *part, OPTIONS["plain"]))
    expected = dense(sequence, OPTIONS["plain"])
    torch.testing.assert_close(torch.cat(outs).double(), expected, atol=0.05, rtol=0.05)
