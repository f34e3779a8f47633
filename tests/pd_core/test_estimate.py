"""The estimator: KV sizes of every kind of attention from config.json, what is refused, links,
and what of a transfer hides behind the prefill."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.estimate import LINKS, estimate, kv_bytes, link
from pd_core.geometry import UnknownGeometry, model_kv
from pd_core.known_models import KNOWN_MODELS, find

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "float16",
}
MIB, GIB = 1 << 20, 1 << 30


def config(**changes: Any) -> dict[str, Any]:
    """LLAMA with other keys; None takes a key out."""
    return {k: v for k, v in {**LLAMA, **changes}.items() if v is not None}


@pytest.mark.parametrize(
    ("model", "tokens", "size"),
    [
        ("llama-2-70b", 2048, 640 * MIB),
        ("llama-2-70b", 32768, 10 * GIB),
        ("llama-2-7b", 2048, GIB),  # often said to be 64 MB
        ("falcon-7b", 2048, 16 * MIB),  # one KV head
    ],
)
def test_known_sizes(model: str, tokens: int, size: int) -> None:
    assert kv_bytes(KNOWN_MODELS[model].kv, tokens) == size


@pytest.mark.parametrize(
    ("changes", "token_bytes"),
    [
        ({}, 2 * 80 * 8 * 128 * 2),
        ({"num_key_value_heads": None}, 2 * 80 * 64 * 128 * 2),  # no grouping
        ({"head_dim": 64}, 2 * 80 * 8 * 64 * 2),  # heads needn't add up to the hidden size
        ({"torch_dtype": "float32"}, 2 * 80 * 8 * 128 * 4),
        ({"torch_dtype": None, "dtype": "bfloat16"}, 2 * 80 * 8 * 128 * 2),
        ({"multi_query": True}, 2 * 80 * 1 * 128 * 2),
        (
            {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8},
            2 * 80 * 8 * 128 * 2,
        ),
        ({"num_kv_shared_layers": 30}, 2 * 50 * 8 * 128 * 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 80 * 576 * 2),
        ({"attn_config": {"kv_n_heads": 4}}, 2 * 80 * 4 * 128 * 2),
        ({"multi_query_attention": True, "multi_query_group_num": 2}, 2 * 80 * 2 * 128 * 2),
        ({"num_key_value_heads": None, "num_kv_heads": [2, 6] * 40}, 2 * 80 * 4 * 128 * 2),
    ],
)
def test_every_kind_of_attention(changes: dict[str, Any], token_bytes: int) -> None:
    assert model_kv(config(**changes)).token_bytes == token_bytes


def test_other_families_names_for_the_same() -> None:
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "dtype": "float32"}
    assert model_kv(gpt2).token_bytes == 2 * 12 * 768 * 4
    nested = {"model_type": "gemma3", "text_config": LLAMA}
    assert model_kv(nested) == model_kv(LLAMA)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "mamba2"}, "recurrent state"),
        ({"ssm_state_size": 16}, "recurrent state"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"block_configs": [{}]}, "differ from one another"),
        ({"num_hidden_layers": None}, "doesn't say its layers"),
        ({"num_hidden_layers": True}, "whole number"),
        ({"num_key_value_heads": 0}, "whole number"),
        ({"num_key_value_heads": -8}, "whole number"),
        ({"hidden_size": 100}, "whole heads"),
        ({"torch_dtype": "int3"}, "dtype"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"num_key_value_heads": None, "num_kv_heads": [2]}, "1 entries for 80 layers"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnknownGeometry, match=says):
        model_kv(config(**changes))


def test_what_is_worth_a_note() -> None:
    assert "sliding" in model_kv(config(sliding_window=4096)).notes[0]
    assert model_kv(config(sliding_window=4096, use_sliding_window=False)).notes == ()
    assert "no dtype" in model_kv(config(torch_dtype=None)).notes[0]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("mixtral-8x7b-instruct-v0.1", "mixtral-8x7b"),
    ],
)
def test_names_as_people_write_them(name: str, known: str) -> None:
    found = find(name)
    assert found is not None
    assert found.name == known
    assert find("llama-5") is None


def test_latent_kv_is_never_quantized() -> None:
    kv = KNOWN_MODELS["deepseek-v3"].kv
    assert kv_bytes(kv, 1024, "int8") == kv_bytes(kv, 1024, "int4") == kv_bytes(kv, 1024)
    with pytest.raises(ValueError, match="int3"):
        kv_bytes(kv, 1, "int3")


def test_quantized_sizes() -> None:
    kv = KNOWN_MODELS["llama-2-70b"].kv
    full = kv_bytes(kv, 1024)
    assert kv_bytes(kv, 1024, "int8") == full * (128 + 4) // 256
    keys, values = 64 + 8, 64 + 4  # a channel's scale is shared by 64 tokens
    assert kv_bytes(kv, 1024, "int4") == full * (keys + values) // 512
    with pytest.raises(ValueError, match="int3"):
        kv_bytes(kv, 1, "int3")


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [
        ("rdma-100g", 12.5e9),
        ("12.5GB/s", 12.5e9),
        ("100Gbit/s", 12.5e9),
        ("100Gbps", 12.5e9),
        ("800 MB/s", 8e8),
    ],
)
def test_links(text: str, bytes_s: float) -> None:
    assert link(text).bytes_s == pytest.approx(bytes_s)


@pytest.mark.parametrize(
    "text", ["", "rdma", "0GB/s", "12.5.1GB/s", "12", "-1GB/s", "./s", ".GB/s"]
)
def test_links_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="link"):
        link(text)


def test_a_fast_link_shows_only_its_tail() -> None:
    kv = KNOWN_MODELS["llama-2-70b"].kv
    made = estimate(kv, 2048, LINKS["rdma-100g"], 3500.0, chunk_tokens=2048)
    tail_s = 640 * MIB / 80 / 12.5e9
    assert made.exposed_s == pytest.approx(tail_s + 10e-6)
    assert made.hidden_share > 0.98


def test_a_slow_link_shows_what_it_carries_longer_than_prefill_computes() -> None:
    kv = KNOWN_MODELS["llama-2-70b"].kv
    made = estimate(kv, 32768, link("1GB/s"), 10_000.0)
    assert made.exposed_s == pytest.approx(10 * GIB / 1e9 - 3.2768, rel=0.01)


@given(
    st.sampled_from(sorted(KNOWN_MODELS)),
    st.integers(1, 200_000),
    st.sampled_from(sorted(LINKS)),
    st.floats(1, 1e6),
    st.sampled_from(("none", "int8", "int4")),
)
def test_estimates_hang_together(
    name: str, tokens: int, over: str, rate: float, quantization: str
) -> None:
    kv = KNOWN_MODELS[name].kv
    made = estimate(kv, tokens, LINKS[over], rate, quantization=quantization)
    assert 0.0 <= made.hidden_share <= 1.0
    assert LINKS[over].round_trip_s <= made.exposed_s <= made.transfer_s * (1 + 1e-9)
    faster = estimate(kv, tokens, LINKS["nvlink4"], rate, quantization=quantization)
    assert faster.exposed_s <= made.exposed_s * (1 + 1e-9)
    assert made.kv_bytes <= kv_bytes(kv, tokens)


def test_nonsense_is_refused() -> None:
    kv = KNOWN_MODELS["llama-2-7b"].kv
    for tokens, rate in ((0, 1.0), (1, 0.0)):
        with pytest.raises(ValueError, match="tokens"):
            estimate(kv, tokens, LINKS["pcie4"], rate)
    with pytest.raises(ValueError, match="-1 tokens"):
        kv_bytes(kv, -1)
