"""What a router needs to turn text into tokens and back, out of a model's folder.

Read from the files themselves: building transformers' tokenizer takes seconds. Only a
folder without tokenizer.json (an old sentencepiece or vocabulary-and-merges one) takes
that way.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pd_engine.checkpoint import ModelError, open_checkpoint, read_json
from pd_proto.v1 import engine_pb2 as pb

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def make_bundle(model_dir: str | Path) -> pb.TokenizerBundle:
    """The tokenizer of a model's folder. Raises ModelError."""
    checkpoint = open_checkpoint(model_dir)
    folder = checkpoint.folder
    settings = read_json(folder / "tokenizer_config.json") or {}
    named = _special_tokens(folder, settings)
    text, tokenizer = _tokenizer(folder)
    eos = list(checkpoint.eos_token_ids)
    own_eos = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    if own_eos is not None and own_eos not in eos:
        eos.append(own_eos)  # chat models often end a turn with a token that only it names
    bos = tokenizer.token_to_id(named["bos_token"]) if "bos_token" in named else None
    bundle = pb.TokenizerBundle(
        tokenizer_json=text,
        chat_template=_chat_template(folder, settings),
        special_tokens=named,
        eos_token_ids=eos,
        add_bos=bos is not None and tokenizer.encode("a").ids[:1] == [bos],
        vocab_size=checkpoint.vocab_size or tokenizer.get_vocab_size(with_added_tokens=True),
    )
    bundle.bundle_hash = _hash(bundle)
    return bundle


def read_tokenizer(folder: Path) -> Tokenizer:
    """Raises ModelError."""
    return _tokenizer(folder)[1]


def _tokenizer(folder: Path) -> tuple[bytes, Tokenizer]:
    path = folder / "tokenizer.json"
    text = path.read_bytes() if path.is_file() else _build_tokenizer(folder)
    try:
        return text, Tokenizer.from_buffer(text)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(
            f"{path}: cannot be read as a tokenizer ({error}); copy the model again"
        ) from error


def _build_tokenizer(folder: Path) -> bytes:
    """tokenizer.json as transformers makes it of older files."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        text: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # nearly anything, on a folder without a tokenizer
        raise ModelError(
            f"model {folder}: no tokenizer.json, and none can be made of its other files "
            f"({type(error).__name__}); copy tokenizer.json of the model into it"
        ) from error
    return text.encode()


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens as chat templates use them."""
    named = {}
    for source in (read_json(folder / "special_tokens_map.json") or {}, settings):
        for name in _NAMED_TOKENS:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                named[name] = value
    return named


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    """From chat_template.jinja, else chat_template.json, else tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{file}: is not UTF-8 ({error}); copy the model again") from error
    template = (read_json(folder / "chat_template.json") or settings).get("chat_template")
    if isinstance(template, list):  # several by name
        by_name = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else ""


def _hash(bundle: pb.TokenizerBundle) -> str:
    """sha256 over the fields; the wire's bytes of a map have no fixed order."""
    fields = [
        hashlib.sha256(bundle.tokenizer_json).hexdigest(),
        bundle.chat_template,
        sorted(bundle.special_tokens.items()),
        list(bundle.eos_token_ids),
        bundle.add_bos,
        bundle.vocab_size,
    ]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
