"""A model's folder in Hugging Face format, read without torch or transformers.

Finds what is wrong with it before anything heavy is imported, and names its identity.
"""

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

_DTYPES = {"F64", "F32", "F16", "BF16"}
_SAFETENSORS_HEADER_MAX = 100_000_000
_READ_BYTES = 1 << 24
_MOST_TOKENS = (1 << 31) - 1
_NOT_IDENTITY = ("transformers_version", "dtype", "torch_dtype")
_IDENTITY_FILE = ".pd-identity.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class ModelError(ValueError):
    """The model can't be served. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that looks right: the configuration and the weight files are whole."""

    folder: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    weights: tuple[Path, ...]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens as generation_config.json names them, else as config.json does."""
        for source in (self.generation, self.config, self.text_config):
            value = source.get("eos_token_id")
            if value is not None:
                values = value if isinstance(value, list) else [value]
                return tuple(dict.fromkeys(self._token_id("eos_token_id", v) for v in values))
        return ()

    @property
    def text_config(self) -> Mapping[str, Any]:
        """What a model of several kinds of input says of its text; empty for others."""
        found = self.config.get("text_config") or {}
        if not isinstance(found, dict):
            raise ModelError(f"model {self.folder}: text_config must be an object in config.json")
        return found

    @property
    def vocab_size(self) -> int | None:
        """None where config.json doesn't say."""
        value = self.config.get("vocab_size") or self.text_config.get("vocab_size")
        return None if value is None else self._token_id("vocab_size", value)

    def _token_id(self, what: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_TOKENS:
            raise ModelError(
                f"model {self.folder}: {what} is {str(value)[:60]!r}, not a number of tokens; "
                f"copy the model's configuration again"
            )
        return value

    def model_hash(self) -> str:
        """sha256 over configuration, tokenizer and the weights' contents."""
        digest = hashlib.sha256()
        kept = {k: v for k, v in self.config.items() if k not in _NOT_IDENTITY}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        for name in _TOKENIZER_FILES:
            path = self.folder / name
            if path.is_file():
                digest.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
        digest.update(_weights_identity(self.weights, self.folder).encode())
        return digest.hexdigest()


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Reads and checks a model's folder; raises ModelError."""
    path = Path(folder)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ModelError(
            f"model {path}: {what}; give a folder with config.json and *.safetensors "
            f"(a GGUF file is converted by `python -m pd_engine.convert`)"
        )
    config = read_json(path / "config.json")
    if config is None:
        raise ModelError(
            f"model {path}: config.json is missing; give the folder of a model in Hugging Face "
            f"format"
        )
    weights = _weight_files(path)
    for file in weights:
        _check_safetensors(file)
    return Checkpoint(path, config, read_json(path / "generation_config.json") or {}, weights)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); copy the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold a JSON object; copy the model again")
    return content


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = read_json(folder / "model.safetensors.index.json")
    if index is None:
        single = folder / "model.safetensors"
        files = (single,) if single.is_file() else tuple(sorted(folder.glob("*.safetensors")))
    else:
        files = tuple(folder / name for name in _indexed(folder, index))
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise ModelError(
            f"model {folder}: {', '.join(missing)} named by model.safetensors.index.json "
            f"{'is' if len(missing) == 1 else 'are'} missing; copy the model again"
        )
    if not files:
        pickles = list(folder.glob("*.bin")) + list(folder.glob("*.pth"))
        how = (
            "its weights are pickles, which can run code: save them as safetensors "
            "(`save_pretrained`)"
            if pickles
            else "copy model.safetensors into it"
        )
        raise ModelError(f"model {folder}: no *.safetensors file; {how}")
    return files


def _indexed(folder: Path, index: Mapping[str, Any]) -> list[str]:
    """The files that an index names, each in the model's own folder."""
    named = index.get("weight_map", {})
    names = list(named.values()) if isinstance(named, dict) else [named]
    for name in names:
        if not isinstance(name, str) or name != Path(name).name or "\0" in name:
            raise ModelError(
                f"model {folder}: model.safetensors.index.json names {str(name)[:60]!r}, which is "
                f"no file of this folder; copy the model again"
            )
    return sorted(set(names))


def _check_safetensors(path: Path) -> None:
    """Header readable, file as long as the header says, element types that can be served."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _SAFETENSORS_HEADER_MAX + 1
        if length > min(size - 8, _SAFETENSORS_HEADER_MAX):
            raise _damaged(path, "its header is not one of a safetensors file")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        tensors = {k: v for k, v in header.items() if k != "__metadata__"}
        end = max((int(v["data_offsets"][1]) for v in tensors.values()), default=0)
        dtypes = {str(v["dtype"]) for v in tensors.values()}
    except (
        ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise _damaged(path, "its header cannot be read") from error
    if size < 8 + length + end:
        raise _damaged(path, f"it has {size} bytes of {8 + length + end}")
    if dtypes - _DTYPES and not dtypes & _DTYPES:
        raise ModelError(
            f"{path}: its weights are {', '.join(sorted(dtypes))}: quantized checkpoints are not "
            f"served; use one in float32, bfloat16 or float16"
        )


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"{path}: damaged, {why}; delete it and copy or convert the model again")


def _weights_identity(files: tuple[Path, ...], folder: Path) -> str:
    """Hash of all weight files, remembered by their sizes and times of change."""
    stamps = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    for place in _identity_places(folder):
        with suppress(ModelError):
            known = read_json(place)
            if known is not None and known.get("stamps") == stamps:
                return str(known.get("hash"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + _content_hash(file))
    for place in _identity_places(folder):
        with suppress(OSError):
            _write_atomically(place, json.dumps({"stamps": stamps, "hash": digest.hexdigest()}))
            break
    return digest.hexdigest()


def _identity_places(folder: Path) -> tuple[Path, ...]:
    """In the model's folder or, where that is read-only, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdcluster"
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return folder / _IDENTITY_FILE, cache / "identity" / f"{name}.json"


def _content_hash(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return bytes(digest.digest())


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(temporary).rename(path)
