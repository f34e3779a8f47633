"""Covers pd_engine.kv.checksum and csrc/: what is compiled says what xxhash says, whatever the
pieces are, and copies what it says."""

import ctypes
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pd_engine import build
from pd_engine.kv import checksum as module
from pd_engine.kv.checksum import checksum, checksum_of, compiled, copy

VARIANTS = ("avx512", "avx2", "baseline")
BYTES = bytes(range(251)) * 300  # no period of a stripe's size


def library() -> ctypes.CDLL:
    found = compiled()
    assert found is not None, "make env builds it"
    return found


@pytest.fixture(params=VARIANTS, scope="module")
def variant(request: pytest.FixtureRequest) -> Iterator[None]:
    before = library().pd_checksum_variant()
    if not library().pd_checksum_use(request.param.encode()):
        pytest.skip(f"this CPU has no {request.param}")
    yield
    library().pd_checksum_use(before)


def cut(data: memoryview, sizes: list[int]) -> list[memoryview]:
    found, at = [], 0
    for size in sizes:
        found.append(data[at : at + size])
        at += size
    return found


stripes = st.lists(st.integers(0, 70).map(lambda n: 64 * n), min_size=1, max_size=8)
anything = st.lists(st.integers(0, 600), min_size=1, max_size=8)


@pytest.mark.usefixtures("variant")
@given(sizes=stripes | anything, offset=st.integers(0, 70))
def test_it_is_xxh3_of_all_pieces(sizes: list[int], offset: int) -> None:
    data = memoryview(BYTES)[offset : offset + sum(sizes)]
    assert checksum(cut(data, sizes)) == xxhash.xxh3_64_intdigest(data)


@pytest.mark.usefixtures("variant")
@given(
    source=stripes | anything,
    cuts=st.lists(st.integers(0, 100), max_size=4),
    stripe=st.booleans(),
    offsets=st.tuples(st.integers(0, 70), st.integers(0, 70)),
)
def test_a_copy_is_whole_and_has_the_checksum_of_its_target(
    source: list[int], cuts: list[int], stripe: bool, offsets: tuple[int, int]
) -> None:
    size = sum(source)
    ends = sorted(
        {*(c * size // 100 // (64 if stripe else 1) * (64 if stripe else 1) for c in cuts)}
    )
    starts = [0, *ends]
    into = [end - start for start, end in zip(starts, [*ends, size], strict=True)]
    data = memoryview(BYTES)[offsets[0] : offsets[0] + size]
    whole = bytearray(b"\xee" * (size + 200))
    target = memoryview(whole)[offsets[1] : offsets[1] + size]
    made = checksum_of(cut(data, source), cut(target, into))
    for _ in copy(cut(data, source), cut(target, into), made):
        pass
    assert target == data
    assert made.intdigest() == xxhash.xxh3_64_intdigest(data)
    assert set(whole[: offsets[1]] + whole[offsets[1] + size :]) == {0xEE}, "nothing beside it"


@pytest.mark.usefixtures("variant")
def test_large_copies_pause() -> None:
    data = memoryview(BYTES * 60)[: 4 << 20]
    target = memoryview(bytearray(len(data)))
    made = checksum_of([data], [target])
    assert sum(1 for _ in copy([data], [target], made)) == 2
    assert target == data
    assert made.intdigest() == xxhash.xxh3_64_intdigest(data)


def test_a_copy_between_pieces_that_dont_fit_is_refused() -> None:
    data, target = memoryview(bytes(512)), memoryview(bytearray(512))
    made = checksum_of([data])
    for pair in ((data, target[:256]), (target, data)):
        with pytest.raises(ValueError, match="don't fit"):
            made.copy([pair])


def test_without_the_library_all_goes_by_xxhash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_BUILT", tmp_path)
    caplog.set_level("INFO")
    compiled.cache_clear()
    try:
        data = memoryview(BYTES)
        assert compiled() is None
        assert checksum([data]) == xxhash.xxh3_64_intdigest(data)
    finally:
        compiled.cache_clear()
    assert "python -m pd_engine.build" in caplog.text


def test_a_library_with_another_interface_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ABI", module._ABI + 1)
    compiled.cache_clear()
    try:
        assert compiled() is None
    finally:
        compiled.cache_clear()
