"""From logits to tokens.

A draw depends on (seed, choice, index) and the logits of its own row: never on what else
is in the batch, on earlier draws, or on the process. So a request that is resumed on
another worker goes on exactly as it would have.
"""

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pd_engine.types import Sampled, SampleSpec, Sampling

_CANDIDATES = 1024
"""Most likely tokens that top-p looks at before it sorts the whole vocabulary."""


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits: a function of its arguments alone."""
    key = struct.pack("<QQQ", seed & (2**64 - 1), choice, index)
    word = hashlib.blake2b(key, digest_size=8, person=b"pd-sample").digest()
    return float((int.from_bytes(word, "little") >> 11) * 2.0**-53)


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
    """One token for each row of `logits` [rows, vocabulary] as its spec asks.

    Log-probabilities are those of the model: before temperature, filters, bias, penalties
    and bans.
    """
    if not specs:
        return []
    logits = logits.float()
    best = _greedy(logits, specs)
    tokens = [
        int(best[row])
        if spec.sampling.temperature == 0
        else draw(_as_asked(logits, row, spec), spec)
        for row, spec in enumerate(specs)
    ]
    details = _logprobs(logits, specs, tokens)
    return [
        Sampled(spec.choice, tokens[row], *details.get(row, (None, ())))
        for row, spec in enumerate(specs)
    ]


def _greedy(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """The best token of each row; rows with wishes of their own are looked at again alone."""
    on_cpu = logits.device.type == "cpu"
    # numpy's takes a ninth of the time of torch's for 32 rows of a large vocabulary.
    best: list[int] = (logits.numpy().argmax(-1) if on_cpu else logits.argmax(-1)).tolist()
    for row, spec in enumerate(specs):
        changed = spec.seen or spec.sampling.logit_bias or spec.guide
        if changed or best[row] in spec.banned_token_ids:
            best[row] = int(_as_asked(logits, row, spec).argmax())
    return best


def _as_asked(logits: torch.Tensor, row: int, spec: SampleSpec) -> torch.Tensor:
    """A row's logits after bias, penalties and bans, in the order that others have them, and
    after what a grammar rules out."""
    bias = spec.sampling.logit_bias
    banned = [t for t in spec.banned_token_ids if 0 <= t < logits.shape[1]]
    if not (bias or spec.seen or banned or spec.guide):
        return logits[row]
    values = logits[row].clone()
    if bias:
        ids = torch.tensor([token for token, _ in bias], device=values.device)
        values[ids] += torch.tensor([added for _, added in bias], device=values.device)
    if spec.seen:
        _penalize(values, spec.seen, spec.sampling)
    if banned:
        values[torch.tensor(banned, device=values.device)] = float("-inf")
    # Behind a guess that the grammar rules out nothing that is drawn counts.
    if spec.guide and (mask := spec.guide.mask(spec.ahead)) is not None:
        bits = np.unpackbits(
            np.frombuffer(mask, np.uint8), count=values.shape[0], bitorder="little"
        )
        values[torch.from_numpy(bits == 0).to(values.device)] = float("-inf")
    return values


def _penalize(values: torch.Tensor, seen: Mapping[int, int], sampling: Sampling) -> None:
    """Repetition looks at prompt and output and shrinks what is above zero; frequency and
    presence look at the output alone."""
    ids = torch.tensor(list(seen), device=values.device)
    times = torch.tensor(list(seen.values()), dtype=values.dtype, device=values.device)
    found = values[ids]
    repetition = sampling.repetition_penalty
    if repetition != 1:
        found = torch.where(found < 0, found * repetition, found / repetition)
    found -= sampling.frequency_penalty * times + sampling.presence_penalty * (times > 0)
    values[ids] = found


def draw(logits: torch.Tensor, spec: SampleSpec) -> int:
    """A token from one row's logits [vocabulary], by inverse CDF in order of token id.

    In that order the outcome is stable: two tokens about equally likely never swap places.
    """
    sampling = spec.sampling
    weights = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    ids, weights = _filtered(weights, sampling)
    cumulative = weights.cumsum(0)
    total = float(cumulative[-1])
    target = uniform(sampling.seed, spec.choice, spec.index) * total
    target = min(target, math.nextafter(total, 0.0))  # rounding may have put it on the end
    place = int(torch.searchsorted(cumulative, target, right=True))
    return place if ids is None else int(ids[place])


def _filtered(
    weights: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Applies top-k, then top-p on what is left, then min-p.

    Returns (ids ascending, their weights); ids None stands for the whole vocabulary.
    """
    size = weights.shape[0]
    top_k = min(sampling.top_k, size) if sampling.top_k > 0 else size
    if top_k == size and sampling.top_p >= 1.0:
        if sampling.min_p > 0:
            weights = weights * (weights >= sampling.min_p * weights.max())
        return None, weights
    values, ids = _most_likely(weights, top_k, sampling.top_p)
    if sampling.top_p < 1.0:
        before = values.cumsum(0) - values
        total = 1.0 if top_k == size else float(values.sum())
        kept = int((before < sampling.top_p * total).sum())
        values, ids = values[: max(kept, 1)], ids[: max(kept, 1)]
    if sampling.min_p > 0:
        likely = values >= sampling.min_p * values[0]
        values, ids = values[likely], ids[likely]
    ids, order = ids.sort()
    return ids, values[order]


def _most_likely(
    weights: torch.Tensor, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k most likely, best first, the lower id first among equals.

    Sorting a whole vocabulary costs milliseconds: when top-p alone limits, and few tokens
    have that share, only those are sorted.
    """
    size = weights.shape[0]
    if top_k == size and size > _CANDIDATES:
        floor = weights.topk(_CANDIDATES).values[-1]
        candidates = torch.nonzero(weights >= floor).squeeze(1)
        if float(weights[candidates].sum()) < top_p:
            candidates = torch.arange(size, device=weights.device)
    elif top_k < size:
        floor = weights.topk(top_k).values[-1]
        candidates = torch.nonzero(weights >= floor).squeeze(1)
    else:
        candidates = torch.arange(size, device=weights.device)
    values, order = weights[candidates].sort(descending=True, stable=True)
    return values[:top_k], candidates[order][:top_k]


def _logprobs(
    logits: torch.Tensor, specs: Sequence[SampleSpec], tokens: Sequence[int]
) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
    """By row, for the rows that ask: (the token's log-probability, the best ones)."""
    asked = [row for row, spec in enumerate(specs) if spec.sampling.logprobs]
    if not asked:
        return {}
    logprobs = torch.log_softmax(logits[asked], dim=-1)
    most = min(max(specs[row].sampling.top_logprobs for row in asked), logits.shape[1])
    values, ids = (t.tolist() for t in logprobs.topk(most, dim=-1))
    details = {}
    for at, row in enumerate(asked):
        count = specs[row].sampling.top_logprobs
        top = tuple(zip(ids[at][:count], values[at][:count], strict=True))
        details[row] = (float(logprobs[at, tokens[row]]), top)
    return details
