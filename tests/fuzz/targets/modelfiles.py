"""A model's folder: configuration, index, safetensors' header, tokenizer settings, as an engine
opens it before anything heavy is loaded, and as it makes the router's bundle of it.

The pieces of an input are files, in the order of `_FILES`; those that aren't given are right.
"""

import struct
import tempfile
from pathlib import Path

from pd_engine.bundle import make_bundle
from pd_engine.checkpoint import ModelError, open_checkpoint
from tests.fuzz.aloop import joined, pieces
from tests.tiny_model import tiny_model_dir

PACKAGES = ("pd_engine",)
WORDS = (
    b'"eos_token_id":', b'"vocab_size":', b'"text_config":', b'"weight_map":', b'"data_offsets":',
    b'"dtype":"F32"', b'"__metadata__":', b'"chat_template":', b'"bos_token":', b'"content":',
    b'"model_type":', b"null", b"1e999", b"Infinity", b"NaN", b"[", b"{}", b"-1", b'"../../x"',
)  # fmt: skip
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "model.safetensors",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "tokenizer.json",
)
_FOLDER = Path(tempfile.mkdtemp(prefix="pdcluster-fuzz-"))
_model = tiny_model_dir()
_HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
_RIGHT = {
    "config.json": (_model / "config.json").read_bytes(),
    "tokenizer.json": (_model / "tokenizer.json").read_bytes(),
    "model.safetensors": struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(4),
}


def one(data: bytes) -> None:
    given = dict(zip(_FILES, pieces(data), strict=False))
    for name in _FILES:
        content = given.get(name) or _RIGHT.get(name)
        if content is None:
            (_FOLDER / name).unlink(missing_ok=True)
        else:
            (_FOLDER / name).write_bytes(content)
    try:
        checkpoint = open_checkpoint(_FOLDER)
        assert checkpoint.model_type
        assert all(token >= 0 for token in checkpoint.eos_token_ids)
        assert len(checkpoint.model_hash()) == 64
        make_bundle(_FOLDER)
    except ModelError as error:
        assert str(error)


def seeds() -> list[bytes]:
    config = b'{"model_type":"llama","vocab_size":512,"eos_token_id":[2,3],"text_config":{}}'
    settings = (
        b'{"bos_token":{"content":"<|im_start|>"},"eos_token":"<|im_end|>",'
        b'"chat_template":[{"name":"default","template":"{{ messages }}"}]}'
    )
    index = b'{"weight_map":{"a":"model.safetensors"}}'
    return [
        joined(config, b'{"eos_token_id":2}', settings, index, _RIGHT["model.safetensors"]),
        joined(config),
        joined(
            b"", b"", b"", b"", b"", b'{"eos_token":"</s>"}', b'{"chat_template":"a"}', b"{{ b }}"
        ),
    ]
