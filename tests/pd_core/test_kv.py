"""KV geometry: the sizes that the documentation promises, layout identity, prefix hashes."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.kv import KvLayout, prefix_hashes


def layout(**changes: object) -> KvLayout:
    base: dict[str, Any] = {
        "model_hash": "m" * 64,
        "dtype": "float16",
        "block_tokens": 16,
        "layers": 80,
        "kv_heads": 8,
        "head_dim": 128,
    }
    return KvLayout(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "token_bytes"),
    [
        ({}, 327_680),  # Llama-2-70B in fp16, grouped-query attention
        ({"layers": 32, "kv_heads": 32}, 524_288),  # Llama-2-7B, no grouping
        ({"layers": 30, "kv_heads": 3, "head_dim": 64, "dtype": "bfloat16"}, 23_040),
        ({"layers": 30, "kv_heads": 3, "head_dim": 64, "dtype": "float32"}, 46_080),
    ],
)
def test_kv_bytes_a_token(changes: dict[str, object], token_bytes: int) -> None:
    assert layout(**changes).token_bytes == token_bytes


def test_a_block_is_its_layers() -> None:
    one = layout()
    assert one.block_bytes == one.layers * one.layer_bytes == one.token_bytes * one.block_tokens


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert layout().blocks_for(tokens) == blocks


@pytest.mark.parametrize(
    "changes",
    [
        {"model_hash": "x"},
        {"dtype": "float32"},
        {"block_tokens": 32},
        {"layers": 79},
        {"kv_heads": 4},
        {"head_dim": 64},
        {"quantization": "int8"},
        {"protocol_version": 2},
    ],
)
def test_every_field_is_in_the_layout_hash(changes: dict[str, object]) -> None:
    assert layout(**changes).layout_hash != layout().layout_hash
    assert layout(**changes).describe() != layout().describe()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dtype": "int3"}, "use one of"), ({"layers": 0}, "layers = 0: must be at least 1")],
)
def test_impossible_layouts_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout(**changes)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.integers(1, 20))
def test_a_longer_prompt_keeps_its_prefix_hashes(tokens: list[int], block_tokens: int) -> None:
    hashes = list(prefix_hashes(tokens, block_tokens))
    assert len(hashes) == len(tokens) // block_tokens
    assert list(prefix_hashes([*tokens, 7], block_tokens))[: len(hashes)] == hashes


def test_a_hash_depends_on_all_before_it_and_on_the_salt() -> None:
    first = list(prefix_hashes([1, 2, 3, 4], 2))
    assert list(prefix_hashes([9, 2, 3, 4], 2))[1] != first[1]
    assert next(prefix_hashes([1, 2, 3, 4], 2, salt=b"tenant")) != first[0]


def test_prefix_hashes_are_the_same_in_another_process() -> None:
    code = "from pd_core.kv import prefix_hashes; print(list(prefix_hashes(range(32), 16)))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert other.stdout.strip() == str(list(prefix_hashes(range(32), 16)))
