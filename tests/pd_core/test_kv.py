"""KV geometry: the sizes that the documentation promises, layout identity, what can be
converted and what can't, prefix hashes."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.kv import MOST_CONVERTED_TOKENS, KvForm, KvLayout, convertible, prefix_hashes


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


# ---- what can be converted -----------------------------------------------------------------

FORM = KvForm("m" * 64, "float32", 16, layers=30, kv_heads=3, head_dim=64)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"dtype": "bfloat16"}, None),
        ({"dtype": "float16"}, None),
        ({"block_tokens": 1}, None),
        ({"block_tokens": MOST_CONVERTED_TOKENS}, None),
        ({"dtype": "bfloat16", "block_tokens": 24}, None),
        ({"dtype": "float8_e4m3"}, "float8_e4m3 can't be converted"),
        ({"dtype": ""}, "an unnamed dtype can't be converted"),
        ({"block_tokens": 0}, "blocks of 0 tokens can't be converted, those of 1 to 4096 can"),
        ({"block_tokens": MOST_CONVERTED_TOKENS + 1}, "blocks of 4097 tokens can't be converted"),
        ({"model_hash": "x" * 64}, "models or tokenizers differ"),
        ({"layers": 31}, "numbers of layers differ: {theirs} and {ours}"),
        ({"kv_heads": 1}, "numbers of KV heads differ: {theirs} and {ours}"),
        ({"head_dim": 128}, "head sizes differ: {theirs} and {ours}"),
        ({"quantization": "int8"}, "quantizations of the KV cache differ: {theirs} and {ours}"),
        ({"protocol_version": 2}, "protocol versions differ: {theirs} and {ours}"),
    ],
)
def test_what_is_converted_and_what_is_refused(changes: dict[str, Any], why: str | None) -> None:
    """Both ways round, and by the same words whether a side has been checked or not."""
    other = replace(FORM, **changes)
    name = next(iter(changes), "layers")
    values = {"theirs": getattr(other, name), "ours": getattr(FORM, name)}
    for sender, receiver, said in (
        (other, FORM, values),
        (FORM, other, {"theirs": values["ours"], "ours": values["theirs"]}),
        (other, KvLayout.of(FORM), values),
    ):
        found = convertible(sender, receiver)
        if why is None:
            assert found is None
        else:
            assert found is not None
            assert found.startswith(why.format(**said))


def test_the_first_of_several_differences_is_the_model() -> None:
    other = replace(FORM, model_hash="x", layers=1, dtype="int3")
    assert convertible(other, FORM) == "models or tokenizers differ"


def test_what_a_receiver_takes_has_sizes() -> None:
    narrow = replace(FORM, dtype="bfloat16", block_tokens=8)
    assert KvLayout.of(narrow).token_bytes * 2 == KvLayout.of(FORM).token_bytes
    assert KvLayout.of(FORM).layout_hash == FORM.layout_hash
    assert KvLayout.of(FORM).same_bytes(FORM)
    assert not KvLayout.of(FORM).same_bytes(narrow)
    assert not KvLayout.of(FORM).same_bytes(replace(FORM, block_tokens=8))
    with pytest.raises(ValueError, match="use one of"):
        KvLayout.of(replace(FORM, dtype="int3"))


@pytest.mark.parametrize(
    ("prefix", "tokens", "first"),
    [(0, 1, 0), (15, 40, 0), (16, 40, 1), (17, 40, 1), (39, 40, 2), (40, 40, 3), (48, 48, 3)],
)
def test_the_first_block_that_travels(prefix: int, tokens: int, first: int) -> None:
    assert layout().first_block(prefix, tokens) == first


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
