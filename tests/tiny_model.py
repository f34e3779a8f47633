"""A tiny random Llama with a real tokenizer, as a Hugging Face folder, for tests.

Built once into the temp folder (well under a second; no torch, no transformers), the
same bytes on every machine: weights come from a seeded generator, the byte-level BPE is
trained on the text below. Its tokens are nonsense, but they depend on every position of
the prompt, so a wrong block, mask or position changes them.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", EOS)
_VOCAB = 512
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _INNER = 64, 4, 2, 16, 128
_CONTEXT = 2048
_FORMAT = "4"  # raise when the contents change: old folders are left behind

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXT = """
The river runs past the old mill and down to the sea. In the morning the boats go out,
and in the evening they come back with fish, salt and stories. What is the capital of
France? The capital of France is Paris. What is the sum of 12 and 30? The sum is 42.
You are a helpful assistant. Write a short story about a robot who learns to paint.
def add(first, second): return first + second  # the sum of two numbers
Überall blühen Bäume; ça va très bien, señor. Здравствуйте, 你好, こんにちは, 🙂.
user system assistant hello world the of and to in a is that it for was on are with they
{"name": "value", "list": [1, 2, 3], "nested": {"true": false, "null": 0.5}}
"""


def tiny_model_dir(seed: int = 0, layers: int = 3) -> Path:
    """The folder of the model, built on first use. Safe for processes that race for it."""
    name = f"pdcluster-tiny-llama-v{_FORMAT}-{os.getuid()}-s{seed}-l{layers}"
    final = Path(tempfile.gettempdir()) / name
    if not final.is_dir():
        work = Path(tempfile.mkdtemp(prefix=f"{name}."))
        _write_model(work, seed, layers)
        try:
            work.rename(final)
        except OSError:  # somebody else was first: theirs is the same
            shutil.rmtree(work)
            if not final.is_dir():
                raise
    return final


def _write_model(folder: Path, seed: int, layers: int) -> None:
    tokenizer = _train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS)
    ids = {"bos_token_id": tokenizer.token_to_id("<|im_start|>"), "eos_token_id": eos}
    files = {
        "config.json": _config(layers) | ids,
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": EOS,
            "pad_token": "<|endoftext|>",
            "model_max_length": _CONTEXT,
            "clean_up_tokenization_spaces": False,
        },
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=1, sort_keys=True))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    save_file(_weights(seed, layers), folder / "model.safetensors", metadata={"format": "pt"})


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in _SPECIAL],
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer


def _config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": _INNER,
        "max_position_embeddings": _CONTEXT,
        "mlp_bias": False,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": _VOCAB,
    }


def _weights(seed: int, layers: int) -> dict[str, NDArray[np.float32]]:
    """Weights large enough that attention matters and the best token wins clearly."""

    def matrix(name: str, rows: int, columns: int, scale: float) -> NDArray[np.float32]:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        rng = np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "little")))
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return np.asarray(values * (scale / np.sqrt(columns)), dtype=np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix("embed", _VOCAB, _HIDDEN, 8.0),
        "lm_head.weight": matrix("head", _VOCAB, _HIDDEN, 4.0),
        "model.norm.weight": np.ones(_HIDDEN, dtype=np.float32),
    }
    shapes = {
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN, 1.5),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN, 1.5),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN, 1.5),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM, 2.0),
        "mlp.gate_proj": (_INNER, _HIDDEN, 1.0),
        "mlp.up_proj": (_INNER, _HIDDEN, 1.0),
        "mlp.down_proj": (_HIDDEN, _INNER, 1.5),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for part, (rows, columns, scale) in shapes.items():
            name = f"{prefix}.{part}.weight"
            tensors[name] = matrix(name, rows, columns, scale)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = np.ones(_HIDDEN, dtype=np.float32)
    return tensors
