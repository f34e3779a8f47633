"""Run by the interpreter of an environment with llama-cpp-python: serves many requests at a
time by continuous batching, over llama.cpp's own C API, as its server does.

`python llamacpp_peer.py GGUF TYPE WORK THREADS CONTEXT`; TYPE is `f16` or `as-is`. Says
`ready`, then answers each line of JSON, {"requests": [[ids, new]], "at_a_time": n,
"step_tokens": n}, with {"seconds": s, "tokens": n}. Needs nothing of ours.
"""

import ctypes
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

_SEQUENCES = 8


class Slot:
    """A request in work: what of its prompt is computed, and its newest token."""

    def __init__(self, prompt: list[int], new: int) -> None:
        self.prompt, self.left = prompt, new
        self.computed = 0
        self.last: int | None = None


class Engine:
    def __init__(self, model: Path, threads: int, context: int, step_tokens: int) -> None:
        params = llama.llama_model_default_params()
        params.use_extra_bufts = False  # on CPUs with AMX they crash on batches
        self._model = llama.llama_model_load_from_file(str(model).encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp can't load {model}")
        options = llama.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = options.n_ubatch = step_tokens
        options.n_seq_max = _SEQUENCES
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True
        self._context = llama.llama_init_from_model(self._model, options)
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(step_tokens, 0, 1)
        vocabulary = llama.llama_model_get_vocab(self._model)
        self._vocab_size = llama.llama_vocab_n_tokens(vocabulary)
        self._step_tokens = step_tokens

    def _put(self, token: int, position: int, sequence: int, logits: bool) -> int:
        batch, at = self._batch, self._batch.n_tokens
        batch.token[at], batch.pos[at] = token, position
        batch.n_seq_id[at], batch.logits[at] = 1, logits
        batch.seq_id[at][0] = sequence
        batch.n_tokens = at + 1
        return int(at)

    def _plan(self, slots: dict[int, Slot]) -> dict[int, int]:
        """Fills the batch, decoding first; where in it each sequence's logits are."""
        self._batch.n_tokens = 0
        drawn = {}
        for number, slot in slots.items():
            if slot.last is not None:
                drawn[number] = self._put(slot.last, slot.computed, number, True)
                slot.computed += 1
        for number, slot in slots.items():
            if slot.last is not None:
                continue
            while slot.computed < len(slot.prompt) and self._batch.n_tokens < self._step_tokens:
                ends = slot.computed + 1 == len(slot.prompt)
                at = self._put(slot.prompt[slot.computed], slot.computed, number, ends)
                slot.computed += 1
                if ends:
                    drawn[number] = at
        return drawn

    def serve(self, requests: list[tuple[list[int], int]], at_a_time: int) -> int:
        """Greedily, to the end of each; how many tokens came."""
        waiting, slots, tokens = deque(requests), dict[int, Slot](), 0
        while waiting or slots:
            for number in range(min(at_a_time, _SEQUENCES)):
                if waiting and number not in slots:
                    slots[number] = Slot(*waiting.popleft())
            drawn = self._plan(slots)
            if llama.llama_decode(self._context, self._batch) != 0:
                raise SystemExit("llama.cpp failed on a batch")
            for number, at in drawn.items():
                slot = slots[number]
                row = llama.llama_get_logits_ith(self._context, at)
                slot.last = int(np.ctypeslib.as_array(row, shape=(self._vocab_size,)).argmax())
                slot.left -= 1
                tokens += 1
                if not slot.left:
                    llama.llama_memory_seq_rm(self._memory, number, -1, -1)
                    del slots[number]
        return tokens


def as_f16(source: Path, work: Path) -> Path:
    target = work / "f16.gguf"
    params = llama.llama_model_quantize_default_params()
    params.ftype = llama.LLAMA_FTYPE_MOSTLY_F16
    params.allow_requantize = True
    names = str(source).encode(), str(target).encode()
    if llama.llama_model_quantize(*names, ctypes.byref(params)) != 0:
        raise SystemExit(f"llama.cpp can't convert {source}")
    return target


def main(gguf: str, kind: str, work: str, threads: str, context: str) -> None:
    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = as_f16(Path(gguf), Path(work)) if kind == "f16" else Path(gguf)
    engine: Engine | None = None
    print("ready", flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        if engine is None:
            engine = Engine(model, int(threads), int(context), asked["step_tokens"])
        began = time.perf_counter()
        tokens = engine.serve(asked["requests"], asked["at_a_time"])
        took = time.perf_counter() - began
        print(json.dumps({"seconds": took, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
