"""The engine alone against transformers on the same cores, weights and threads: prefill,
decode of one request, many requests at a time, and what the host costs a step.

Ours is scheduler and runner as a worker has them, without the network. Theirs is the forward
pass, `generate`, and continuous batching (`generate_batch`), in whichever of float32 and
bfloat16 they are faster here; and for many requests llama.cpp's continuous batching. Rounds
alternate: ours, theirs, ours, …
"""

import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench import peers, precision
from bench.common import Goal, arguments, median, report, table
from bench.models import builtin_gguf, model_dir
from pd_engine.attention.library import Native
from pd_engine.blocks import BlockPool
from pd_engine.compiled import CompiledNorm, CompiledRotary, PackedLinear
from pd_engine.runner import Runner
from pd_engine.scheduler import Scheduler, SchedulerConfig
from pd_engine.types import Batch, Mode, Prefilled, Request, Sampling, SchedulerEvent, Tokens

GOALS = {
    "prefill_512": Goal(">=", 1.1),
    "prefill_2048": Goal(">=", 1.1),
    "prefill_8000": Goal(">=", 1.1),
    "decode_b1": Goal(">=", 1.3),
    "batch8_vs_generate_batch": Goal(">=", 2),
    "batch8_vs_llamacpp": Goal(">=", 1),
    "host_share_b32": Goal("<=", 0.1),
    "bf16_ppl_ratio": Goal("<=", 1.005),
}
Row = tuple[str, float, float | None]
BLOCK_TOKENS = 16
CHUNK = 512
AT_A_TIME = 8
STEP_TOKENS = 256 + AT_A_TIME  # of both sides, with many requests
_FOREVER = 1e12


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int
    prefills: tuple[int, ...]
    decode_prompt: int
    decode_tokens: int
    requests: int
    scale: float  # of the lengths of many requests
    host_context: int
    host_steps: int
    precise_prompts: int


FULL = Plan(5, (512, 2048, 8000), 512, 64, 32, 1.0, 512, 20, precise_prompts=50)
QUICK = Plan(1, (128,), 32, 8, 8, 0.1, 32, 5, precise_prompts=2)


def ids(count: int, seed: int) -> list[int]:
    """Token ids that share no prefix with other seeds' ones."""
    return [(seed * 7919 + i * i * 31 + i * 17) % 400 + 100 for i in range(count)]


class Ours:
    """A worker's scheduler and runner, stepped in this thread."""

    def __init__(self, folder: Path, tokens: int, dtype: str = "auto") -> None:
        self.tokens = tokens
        self.runner = Runner(
            folder,
            dtype=dtype,
            kv_cache_tokens=tokens,
            block_tokens=BLOCK_TOKENS,
            threads=torch.get_num_threads(),
            layer_group=1,
        )
        self.runner.warmup()
        self.width: int = getattr(torch, self.runner.layout.dtype).itemsize
        self._requests = 0

    def scheduler(self, running: int, step_tokens: int) -> Scheduler:
        """A fresh one: nothing cached of earlier rounds."""
        config = SchedulerConfig(
            max_batch_tokens=step_tokens,
            chunk_tokens=min(CHUNK, step_tokens),
            max_running=running,
            max_queued=1000,
            max_model_tokens=self.runner.max_model_tokens,
            recompute_max_tokens=self.runner.max_model_tokens,
        )
        return Scheduler(config, BlockPool(self.runner.num_blocks, BLOCK_TOKENS))

    def add(self, scheduler: Scheduler, prompt: Sequence[int], new: int) -> None:
        self._requests += 1
        scheduler.add(
            Request(
                key=(0, self._requests),
                request_id=str(self._requests),
                attempt=0,
                token_ids=tuple(prompt),
                prompt_tokens=len(prompt),
                choices=(0,),
                sampling=Sampling(max_tokens=new, ignore_eos=True),
                mode=Mode.LOCAL,
                deadline=_FOREVER,
                grant_deadline=_FOREVER,
            ),
            time.monotonic(),
        )

    def step(self, scheduler: Scheduler) -> tuple[Batch, list[SchedulerEvent]] | None:
        """One turn of a worker's loop; None when nothing is left to do."""
        batch = scheduler.schedule(time.monotonic())
        if batch is None:
            return None
        output = self.runner.step(batch)
        return batch, scheduler.absorb(batch, output, time.monotonic())

    def run(self, scheduler: Scheduler) -> list[float]:
        """Steps to the end; when each token came."""
        times: list[float] = []
        while (done := self.step(scheduler)) is not None:
            new = sum(isinstance(event, Prefilled | Tokens) for event in done[1])
            times.extend([time.perf_counter()] * new)
        return times

    def prefill_s(self, prompt: Sequence[int]) -> float:
        scheduler = self.scheduler(1, 2048)
        self.add(scheduler, prompt, 1)
        began = time.perf_counter()
        return self.run(scheduler)[-1] - began

    def token_s(self, prompt: Sequence[int], new: int) -> float:
        scheduler = self.scheduler(1, 2048)
        self.add(scheduler, prompt, new)
        times = self.run(scheduler)
        return (times[-1] - times[0]) / (len(times) - 1)

    def many_s(self, requests: Sequence[tuple[list[int], int]]) -> float:
        scheduler = self.scheduler(AT_A_TIME, STEP_TOKENS)
        for prompt, new in requests:
            self.add(scheduler, prompt, new)
        began = time.perf_counter()
        times = self.run(scheduler)
        if len(times) != sum(new for _, new in requests):
            raise RuntimeError(f"{len(times)} tokens came")
        return times[-1] - began

    def step_s(self, batch_size: int, context: int, steps: int) -> float:
        """Median of a whole turn of the loop while so many requests decode."""
        scheduler = self.scheduler(batch_size, 2048)
        for i in range(batch_size):
            self.add(scheduler, ids(context, i), 3 * steps)
        took: list[float] = []
        while len(took) < steps:
            began = time.perf_counter()
            done = self.step(scheduler)
            if done is None:
                raise RuntimeError("the requests ended before they were measured")
            rows = done[0].rows
            if len(rows) == batch_size and all(len(row.token_ids) == 1 for row in rows):
                took.append(time.perf_counter() - began)
        return median(took)


class Theirs:
    """transformers' own ways with the same weights."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.dtype = dtype
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None

    def prefill_s(self, prompt: Sequence[int]) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            out = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        out.logits[0, -1].argmax().item()
        return time.perf_counter() - began

    def token_s(self, prompt: Sequence[int], new: int) -> float:
        times: list[float] = []

        class Stamps:
            """A streamer: the prompt is put first, then each token."""

            def put(self, _tokens: object) -> None:
                times.append(time.perf_counter())

            def end(self) -> None:
                pass

        tokens = torch.tensor([prompt])
        self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            streamer=Stamps(),
        )
        return (times[-1] - times[1]) / (len(times) - 2)

    def many_s(self, requests: Sequence[tuple[list[int], int]]) -> float:
        """Continuous batching. It has one length of answers for all: the requests' must agree."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        room = sum(math.ceil((len(p) + new) / BLOCK_TOKENS) + 1 for p, new in requests)
        (new,) = {new for _, new in requests}
        began = time.perf_counter()
        out = self.model.generate_batch(
            [prompt for prompt, _ in requests],
            generation_config=GenerationConfig(
                max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=BLOCK_TOKENS,
                num_blocks=room,
                max_batch_tokens=STEP_TOKENS,
                max_requests_per_batch=AT_A_TIME,
                use_cuda_graph=False,
            ),
        )
        took = time.perf_counter() - began
        found = [len(result.generated_tokens) for result in out.values()]
        if found != [new] * len(requests):
            raise RuntimeError(f"generate_batch made {found} tokens")
        return took


class Llama:
    """llama.cpp, in a process of its own."""

    def __init__(self, python: Path, kind: str, tokens: int) -> None:
        self._work = tempfile.TemporaryDirectory()
        threads = str(torch.get_num_threads())
        script = Path(__file__).parent / "llamacpp_peer.py"
        self._process = subprocess.Popen(
            # -P: what lies beside the script is none of its modules.
            [python, "-P", script, builtin_gguf(), kind, self._work.name, threads, str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said("ready")

    def _said(self, wanted: str = "") -> str:
        assert self._process.stdout is not None
        line: str = self._process.stdout.readline().strip()
        if not line or (wanted and line != wanted):
            raise RuntimeError(f"llama.cpp ended, or said {line!r}")
        return line

    def many_s(self, requests: Sequence[tuple[list[int], int]]) -> float:
        asked = {"requests": requests, "at_a_time": AT_A_TIME, "step_tokens": STEP_TOKENS}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._said())
        if answer["tokens"] != sum(new for _, new in requests):
            raise RuntimeError(f"llama.cpp made {answer['tokens']} tokens")
        return float(answer["seconds"])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._work.cleanup()


def faster(folder: Path, prompt: Sequence[int]) -> Theirs:
    """transformers in its faster type here."""
    both = [Theirs(folder, dtype) for dtype in (torch.float32, torch.bfloat16)]
    best = min(both, key=lambda theirs: min(theirs.prefill_s(prompt) for _ in range(2)))
    print(f"transformers is faster in {best.dtype}", flush=True)
    return best


def alternate(
    rounds: int, ours: Callable[[int], float], theirs: Callable[[int], float]
) -> tuple[float, float, float]:
    """Medians of both, and of their ratio (above 1: ours is faster)."""
    pairs = [(ours(i), theirs(i)) for i in range(rounds)]
    return (
        median(a for a, _ in pairs),
        median(b for _, b in pairs),
        median(b / a for a, b in pairs),
    )


def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory."""
    data = torch.ones(1 << 27)
    took = []
    for _ in range(7):
        began = time.perf_counter()
        data.sum()
        took.append(time.perf_counter() - began)
    size: int = data.numel() * 4
    return size / min(took)


def weight_bytes(model: Any) -> int:
    """What a step reads of the weights: all, but of an untied embedding only rows."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    total: int = sum(p.numel() * p.element_size() for p in model.parameters())
    rows_only: int = 0 if tied else embedding.numel() * embedding.element_size()
    return total - rows_only


def many_requests(plan: Plan, seed: int) -> list[tuple[list[int], int]]:
    """Prompts of 16 to 1,000 tokens in an order that mixes them."""
    new = max(4, int(48 * plan.scale))
    lengths = [16 + (i * 37 % plan.requests) ** 2 for i in range(plan.requests)]
    return [(ids(max(4, int(n * plan.scale)), seed * 100 + i), new) for i, n in enumerate(lengths)]


def idle(runner: Runner) -> None:
    """Takes the arithmetic of the compiled code out of a runner: what is left of a step is the
    host's work, and what torch itself computes (residuals, activations, the choice of tokens).
    """
    native = runner._paged._native
    if native is None:
        raise RuntimeError("the engine runs without its compiled code: python -m pd_engine.build")
    nothing = native.library.pd_linear_panel  # as dear to call as the others; does nothing
    for module in runner._model.module.modules():
        made: Any = module
        if isinstance(module, PackedLinear | CompiledNorm):
            made._run = nothing
        names = getattr(getattr(made.forward, "__func__", None), "__globals__", {})
        rotary = names.get("apply_rotary_pos_emb")
        if isinstance(rotary, CompiledRotary):
            rotary._run = nothing
    library: Any = SimpleNamespace(
        pd_attention_check=native.library.pd_attention_check,
        pd_attention_write=nothing,
        pd_attention_attend=nothing,
    )
    runner._paged.attention._native = Native(library)


def host_share(folder: Path, ours: Ours, plan: Plan) -> tuple[float, float]:
    """Seconds of a step at batch 32, and what share of that the host takes."""
    alone = Ours(folder, ours.tokens)
    idle(alone.runner)
    pairs = [
        tuple(one.step_s(32, plan.host_context, plan.host_steps) for one in (ours, alone))
        for _ in range(min(3, plan.rounds))
    ]
    return median(whole for whole, _ in pairs), median(host / whole for whole, host in pairs)


def against(
    plan: Plan, ours: Ours, theirs: Theirs, metrics: dict[str, float | None]
) -> Iterator[Row]:
    """All that has a peer: fills the metrics, yields rows of the table."""
    for tokens in plan.prefills:

        def prompt(i: int, count: int = tokens) -> list[int]:
            return ids(count, i)

        a, b, metrics[f"prefill_{tokens}"] = alternate(
            plan.rounds,
            lambda i: ours.prefill_s(prompt(i)),
            lambda i: theirs.prefill_s(prompt(i)),
        )
        yield f"prefill of {tokens}, tokens/s", tokens / a, tokens / b
    start, new = plan.decode_prompt, plan.decode_tokens
    a, b, metrics["decode_b1"] = alternate(
        plan.rounds,
        lambda i: ours.token_s(ids(start, i), new),
        lambda i: theirs.token_s(ids(start, i), new),
    )
    yield "1 request, new tokens/s", 1 / a, 1 / b
    moved = weight_bytes(theirs.model) / theirs.dtype.itemsize * ours.width
    moved += (start + new // 2) * ours.runner.layout.token_bytes
    metrics["decode_b1_roofline"] = moved / read_bandwidth() / a
    a, b, metrics["batch8_vs_generate_batch"] = alternate(
        plan.rounds,
        lambda i: ours.many_s(many_requests(plan, i)),
        lambda i: theirs.many_s(many_requests(plan, i)),
    )
    total = sum(n for _, n in many_requests(plan, 0))
    yield f"{plan.requests} requests, {AT_A_TIME} at a time, new tokens/s", total / a, total / b


def _many_s(llama: Llama, plan: Plan, seed: int) -> float:
    return llama.many_s(many_requests(plan, seed))


def against_llama(
    plan: Plan, ours: Ours, quick: bool, metrics: dict[str, float | None]
) -> Iterator[Row]:
    """In float16, and in the four bits that the model comes in, for reference."""
    python = peers.install("llama-cpp-python", download=not quick)
    for kind, key in (("f16", "batch8_vs_llamacpp"), ("as-is", "batch8_vs_llamacpp_q4")):
        metrics[key] = None
        if python is None:
            continue
        llama = Llama(python, kind, ours.tokens)
        try:
            a, b, metrics[key] = alternate(
                plan.rounds,
                lambda i: ours.many_s(many_requests(plan, i)),
                partial(_many_s, llama, plan),
            )
        finally:
            llama.close()
        total = sum(n for _, n in many_requests(plan, 0))
        yield f"the same, beside llama.cpp in {kind}", total / a, total / b


def main(quick: bool) -> None:
    plan = QUICK if quick else FULL
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    folder = model_dir()
    metrics: dict[str, float | None] = {}
    rows: list[Row] = []
    ours = Ours(folder, max(plan.prefills) + AT_A_TIME * 2048)
    print(f"attention: {ours.runner.attention}; {torch.get_num_threads()} threads", flush=True)
    for row in against(plan, ours, faster(folder, ids(256, 0)), metrics):
        print(table(("", "ours", "transformers"), [row]), flush=True)
        rows.append(row)
    for row in against_llama(plan, ours, quick, metrics):
        print(table(("", "ours", "llama.cpp"), [row]), flush=True)
        rows.append(row)
    step_s, metrics["host_share_b32"] = host_share(folder, ours, plan)
    rows.append(("step of 32 requests, ms", step_s * 1000, None))
    top1, ratio = precision.bfloat16(folder, plan.precise_prompts, 30 * plan.precise_prompts)
    metrics |= {"bf16_top1": top1, "bf16_ppl_ratio": ratio}
    print("\n" + table(("", "ours", "theirs"), rows))
    print(f"bfloat16: {top1:.2%} of next tokens as in float32; perplexity {ratio:.4f} of theirs")
    report("engine", metrics, GOALS, quick)


if __name__ == "__main__":
    main(arguments(__doc__))
