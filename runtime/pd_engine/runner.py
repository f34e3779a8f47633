"""Runs the model: one batch in, sampled tokens out.

One thread calls `step`; nothing here knows of requests, sockets or clocks that others see.
"""

import mmap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pd_engine.attention.paged import LayersDone
from pd_engine.checkpoint import ModelError, open_checkpoint
from pd_engine.draft import DraftModel, check_draft
from pd_engine.hostmemory import free_bytes
from pd_engine.loading import Progress, unheard
from pd_engine.pages import PagedModel
from pd_engine.sampling import sample
from pd_engine.types import Batch, Row, Sampled, SampleSpec, Sampling, StepOutput

LAYER_GROUP = 5
"""Layers whose KV is reported together, so that it can travel while later ones compute."""

_WARMUP_TOKENS = (1, 3, 128)
_PRICED_DRAFTS = 7
_PRICE_ROUNDS = 3
_PRICED_CONTEXT = 2048  # attention over it tells what a token of context costs
_LEAST_PRICE = 0.01


class Runner:
    """A loaded model with its KV pool."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        block_tokens: int = 16,
        kv_cache_tokens: int = 0,
        kv_cache_fraction: float = 0.2,
        max_model_tokens: int = 0,
        threads: int = 0,
        layer_group: int = LAYER_GROUP,
        pool_memory: Callable[[int], mmap.mmap] | None = None,
        compiled: bool = True,
        draft_model_dir: str | Path = "",
        progress: Progress = unheard,
    ) -> None:
        """Loads the model. Zeros leave a choice to us: the pool takes `kv_cache_fraction` of
        the memory that is free once the weights are loaded, a request may be as long as the
        model can, torch picks its threads. `pool_memory` makes the pool's memory where it
        isn't to be private; `compiled` False takes plain torch even where there is code of
        our own; `draft_model_dir`, where one is to guess; `progress` hears of the weights. Raises
        ModelError.
        """
        checkpoint = open_checkpoint(model_dir)
        if draft_model_dir:
            check_draft(model_dir, draft_model_dir)
        if threads:
            torch.set_num_threads(threads)
        self._paged = PagedModel(checkpoint, dtype, device, block_tokens, compiled, progress)
        self._model, self.layout = self._paged.model, self._paged.layout
        drafter = None
        if draft_model_dir:
            small = open_checkpoint(draft_model_dir)
            drafter = PagedModel(small, dtype, device, block_tokens, compiled, progress)
        self.max_model_tokens = _limit(
            checkpoint.folder, max_model_tokens, self._model.max_positions
        )
        self.eos_token_ids = checkpoint.eos_token_ids
        self.vocab_size = self._model.vocab_size
        block_bytes = self.layout.block_bytes + (drafter.layout.block_bytes if drafter else 0)
        self.num_blocks = self._size_pool(block_bytes, kv_cache_tokens, kv_cache_fraction)
        self.prefill_tokens_per_s = 0.0  # as measured by `warmup`
        self.draft_price, self.draft_price_per_token = 1.0, 0.0  # likewise: see SchedulerConfig
        self._paged.make_pool(self.num_blocks, pool_memory)
        self.draft: DraftModel | None = None
        if drafter is not None:
            drafter.make_pool(self.num_blocks)
            self.draft = DraftModel(drafter, self.vocab_size)
        self._layer_group = layer_group

    def _size_pool(self, block_bytes: int, tokens: int, fraction: float) -> int:
        """Blocks of the pool: as many tokens as asked for, else a share of free memory."""
        free = free_bytes(self._model.device)
        if tokens:
            wanted = self.layout.blocks_for(tokens)
            if wanted * block_bytes > free:
                raise ModelError(
                    f"a KV cache of {tokens} tokens takes "
                    f"{wanted * block_bytes >> 20} MiB, and {free >> 20} MiB are "
                    f"free; give the worker more memory or a smaller kvCacheTokens"
                )
            return wanted
        blocks = int(free * fraction) // block_bytes
        if blocks < 1:
            raise ModelError(
                f"a share of {fraction:g} of the free memory ({free >> 20} MiB) holds no KV block "
                f"of {block_bytes >> 10} KiB; give the worker more memory or a "
                f"larger share"
            )
        return blocks

    @property
    def attention(self) -> str:
        """How attention is computed here."""
        return self._paged.attention.way

    @property
    def product(self) -> str:
        """What computes here: of two that are called the same, the speed is about the same."""
        if self._model.device.type == "cuda":
            return str(torch.cuda.get_device_name(self._model.device))
        return f"{self._model.device.type} x{torch.get_num_threads()}"

    @property
    def kv_buffer(self) -> memoryview:
        """The whole pool, writable bytes, block after block."""
        buffer = self._paged.pool.buffer
        if buffer is None:
            raise ModelError("the tcp KV plane needs CPU memory: run this worker on the CPU")
        return buffer

    @torch.inference_mode()
    def step(self, batch: Batch, on_layers: LayersDone | None = None) -> StepOutput:
        """Computes a batch. KV of (first, end) layers is in the pool when `on_layers` says so."""
        self._paged.pool.copy_blocks(batch.copies)
        logits = self._forward(batch.rows, on_layers)
        specs, owners = _samples(batch.rows)
        picked = [row for row, _ in owners]
        if picked != list(range(logits.shape[0])):  # several samples of a row
            logits = logits[picked]
        chosen = sample(logits, specs)
        samples: dict[int, tuple[Sampled, ...]] = {}
        for (_, seq_id), sampled in zip(owners, chosen, strict=True):
            samples[seq_id] = (*samples.get(seq_id, ()), sampled)
        return StepOutput(samples, self._propose(batch, samples))

    def _propose(
        self, batch: Batch, samples: dict[int, tuple[Sampled, ...]]
    ) -> dict[int, tuple[int, ...]]:
        if self.draft is None:
            return {}
        self.draft.copy_blocks(batch.copies)
        return self.draft.propose(batch.rows, samples)

    def _forward(self, rows: Sequence[Row], on_layers: LayersDone | None) -> torch.Tensor:
        """Logits of the last token of each row that samples, and of its guesses, in order."""
        keep: list[int] = []
        end = 0
        for row in rows:
            end += len(row.token_ids)
            if row.samples:
                keep.extend(range(end - 1 - row.drafts, end))
        return self._paged.forward(rows, keep, on_layers, self._layer_group)

    def warmup(self) -> None:
        """Steps of typical forms, so that the first request finds everything in place.

        Uses the pool's first blocks: call it before anything else does.
        """
        room = min(self.num_blocks * self.layout.block_tokens, self.max_model_tokens) - 1
        blocks = tuple(range(self.num_blocks))
        spec = SampleSpec(0, 0, Sampling(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=True))
        for tokens in (min(n, room) for n in _WARMUP_TOKENS if room > 0):
            began = time.perf_counter()
            self.step(Batch(0, (Row(0, [0] * tokens, 0, blocks, (spec,)),)))
            self.prefill_tokens_per_s = tokens / (time.perf_counter() - began)
            self.step(Batch(0, (Row(0, [0], tokens, blocks, (spec,)),)))
        if room > _PRICED_DRAFTS:
            self._measure_draft_prices(blocks, min(_PRICED_CONTEXT, room - _PRICED_DRAFTS - 1))

    def _measure_draft_prices(self, blocks: tuple[int, ...], context: int) -> None:
        spec = SampleSpec(0, 0, Sampling(max_tokens=1))

        def seconds(start: int, drafts: int) -> float:
            row = Row(0, [0] * (1 + drafts), start, blocks, (spec,) * (1 + drafts), drafts)
            return min(self._seconds(Batch(0, (row,))) for _ in range(_PRICE_ROUNDS))

        step_s = seconds(0, 0)
        if self.draft is not None:
            self.draft.measure(step_s, blocks)
        first = (seconds(0, _PRICED_DRAFTS) / step_s - 1) / _PRICED_DRAFTS
        self.draft_price = max(_LEAST_PRICE, first)
        if context > 0:
            behind_s = seconds(context, _PRICED_DRAFTS) - seconds(context, 0)
            more = behind_s / step_s / _PRICED_DRAFTS - first
            self.draft_price_per_token = max(0.0, more / context)

    def _seconds(self, batch: Batch) -> float:
        began = time.perf_counter()
        self.step(batch)
        return time.perf_counter() - began


def _samples(rows: Sequence[Row]) -> tuple[list[SampleSpec], list[tuple[int, int]]]:
    """All samples of a batch, and for each (its row among the logits, its sequence)."""
    specs: list[SampleSpec] = []
    owners: list[tuple[int, int]] = []
    at = 0
    for row in rows:
        if not row.samples:
            continue
        specs.extend(row.samples)
        if row.drafts:
            owners.extend((at + i, row.seq_id) for i in range(1 + row.drafts))
        else:
            owners.extend((at, row.seq_id) for _ in row.samples)
        at += 1 + row.drafts
    return specs, owners


def _limit(folder: Path, asked: int, positions: int | None) -> int:
    if positions is None and not asked:
        raise ModelError(
            f"model {folder}: config.json doesn't say how long a context may be; give one "
            f"(--max-model-len)"
        )
    if positions is not None and asked > positions:
        raise ModelError(
            f"model {folder}: --max-model-len {asked} is more than the {positions} positions "
            f"that the model was made for"
        )
    return asked or positions or 0
