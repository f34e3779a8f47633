"""Reads a GGUF file with transformers' tables and writes it in Hugging Face format.

transformers' own `from_pretrained(gguf_file=…)` parses the file's header three times,
slowly, and wants `accelerate`: here it is parsed once, and progress is told.
"""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import modeling_gguf_pytorch_utils as gguf_utils
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.utils import logging as transformers_logging

from pd_engine.checkpoint import ModelError

_BIG_PARAMETERS = 1_000_000_000
_HEADER_STEPS = 20
_SHARD_SIZE = "4GB"

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

Progress = Callable[[str, int, int], None]


class _Reader(gguf.GGUFReader):
    """gguf's reader, five times as fast on long vocabularies, and it tells how far it is."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self._progress = progress
        self._bytes = np.memmap(path, mode="r")
        self._header = _header_size(self._bytes)
        self._told = -1
        super().__init__(path)

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None
    ) -> Any:
        order = self.byte_order if override_order is None else override_order
        step = min(offset, self._header) * _HEADER_STEPS // self._header
        if step > self._told:
            self._told = step
            self._progress("metadata", step, _HEADER_STEPS)
        kind = np.dtype(dtype).newbyteorder(order)
        return np.frombuffer(self._bytes, kind, int(count), int(offset))


def _header_size(data: Any) -> int:
    """Bytes before the tensors, roughly: only progress depends on it."""
    return max(1, min(len(data), 4 << 20))


def write_model(source: Path, folder: Path, progress: Progress) -> None:
    """Writes configuration, tokenizer and weights of the GGUF file into the folder."""
    try:
        with _reader_once(_Reader(source, progress)):
            place = {"gguf_file": source.name, "local_files_only": True}
            config = AutoConfig.from_pretrained(source.parent, **place)
            progress("tokenizer", 0, 2)
            tokenizer = AutoTokenizer.from_pretrained(source.parent, **place)
            progress("tokenizer", 1, 2)
            tokenizer.save_pretrained(folder)
            progress("tokenizer", 2, 2)
            _write_weights(source, config, folder, progress)
    except (ModelError, OSError, MemoryError):
        raise
    except Exception as error:  # gguf and transformers raise nearly anything on a bad file
        first = (str(error).strip() or "no message").splitlines()[0]
        raise ModelError(
            f"model {source}: cannot be converted ({type(error).__name__}: {first}); the file may "
            f"be damaged, or of an architecture that transformers does not read from GGUF: use "
            f"the model's folder in Hugging Face format"
        ) from error


def _write_weights(source: Path, config: Any, folder: Path, progress: Progress) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in model.parameters())
    # A small model keeps what its quantized weights say exactly, and loads without a cast.
    dtype = torch.float32 if count < _BIG_PARAMETERS else torch.bfloat16
    _check_room(folder, count * dtype.itemsize)
    with _told(progress):
        read = gguf_utils.load_gguf_checkpoint(
            str(source), return_tensors=True, model_to_load=model, torch_dtype=dtype
        )
    # Buffers that are computed, not stored, stay on "meta": they are not written either.
    _missing, unexpected = model.load_state_dict(read["tensors"], strict=False, assign=True)
    model.tie_weights()
    empty = [n for n, p in model.named_parameters() if p.device.type == "meta"]
    if empty or unexpected:
        raise ModelError(
            f"model {source}: its tensors don't fit its architecture "
            f"(missing: {empty[:3] or 'none'}, unknown: {list(unexpected)[:3] or 'none'})"
        )
    model.config.dtype = dtype
    progress("writing", 0, 1)
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    progress("writing", 1, 1)


def _check_room(folder: Path, needed: int) -> None:
    free = _free_bytes(folder)
    if free < needed:
        raise OSError(
            f"{folder.parent}: {free >> 20} MiB are free, the converted model needs "
            f"{needed >> 20} MiB: free some space or choose another folder"
        )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def _reader_once(reader: _Reader) -> Iterator[None]:
    """transformers opens the file anew for each part, and makes the table of names anew for
    each module of the model: give it the same ones.
    """
    read, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader = lambda *_args, **_kwargs: reader
    gguf.get_tensor_name_map = functools.lru_cache(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = read, name_map


@contextlib.contextmanager
def _told(progress: Progress) -> Iterator[None]:
    """Tells of each tensor that is dequantized."""

    def bar(tensors: Iterable[Any], **_options: object) -> Iterator[Any]:
        items = list(tensors)
        for done, tensor in enumerate(items):
            progress("weights", done, len(items))
            yield tensor
        progress("weights", len(items), len(items))

    original = gguf_utils.tqdm
    gguf_utils.tqdm = bar
    try:
        yield
    finally:
        gguf_utils.tqdm = original
