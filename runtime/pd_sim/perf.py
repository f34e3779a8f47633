"""PURE. How long an engine computes: a roofline, from measurements or from data sheets.

A prompt: the larger of a floor (weights are read, kernels are launched) and its tokens'
matrix products, plus attention, which grows with the square of its length. A decode step:
what was measured by batch, between measurements linear, beyond them along the last slope;
plus reading the KV. Attention and KV reads are taken from data sheets: measurements with
short contexts don't show them.
"""

import bisect
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pd_core.geometry import ModelKv
from pd_core.gpus import Gpu
from pd_core.known_models import KnownModel

MAX_BATCH = 1024
_MEMORY_SHARE = 0.9  # of a GPU's memory, for weights and KV
_BANDWIDTH_SHARE = 0.8  # of the data sheet's that reading KV reaches
_COMPUTE_SHARE = 0.5  # of the data sheet's that matrix products reach
_HOST_S = 0.005  # of a step that no device explains, where nothing was measured
_MEASURED_CONTEXT = 576  # tokens a sequence at which steps by batch were measured


@dataclass(frozen=True, slots=True)
class Perf:
    """What one worker (of `gpus` devices) can do."""

    name: str
    gpus: int
    kv: ModelKv
    kv_tokens: int
    floor_s: float
    token_s: float
    pair_s: float  # of attention, a query and a key
    kv_token_s: float  # reading one token's KV in a decode step
    steps_s: tuple[float, ...]  # by batch 0..MAX_BATCH, KV reads left out
    note: str = ""
    host_s: float = 0.0  # of a step, which no computing hides; 0: measured times hold it
    product: str = ""

    def prompt_s(self, tokens: int, cached_tokens: int = 0, chunk_tokens: int = 0) -> float:
        """A prompt alone; with chunks each pays the floor. 0: all in one step."""
        chunk = min(chunk_tokens or tokens, tokens)
        whole, rest = divmod(tokens, chunk)
        linear_s = whole * self._chunk_s(chunk)
        if rest:
            linear_s += self._chunk_s(rest)
        return linear_s + self.pair_s * tokens * (cached_tokens + tokens / 2)

    def _chunk_s(self, tokens: int) -> float:
        return self.host_s + max(self.floor_s - self.host_s, tokens * self.token_s)

    def step_s(self, batch: int, kv_tokens: float) -> float:
        return self.steps_s[min(batch, MAX_BATCH)] + self.kv_token_s * kv_tokens

    def most_within(self, step_s: float, context_tokens: float) -> int:
        """The largest batch, at this mean context, whose step takes no longer; 0: none."""
        low, high = 0, min(MAX_BATCH, max(int(self.kv_tokens / max(context_tokens, 1)), 0))
        while low < high:
            middle = (low + high + 1) // 2
            if self.step_s(middle, middle * context_tokens) <= step_s:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of one model on one kind of worker: seconds by prompt tokens, and by batch."""

    prompts_s: Mapping[int, float] = field(default_factory=dict)
    steps_s: Mapping[int, float] = field(default_factory=dict)


def from_data_sheet(model: KnownModel, gpu: Gpu, gpus: int) -> Perf:
    """Nothing was measured: compute at half of its peak, memory at 80%."""
    flops, bandwidth = gpu.flops * gpus, gpu.bandwidth_bytes_s * gpus
    weights_bytes = 2 * model.active_parameters
    token_s = 2 * model.active_parameters / (flops * _COMPUTE_SHARE)
    read_s = weights_bytes / (bandwidth * _BANDWIDTH_SHARE)
    steps = tuple(_HOST_S + max(read_s, batch * token_s) for batch in range(MAX_BATCH + 1))
    found = _perf(
        model, gpu, gpus, _HOST_S + read_s, token_s, _COMPUTE_SHARE, steps, "from data sheets"
    )
    return replace(found, host_s=_HOST_S)


def fit(model: KnownModel, gpu: Gpu, gpus: int, measured: Measured) -> Perf:
    """The roofline through measurements: their medians' floor, slope and steps."""
    sizes = sorted(measured.prompts_s)
    if len(sizes) < 2 or len(measured.steps_s) < 2:
        raise ValueError("two prompt lengths and two batches at the least")
    floor_s = min(measured.prompts_s.values())
    long = [size for size in sizes if size > sizes[-1] / 10]
    token_s = statistics.fmean(measured.prompts_s[size] / size for size in long)
    share = 2 * model.active_parameters / (token_s * gpu.flops * gpus)
    for _ in range(8):  # attention at the share of the peak that the products reach
        pair_s = _pair_flops(model) / (gpu.flops * gpus * share)
        token_s = statistics.fmean(
            measured.prompts_s[size] / size - pair_s * size / 2 for size in long
        )
        share = 2 * model.active_parameters / (token_s * gpu.flops * gpus)
    kv_token_s = model.kv.token_bytes / (gpu.bandwidth_bytes_s * gpus * _BANDWIDTH_SHARE)
    batches = sorted(measured.steps_s)
    base = [measured.steps_s[b] - b * _MEASURED_CONTEXT * kv_token_s for b in batches]
    steps = tuple(along(batches, base, batch) for batch in range(MAX_BATCH + 1))
    note = (
        f"measured to {sizes[-1]} prompt tokens and batch {batches[-1]}; beyond them, and for "
        "contexts over 576 tokens in decode, extrapolated"
    )
    return _perf(model, gpu, gpus, floor_s, token_s, share, steps, note)


def read_measured(
    rows: Iterable[Mapping[str, str]], model: str, hardware: str, gpus: int
) -> Measured:
    """From a table of splitwise-sim's kind: one row a run, times in milliseconds."""
    prompts: dict[int, list[float]] = {}
    steps: dict[int, list[float]] = {}
    for row in rows:
        if (row["model"], row["hardware"]) != (model, hardware):
            continue
        if int(row["tensor_parallel"]) != gpus:
            continue
        size, batch = int(row["prompt_size"]), int(row["batch_size"])
        if batch == 1:
            prompts.setdefault(size, []).append(float(row["prompt_time"]) / 1000)
        if size == 512:
            steps.setdefault(batch, []).append(float(row["token_time"]) / 1000)
    return Measured(
        {size: statistics.median(times) for size, times in prompts.items()},
        {batch: statistics.median(times) for batch, times in steps.items()},
    )


def _perf(
    model: KnownModel,
    gpu: Gpu,
    gpus: int,
    floor_s: float,
    token_s: float,
    share: float,
    steps_s: tuple[float, ...],
    note: str,
) -> Perf:
    room = gpu.memory_bytes * gpus * _MEMORY_SHARE - 2 * model.active_parameters
    kv_tokens = int(room / model.kv.token_bytes)
    if kv_tokens < 1:
        raise ValueError(f"{model.name} leaves no room for KV on {gpus} x {gpu.name}")
    bandwidth = gpu.bandwidth_bytes_s * gpus * _BANDWIDTH_SHARE
    return Perf(
        name=f"{model.name} on {gpus} x {gpu.name}",
        gpus=gpus,
        kv=model.kv,
        kv_tokens=kv_tokens,
        floor_s=floor_s,
        token_s=token_s,
        pair_s=_pair_flops(model) / (gpu.flops * gpus * share),
        kv_token_s=model.kv.token_bytes / bandwidth,
        steps_s=steps_s,
        note=note,
        product=f"{gpus} x {gpu.name}",
    )


def _pair_flops(model: KnownModel) -> float:
    """Attention's operations a query and key: two products over all query heads. A model's
    width is about that at which its matrices, 12 x layers x width^2, are its parameters."""
    layers = model.kv.layers
    width = (model.active_parameters / (12 * layers)) ** 0.5
    return 4 * layers * width


def along(batches: list[int], values: list[float], batch: int) -> float:
    """Linear between points; beyond the last along the last slope; never falling."""
    if batch <= batches[0]:
        return values[0]
    right = min(bisect.bisect_left(batches, batch), len(batches) - 1)
    left = right - 1
    slope = max(values[right] - values[left], 0.0) / (batches[right] - batches[left])
    return values[left] + slope * (batch - batches[left])
