"""The control of bench.interference: a process that has nothing to do with the cluster
and computes the same prefill, so that only the hardware is shared.

    python -m bench.prefill_load MODEL_DIR TOKENS CHUNK

Prints `ready`, then computes one prompt for each line it reads and prints its seconds.
"""

import sys
import time

from pd_engine.runner import Runner
from pd_engine.types import Batch, Row, SampleSpec, Sampling

_BLOCK_TOKENS = 16


def prefill(runner: Runner, tokens: int, chunk: int, seed: int) -> float:
    """Computes one prompt in chunks, as the prefill worker does. Seconds."""
    ids = [(seed * 7919 + i * 31) % 40000 + 100 for i in range(tokens)]
    table = tuple(range(-(-tokens // _BLOCK_TOKENS)))
    started = time.perf_counter()
    for step, start in enumerate(range(0, tokens, chunk)):
        end = min(start + chunk, tokens)
        last = (SampleSpec(0, 0, Sampling(max_tokens=1)),) if end == tokens else ()
        runner.step(Batch(step, (Row(0, ids[start:end], start, table, last),)))
    return time.perf_counter() - started


def main(folder: str, tokens: int, chunk: int) -> None:
    runner = Runner(
        folder,
        dtype="auto",
        kv_cache_tokens=tokens + _BLOCK_TOKENS,
        block_tokens=_BLOCK_TOKENS,
        threads=1,
    )
    runner.warmup()
    print("ready", flush=True)
    for seed, _ in enumerate(sys.stdin):
        print(f"{prefill(runner, tokens, chunk, seed):.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
