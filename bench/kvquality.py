"""What quantized KV does to what a model writes: prompts' KV through int8 and int4, as if it
had been handed over, then decoding on top of it.

`top1`: the share of next tokens that stay the same when the reference's tokens are fed in
(teacher forcing); `identical`: prompts whose greedy continuation stays the same throughout;
`ppl_ratio`: perplexity of the reference's continuation, against that on exact KV.
"""

import math
from dataclasses import dataclass

from bench.common import Goal, arguments, report, table
from bench.models import load_tokenizer, model_dir, prompt_of
from pd_engine.imports import Accept
from pd_engine.kv.codec import Codec, Part
from pd_engine.kv.memory import KvMemory
from pd_engine.runner import Runner
from pd_engine.types import Batch, Row, Sampled, SampleSpec, Sampling

GOALS = {"int8_top1": Goal(">=", 0.995)}
_BLOCK = 16
_FRAME_BLOCKS = 32
_SAMPLING = Sampling(max_tokens=1000, logprobs=True, top_logprobs=20, ignore_eos=True)
_FLOOR = -12.0  # of a token that isn't among the first twenty


@dataclass(slots=True)
class Prompt:
    ids: list[int]
    exact: list[int]  # blocks
    lossy: list[int]


class Lab:
    """A model, prompts, and their KV: exact and quantized."""

    def __init__(self, count: int, new_tokens: int) -> None:
        folder = model_dir()
        tokenizer = load_tokenizer(folder)
        self.new_tokens = new_tokens
        lengths = [100 + 37 * (i % 9) for i in range(count)]
        each = [-(-(n + new_tokens + 1) // _BLOCK) for n in lengths]
        self.runner = Runner(
            folder, block_tokens=_BLOCK, kv_cache_tokens=2 * sum(each) * _BLOCK + _BLOCK
        )
        self.codec = Codec(KvMemory(self.runner.kv_buffer, self.runner.layout))
        self.prompts = []
        at = 0
        for number, (length, blocks) in enumerate(zip(lengths, each, strict=True)):
            ids = tokenizer.encode(prompt_of(tokenizer, length, number)).ids
            exact = list(range(at, at + blocks))
            lossy = list(range(at + blocks, at + 2 * blocks))
            self.prompts.append(Prompt(ids, exact, lossy))
            at += 2 * blocks
        self.steps = 0

    def step(self, rows: list[tuple[list[int], int, list[int]]]) -> list[Sampled]:
        """(tokens, start, blocks) a row -> what is drawn after each."""
        self.steps += 1
        made = tuple(
            Row(n, ids, start, blocks, (SampleSpec(0, 1, _SAMPLING),))
            for n, (ids, start, blocks) in enumerate(rows)
        )
        out = self.runner.step(Batch(self.steps, made))
        return [out.samples[n][0] for n in range(len(rows))]

    def prefill(self) -> list[int]:
        return [self.step([(p.ids, 0, p.exact)])[0].token for p in self.prompts]

    def quantize(self, quantization: str) -> None:
        """The prompts' KV, in frames as they travel, into the other blocks."""
        layers = self.runner.layout.layers
        for p in self.prompts:
            used = -(-len(p.ids) // _BLOCK)
            for start in range(0, used, _FRAME_BLOCKS):
                end = min(used, start + _FRAME_BLOCKS)
                payload = self.codec.encode(Part(p.exact[start:end], 0, layers), quantization)
                if payload is None:
                    raise RuntimeError("KV that can't be quantized")
                blocks, layout = p.lossy[start:end], self.runner.layout
                into = Accept((0, 0), tuple(blocks), 0, layers, len(blocks) * _BLOCK)
                view = memoryview(payload)
                for _ in self.codec.decode(view, len(blocks), layout, quantization, into):
                    pass

    def decode(
        self, first: list[int], blocks: list[list[int]], forced: list[list[int]] | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Drawn tokens behind each prompt and its first one, and log-probabilities of the
        forced ones (or of those drawn)."""
        drawn: list[list[int]] = [[] for _ in first]
        scores: list[list[float]] = [[] for _ in first]
        last = list(first)
        for index in range(self.new_tokens):
            rows = [([last[n]], len(p.ids) + index, blocks[n]) for n, p in enumerate(self.prompts)]
            for n, one in enumerate(self.step(rows)):
                drawn[n].append(one.token)
                last[n] = forced[n][index] if forced else one.token
                found = dict(one.top) | {one.token: one.logprob or 0.0}
                scores[n].append(found.get(last[n], _FLOOR))
        return drawn, scores


def perplexity(scores: list[list[float]]) -> float:
    flat = [score for one in scores for score in one]
    return math.exp(-sum(flat) / len(flat))


def main(quick: bool) -> None:
    lab = Lab(4 if quick else 50, 16 if quick else 64)
    first = lab.prefill()
    exact, scores = lab.decode(first, [p.exact for p in lab.prompts])
    base = perplexity(scores)
    metrics: dict[str, float | None] = {}
    rows = []
    for quantization in ("int8", "int4"):
        lab.quantize(quantization)
        blocks = [p.lossy for p in lab.prompts]
        forced, scores = lab.decode(first, blocks, exact)
        pairs = [
            (a, b) for x, y in zip(exact, forced, strict=True) for a, b in zip(x, y, strict=True)
        ]
        top1 = sum(a == b for a, b in pairs) / len(pairs)
        ratio = perplexity(scores) / base
        lab.quantize(quantization)  # the blocks behind the prompt were written to
        free, _ = lab.decode(first, blocks)
        identical = sum(a == b for a, b in zip(exact, free, strict=True)) / len(exact)
        metrics |= {
            f"{quantization}_top1": top1,
            f"{quantization}_identical": identical,
            f"{quantization}_ppl_ratio": ratio,
        }
        rows.append((quantization, top1, identical, ratio))
    print(table(("KV", "top-1", "identical", "perplexity ratio"), rows))
    report("kvquality", metrics, GOALS, quick)


if __name__ == "__main__":
    main(arguments(__doc__))
