"""KV between workers of different precision and block size: every value where it belongs and
nothing else touched, whatever the sizes, prefixes and frames; by tcp, shared memory and
quantized; values that don't fit; answers of a real model."""

import asyncio
import random
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pd_core.failures import FailureKind
from pd_core.kv import KvLayout
from pd_engine import exports as ex
from pd_engine import imports as im
from pd_engine.kv.codec import Codec, Misfit, Part
from pd_engine.kv.memory import KvMemory
from pd_engine.kv.plane import KvPlane, KvSettings
from pd_engine.transfer import ExportLimits, PushHead, TransferId
from pd_engine.types import Mode, Sampling
from tests.pd_engine import kv_rig, worker_rig
from tests.pd_engine.transfer_rig import Digest
from tests.reference import Reference
from tests.tiny_model import tiny_model_dir

Run = Callable[[Coroutine[Any, Any, None]], None]

DTYPES = ("float32", "bfloat16", "float16")
BLOCKS = 24


def layout(dtype: str, block_tokens: int) -> KvLayout:
    return KvLayout("a" * 64, dtype, block_tokens, layers=3, kv_heads=2, head_dim=4)


def values(made: KvLayout, pool: Any) -> torch.Tensor:
    """A pool's bytes as [block, layer, K|V, token, head, dim]."""
    flat = torch.frombuffer(pool, dtype=getattr(torch, made.dtype))
    shape = (2, made.block_tokens, made.kv_heads, made.head_dim)
    return flat.view(-1, made.layers, *shape)


def tokens_of(made: KvLayout, pool: Any, blocks: tuple[int, ...], count: int) -> torch.Tensor:
    """[token, layer, K|V, head, dim] of a request's first tokens."""
    found = values(made, pool)[list(blocks)].permute(0, 3, 1, 2, 4, 5)
    return found.reshape(-1, *found.shape[2:])[:count]


def filled(made: KvLayout, seed: int, scale: float = 1.0) -> bytearray:
    pool = bytearray(BLOCKS * made.block_bytes)
    noise = torch.randn(values(made, pool).shape, generator=torch.Generator().manual_seed(seed))
    values(made, pool).copy_(noise * scale)
    return pool


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


sizes = st.integers(1, 9)


# ---- every value where it belongs ----------------------------------------------------------


def carry(
    p: KvLayout,
    d: KvLayout,
    source: bytearray,
    target: bytearray,
    tokens: int,
    prefix_blocks: int,
    frame_bytes: int,
    steps: list[tuple[float, int, int]],
    quantization: str = "",
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A transfer without sockets; returns both sides' blocks."""
    key, grant, id = (1, 1), b"g" * 16, TransferId("r", 1)
    mine = tuple(random.Random(1).sample(range(BLOCKS), p.blocks_for(tokens)))
    yours = tuple(random.Random(2).sample(range(BLOCKS), d.blocks_for(tokens)))
    exports = ex.Exports(p, Digest, ExportLimits(frame_bytes=frame_bytes))
    imports = im.Imports(d, Digest)
    imports.open(
        key,
        grant,
        id,
        block_ids=yours,
        prefix_blocks=prefix_blocks,
        choices=(0,),
        token_count=tokens,
        now=0.0,
    )
    to = ex.Target("d:1", "e", grant, prefix_blocks * d.block_tokens)
    exports.open(key, id, to, block_ids=mine, token_count=tokens, lease_s=9, now=0.0)
    memory = KvMemory(memoryview(source), p)
    sender, receiver = Codec(memory), Codec(KvMemory(memoryview(target), d))
    first = kv_rig.first_tokens(0)
    progress = [(round(part * tokens), start, start + count) for part, start, count in steps]
    for computed, start, end in [*progress, (tokens, 0, p.layers)]:
        exports.progress(key, computed, start, min(end, p.layers), 0.0)
        if computed == tokens and (start, end) == (0, p.layers):
            exports.seal(key, first, 0, 0.0)
        while isinstance(job := exports.next_job(key, 0.0), ex.PushJob):
            r = job.range
            payload = b"".join(memory.slices(job.block_ids, r.layer_start, r.layer_count))
            if quantization:
                part = Part(job.block_ids, r.layer_start, r.layer_count)
                payload = sender.encode(part, quantization) or b""
            head = PushHead(grant, id, r, len(payload), 7, quantization=quantization)
            to_write = imports.push_begin(1, head, 0.0, p)
            assert isinstance(to_write, im.Accept), to_write
            for _ in receiver.decode(memoryview(payload), r.block_count, p, quantization, to_write):
                pass
            assert imports.push_end(1, 7, 0.0) == []
            exports.pushed(key, 7, 0.0, len(payload))
        if isinstance(job, ex.SealJob):
            break
    assert isinstance(job, ex.SealJob)
    assert isinstance(imports.seal(1, job.head, 0.0)[0], im.Committed)
    return mine, yours


@given(
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    block_tokens=st.tuples(sizes, sizes),
    tokens=st.integers(1, 20),
    prefix=st.integers(0, 20),
    frame_slices=st.integers(0, 12),
    steps=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2), st.integers(1, 3)), max_size=4),
)
def test_every_value_arrives_and_nothing_else_is_touched(
    dtypes: tuple[str, str],
    block_tokens: tuple[int, int],
    tokens: int,
    prefix: int,
    frame_slices: int,
    steps: list[tuple[float, int, int]],
) -> None:
    p, d = layout(dtypes[0], block_tokens[0]), layout(dtypes[1], block_tokens[1])
    prefix_blocks = min(prefix, tokens) // d.block_tokens
    source, target = filled(p, 1), filled(d, 2)
    before = bytes(target)
    mine, yours = carry(
        p, d, source, target, tokens, prefix_blocks, frame_slices * p.layer_bytes, steps
    )
    had = prefix_blocks * d.block_tokens
    wanted = tokens_of(p, source, mine, tokens).to(getattr(torch, d.dtype))
    got = tokens_of(d, target, yours, tokens)
    assert torch.equal(bits(got[had:]), bits(wanted[had:]))
    expected = bytearray(before)
    for at in range(had, tokens):
        block, slot = yours[at // d.block_tokens], at % d.block_tokens
        values(d, expected)[block, :, :, slot] = wanted[at]
    assert bytes(expected) == bytes(target)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.05), ("int4", 0.6)])
@given(block_tokens=st.tuples(sizes, sizes), tokens=st.integers(1, 20), prefix=st.integers(0, 2))
def test_quantized_values_land_in_their_places(
    quantization: str, most: float, block_tokens: tuple[int, int], tokens: int, prefix: int
) -> None:
    p, d = layout("bfloat16", block_tokens[0]), layout("float32", block_tokens[1])
    prefix_blocks = min(prefix, tokens // d.block_tokens)
    source, target = filled(p, 1), filled(d, 2)
    before = bytes(target)
    mine, yours = carry(
        p, d, source, target, tokens, prefix_blocks, 1 << 20, [], quantization=quantization
    )
    had = prefix_blocks * d.block_tokens
    error = tokens_of(d, target, yours, tokens) - tokens_of(p, source, mine, tokens).float()
    assert error[had:].abs().max() < most if had < tokens else True
    kept = tokens_of(d, bytearray(before), yours, had)
    assert torch.equal(tokens_of(d, target, yours, had), kept)


def test_a_prefix_in_the_middle_of_a_senders_block() -> None:
    """D has 12 of 40 tokens; P's blocks of 8 travel from the second on, which begins at 8."""
    p, d = layout("float32", 8), layout("float32", 4)
    assert p.first_block(12, 40) == 1
    assert p.first_block(40, 40) == 5
    assert layout("float32", 16).first_block(40, 40) == 3  # not from 32 on: D has all
    source, target = filled(p, 1), filled(d, 2)
    carry(p, d, source, target, 40, 3, 1 << 20, [])
    carry(p, d, source, target, 40, 10, 1 << 20, [])


# ---- precision -----------------------------------------------------------------------------


def converted(numbers: list[float], dtype: str, to: str) -> torch.Tensor:
    """One vector through a pool of `dtype` into one of `to`."""
    p = KvLayout("m", dtype, 1, layers=1, kv_heads=1, head_dim=len(numbers))
    d = KvLayout("m", to, 1, layers=1, kv_heads=1, head_dim=len(numbers))
    source, target = bytearray(p.block_bytes), bytearray(d.block_bytes)
    values(p, source)[:] = torch.tensor(numbers)
    accept = im.Accept((1, 1), (0,), 0, 1, 1)
    for _ in Codec(KvMemory(memoryview(target), d)).decode(memoryview(source), 1, p, "", accept):
        pass
    return values(d, target)[0, 0, 0, 0, 0]


@given(
    numbers=st.lists(
        st.floats(-65000, 65000, width=32) | st.sampled_from([0.0, -0.0, 2.0**-24, 1 + 2.0**-8]),
        min_size=1,
        max_size=8,
    ),
    dtype=st.sampled_from(DTYPES),
    to=st.sampled_from(DTYPES),
)
@example(numbers=[1 + 2.0**-8, 1 + 3 * 2.0**-8], dtype="float32", to="bfloat16")  # both ties
@example(numbers=[1 + 2.0**-11, 1 + 3 * 2.0**-11], dtype="float32", to="float16")
def test_rounding_is_torchs(numbers: list[float], dtype: str, to: str) -> None:
    wanted = torch.tensor(numbers).to(getattr(torch, dtype)).to(getattr(torch, to))
    assert torch.equal(bits(converted(numbers, dtype, to)), bits(wanted))


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_so(dtype: str, to: str) -> None:
    odd = [float("nan"), float("inf"), float("-inf")]
    got = converted([*odd, 1.0], dtype, to).float()
    assert torch.isnan(got[0])
    assert got[1:].tolist() == [*odd[1:], 1.0]


def test_a_nan_with_all_bits_set_stays_one() -> None:
    p, d = (KvLayout("m", x, 1, layers=1, kv_heads=1, head_dim=2) for x in ("float32", "bfloat16"))
    source, target = bytearray(b"\xff" * p.block_bytes), bytearray(d.block_bytes)
    accept = im.Accept((1, 1), (0,), 0, 1, 1)
    for _ in Codec(KvMemory(memoryview(target), d)).decode(memoryview(source), 1, p, "", accept):
        pass
    assert torch.isnan(values(d, target)).all()


@pytest.mark.parametrize(
    ("number", "dtype", "to"),
    [
        (65520.0, "float32", "float16"),
        (1e30, "bfloat16", "float16"),
        (-3.4e38, "float32", "bfloat16"),
    ],
)
def test_a_number_that_would_become_infinite_is_a_misfit(
    number: float, dtype: str, to: str
) -> None:
    with pytest.raises(Misfit, match=to):
        converted([float("nan"), number, float("inf")], dtype, to)
    converted([65519.0, 3.38e38 if to == "bfloat16" else 1.0], "float32", to)


# ---- over the planes -----------------------------------------------------------------------


def mixed(
    number: int, tokens: int, p: KvLayout, d: KvLayout, prefix_blocks: int = 0
) -> kv_rig.Transfer:
    one = kv_rig.transfer(number, tokens, layout=p, prefix_blocks=prefix_blocks)
    one.destination = kv_rig.transfer(number, tokens, layout=d).destination
    return one


def check(t: kv_rig.Transfer, prefill: kv_rig.Worker, decode: kv_rig.Worker) -> None:
    had = t.prefix_blocks * decode.layout.block_tokens
    sent = tokens_of(prefill.layout, bytearray(prefill.pool), t.source, t.tokens)[had:]
    got = tokens_of(decode.layout, bytearray(decode.pool), t.destination, t.tokens)
    assert torch.equal(got[had:], sent.to(got.dtype))
    assert not got[:had].any()


def settings(transport: str, quantization: str = "none", frame_bytes: int = 1 << 20) -> KvSettings:
    limits = ExportLimits(frame_bytes=frame_bytes)
    return KvSettings(exports=limits, transport=transport, quantization=quantization)


FORMS = [
    (layout("float32", 4), layout("bfloat16", 4)),
    (layout("bfloat16", 4), layout("float32", 4)),
    (layout("float16", 4), layout("bfloat16", 4)),
    (layout("float32", 4), layout("float32", 8)),
    (layout("float32", 8), layout("float32", 4)),
    (layout("bfloat16", 6), layout("float32", 4)),
]


@pytest.mark.parametrize("transport", ["tcp", "shm", pytest.param("nixl", marks=pytest.mark.slow)])
@pytest.mark.parametrize("frame_bytes", [1, 1 << 20])
@pytest.mark.parametrize(("p", "d"), FORMS)
def test_between_two_workers(
    run: Run, p: KvLayout, d: KvLayout, frame_bytes: int, transport: str
) -> None:
    async def body() -> None:
        made = settings(transport, frame_bytes=frame_bytes)
        async with kv_rig.pair(
            made,
            settings(transport),
            layout=p,
            decode_layout=d,
            shared=transport == "shm",
            epoch=str(uuid.uuid4()),
        ) as (prefill, decode):
            values(p, prefill.pool).copy_(values(p, filled(p, 3)).repeat(3, 1, 1, 1, 1, 1)[:64])
            for number, prefix_blocks in enumerate((0, 1, 3)):
                decode.pool[:] = bytes(len(decode.pool))
                t = mixed(number, 41, p, d, prefix_blocks)
                t.open(prefill, decode)
                prefill.plane.export_progress(t.key, 17)
                t.seal(prefill)
                stats = (await decode.told.wait("committed", t.key))[3]
                assert (await prefill.told.wait("done", t.key))[2] is True
                check(t, prefill, decode)
                first = p.first_block(prefix_blocks * d.block_tokens, 41)
                assert stats.kv_bytes == (p.blocks_for(41) - first) * p.block_bytes
                assert stats.transport == transport
                assert stats.altered == (p.dtype != d.dtype), "then it's nothing to give on"
            assert decode.plane.connections == 1  # and the connection is used again

    run(body())


@pytest.mark.parametrize("transport", ["tcp", "shm", pytest.param("nixl", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("field", "value"), [("layers", 5), ("head_dim", 8), ("model_hash", "b" * 64)]
)
def test_what_can_not_be_converted_is_refused_with_both_named(
    run: Run, field: str, value: Any, transport: str
) -> None:
    async def body() -> None:
        made = settings(transport)
        p, d = layout("float32", 4), replace(layout("float32", 4), **{field: value})
        shared, epoch = transport == "shm", str(uuid.uuid4())
        async with kv_rig.pair(
            made, made, layout=p, decode_layout=d, shared=shared, epoch=epoch
        ) as (prefill, decode):
            t = mixed(1, 41, p, d)
            named = f"prefill has KV of {p.describe()}", f"decode has {d.describe()}"
            await kv_rig.check_mismatch(t, prefill, decode, named)
            decode.plane.cancel_import(t.key)
            await decode.told.wait("released", t.key)
            assert not any(decode.pool)

    run(body())


def test_a_flipped_bit_fails_closed_and_writes_nothing(run: Run) -> None:
    async def body() -> None:
        p, d = layout("float32", 4), layout("bfloat16", 8)
        async with kv_rig.pair(layout=p, decode_layout=d) as (prefill, decode):
            await kv_rig.check_flipped_bit(mixed(1, 40, p, d), prefill, decode)

    run(body())


def test_a_value_that_does_not_fit_fails_the_pair_not_the_worker(run: Run) -> None:
    async def body() -> None:
        p, d = layout("float32", 4), layout("float16", 4)
        async with kv_rig.pair(layout=p, decode_layout=d) as (prefill, decode):
            pool = values(p, prefill.pool)
            pool.fill_(1.0)
            one = mixed(1, 10, p, d)
            pool[one.source[1], 2, 1, 0, 1, 3] = 1e6
            one.open(prefill, decode)
            one.seal(prefill)
            failure = (await decode.told.wait("import_failed", one.key))[2]
            assert failure.kind is FailureKind.LAYOUT_MISMATCH  # routers keep such two apart
            assert "a value of 1e+06 is beyond float16" in failure.message
            await decode.told.wait("released", one.key)
            await prefill.told.wait_any(("done", "export_failed"), one.key)
            pool.fill_(1.0)
            two = mixed(2, 10, p, d)
            two.open(prefill, decode)
            two.seal(prefill)
            await decode.told.wait("committed", two.key)
            check(two, prefill, decode)

    run(body())


# ---- a real model --------------------------------------------------------------------------

SAMPLING = Sampling(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny_model_dir(), threads=1)


async def through_planes(
    p: worker_rig.Worker, d: worker_rig.Worker, ids: list[int], transport: str = "tcp"
) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """A request handed over: its tokens, and the blocks of its prompt at both."""
    exported = p.add(SAMPLING, mode=Mode.EXPORT, prompt=ids)
    imported = d.add(SAMPLING, mode=Mode.IMPORT, prompt=ids)
    p.run()
    d.run()
    grant = d.grants[imported]
    told = kv_rig.Recorder(), kv_rig.Recorder()
    planes = []
    for name, worker, recorder in (("p", p, told[0]), ("d", d, told[1])):
        made = worker.runner.layout
        memory = KvMemory(worker.runner.kv_buffer, made)
        planes.append(KvPlane(made, memory, name, f"{name}-e", recorder, settings(transport)))
    addresses = [await plane.start("127.0.0.1", 0) for plane in planes]
    source = tuple(p.scheduler._held.exports[exported])
    try:
        decode = kv_rig.Worker(
            planes[1], told[1], bytearray(), planes[1]._receiver.memory, d.runner.layout, "d-e"
        )
        secret = planes[1].open_import(
            imported, "r", 1, grant.block_ids, grant.prefix_blocks, (0,), 0.0, token_count=len(ids)
        )
        to = kv_rig.target(decode, secret, grant.prefix_blocks, address=addresses[1])
        planes[0].open_export(exported, "r", 1, to, source, len(ids), 30.0)
        planes[0].seal_export(exported, tuple(p.out[exported]), 0)
        await told[1].wait("committed", imported)
        await told[0].wait("done", exported)
    finally:
        for plane in planes:
            await plane.close()
    d.scheduler.attach(imported, tuple(p.out[exported]), 0.0)
    d.run()
    return [*p.tokens(exported), *d.tokens(imported)], source, grant.block_ids


@pytest.mark.slow
@pytest.mark.parametrize("block_tokens", [(16, 32), (32, 16), (16, 5)])
def test_with_other_blocks_the_answer_is_transformers(
    reference: Reference, block_tokens: tuple[int, int]
) -> None:
    p, d = (worker_rig.Worker(block_tokens=size) for size in block_tokens)
    text = "The river runs past the old mill and down to the sea. " * 5
    longer = text + "What is the capital of France?"
    for asked in (text, text, longer):  # the second time D has nearly all, then a part
        ids = reference.ids(asked)
        tokens, _, _ = asyncio.run(through_planes(p, d, ids))
        assert tokens == reference.generate(asked, SAMPLING.max_tokens, ignore_eos=True)
    assert max(g.prefix_blocks for g in d.grants.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtypes", "block_tokens"),
    [
        (("bfloat16", "float32"), (16, 16)),
        (("float32", "bfloat16"), (16, 16)),
        (("bfloat16", "float32"), (32, 16)),
        (("float32", "float16"), (16, 24)),
    ],
)
def test_in_another_precision_decode_goes_on_from_the_same_values(
    reference: Reference, dtypes: tuple[str, str], block_tokens: tuple[int, int]
) -> None:
    """D's KV is P's as torch converts it, and the answer is what D writes on top of that."""
    p = worker_rig.Worker(dtype=dtypes[0], block_tokens=block_tokens[0])
    d, alone = (worker_rig.Worker(dtype=dtypes[1], block_tokens=block_tokens[1]) for _ in range(2))
    ids = reference.ids("In the morning the boats go out, and in the evening " * 4)
    tokens, source, destination = asyncio.run(through_planes(p, d, ids))
    sent = tokens_of(p.runner.layout, p.runner.kv_buffer, source, len(ids))
    got = tokens_of(d.runner.layout, d.runner.kv_buffer, destination, len(ids))
    assert torch.equal(bits(got), bits(sent.to(got.dtype)))

    imported = alone.add(SAMPLING, mode=Mode.IMPORT, prompt=ids)
    alone.run()
    pool = values(alone.runner.layout, alone.runner.kv_buffer)
    for at, token in enumerate(sent.to(pool.dtype)):
        block, slot = divmod(at, block_tokens[1])
        pool[alone.grants[imported].block_ids[block], :, :, slot] = token
    first = next(out for key, out in p.out.items() if out)[:1]
    alone.scheduler.attach(imported, tuple(first), 0.0)
    alone.run()
    assert tokens == [first[0].token, *alone.tokens(imported)]
