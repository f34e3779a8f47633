"""PURE. What was measured of a running PDCluster, and a performance model through it.

`pdcluster profile` makes the document. A prompt's time is fitted as a constant, a time a token
and a time a pair of tokens; a step's as a time by batch, plus reading the KV. What nobody
measured lies on a straight line between or beyond what was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from pd_core.estimate import Link, kv_bytes
from pd_core.geometry import ModelKv
from pd_sim.perf import MAX_BATCH, Perf, along

KIND = "pdcluster-profile"
_DTYPE = "bfloat16"
_LAST_PIECE_S = 1e-9
"""Of a hand-over's last piece, at the least: else a link would carry infinitely much."""
_FASTEST_TOKEN_S = 1e-9
"""Else prompts would be computed at an infinite speed where their length made no difference."""
_CHUNK_TOKENS = 512  # in which `pd_core.estimate` has prompts leave


class BadProfile(ValueError):
    """No document of `pdcluster profile`; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that was computed alone. `exposed_s`: of its KV's hand-over, what nothing hid;
    None: nothing was handed over."""

    tokens: int
    seconds: float
    exposed_s: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step of so many sequences, with so much KV in all."""

    batch: int
    kv_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """`overhead_s`: of a first token's time, what is neither waiting nor computing."""

    model: str
    made: str
    kv_layers: int
    kv_token_bytes: int
    kv_tokens: int  # that fit into a worker
    overhead_s: float
    prompts: tuple[Prompt, ...]
    steps: tuple[Step, ...]

    def document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"kind": KIND, **asdict(self)}

    @property
    def kv(self) -> ModelKv:
        """One vector a layer that is as large as all of them: only their sum is known."""
        width = self.kv_token_bytes // (2 * self.kv_layers)
        return ModelKv(self.kv_layers, self.kv_layers, width, _DTYPE)


def read(document: object) -> Profile:
    """What `document` made. BadProfile for anything else."""
    if not isinstance(document, Mapping) or document.get("kind") != KIND:
        raise BadProfile(f"no profile: its kind isn't {KIND!r}")
    try:
        fields = {key: value for key, value in document.items() if key != "kind"}
        fields["prompts"] = tuple(Prompt(**one) for one in fields["prompts"])
        fields["steps"] = tuple(Step(**one) for one in fields["steps"])
        found = Profile(**fields)
        _check(found)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadProfile(f"no whole profile: {error}") from None
    return found


def _check(profile: Profile) -> None:
    numbers = [
        *(profile.kv_layers, profile.kv_token_bytes, profile.kv_tokens),
        *(number for one in profile.prompts for number in (one.tokens, one.seconds)),
        *(number for one in profile.steps for number in (one.batch, one.seconds)),
    ]
    if not all(number > 0 for number in numbers) or profile.overhead_s < 0:
        raise BadProfile("a time, a length or a batch isn't above 0")
    if len({one.tokens for one in profile.prompts}) < 2:
        raise BadProfile("two lengths of prompts at the least")
    if len({one.batch for one in profile.steps}) < 2:
        raise BadProfile("two batches at the least")


def perf(profile: Profile, gpus: int = 1) -> Perf:
    """A worker as it was measured."""
    floor_s, token_s, pair_s = fit_prompts(profile.prompts)
    kv_token_s, steps = _fit_steps(profile.steps)
    batches = sorted(steps)
    base = [steps[batch] for batch in batches]
    longest = max(one.tokens for one in profile.prompts)
    return Perf(
        name=f"{profile.model} as measured {profile.made}",
        gpus=gpus,
        kv=profile.kv,
        kv_tokens=profile.kv_tokens,
        floor_s=floor_s,
        token_s=token_s,
        pair_s=pair_s,
        kv_token_s=kv_token_s,
        steps_s=tuple(along(batches, base, batch) for batch in range(MAX_BATCH + 1)),
        note=f"measured to {longest:,} prompt tokens and batch {batches[-1]}",
        host_s=floor_s,
    )


def link(profile: Profile) -> Link:
    """One over which hand-overs would be seen for as long as they were: the least of it is the
    way there and back, what long prompts show beyond that is their last piece."""
    seen = [one for one in profile.prompts if one.exposed_s is not None]
    if not seen:
        return Link("measured", 1e15, 0.0)
    least_s = min(one.exposed_s or 0.0 for one in seen)
    last = max(seen, key=lambda one: one.tokens)
    pieces = profile.kv_layers * -(-last.tokens // _CHUNK_TOKENS)
    piece_bytes = kv_bytes(profile.kv, last.tokens) / pieces
    tail_s = max((last.exposed_s or 0.0) - least_s, _LAST_PIECE_S)
    return Link("measured", piece_bytes / tail_s, least_s)


# ---- fitting -----------------------------------------------------------------------------


def fit_prompts(prompts: Sequence[Prompt]) -> tuple[float, float, float]:
    """(seconds, seconds a token, seconds a pair of tokens), none below 0, with the least sum of
    squared relative errors. Three unknowns: each set of those that are above 0 is tried."""
    rows = [(1.0, float(one.tokens), one.tokens**2 / 2) for one in prompts]
    found: list[tuple[float, tuple[float, float, float]]] = []
    for kept in (some for count in (1, 2, 3) for some in combinations(range(3), count)):
        solved = _least_squares(
            [[row[i] / one.seconds for i in kept] for row, one in zip(rows, prompts, strict=True)]
        )
        if solved is None or min(solved) < 0:
            continue
        values = [0.0, 0.0, 0.0]
        for place, value in zip(kept, solved, strict=True):
            values[place] = value
        made = (values[0], max(values[1], _FASTEST_TOKEN_S), values[2])
        error = sum(
            (sum(a * b for a, b in zip(row, made, strict=True)) / one.seconds - 1) ** 2
            for row, one in zip(rows, prompts, strict=True)
        )
        found.append((error, made))
    return min(found)[1]


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """x with rows * x nearest to ones; None where several are. By the normal equations, on
    columns scaled to one size."""
    count = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(count)]
    scaled = [[value / by for value, by in zip(row, scale, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(count)]
        + [sum(row[i] for row in scaled)]
        for i in range(count)
    ]
    for i in range(count):
        pivot = max(range(i, count), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12:
            return None
        for k in range(count):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][count] / matrix[i][i] / scale[i] for i in range(count)]


def _fit_steps(steps: Sequence[Step]) -> tuple[float, dict[int, float]]:
    """(seconds a token of KV, seconds by batch without reading the KV). The former from batches
    that were measured with more KV and with less."""
    by_batch: dict[int, list[Step]] = {}
    for one in steps:
        by_batch.setdefault(one.batch, []).append(one)
    covariance = variance = 0.0
    for some in by_batch.values():
        kv = sum(one.kv_tokens for one in some) / len(some)
        seconds = sum(one.seconds for one in some) / len(some)
        covariance += sum((one.kv_tokens - kv) * (one.seconds - seconds) for one in some)
        variance += sum((one.kv_tokens - kv) ** 2 for one in some)
    kv_token_s = max(covariance / variance, 0.0) if variance else 0.0
    base = {
        batch: max(sum(one.seconds - kv_token_s * one.kv_tokens for one in some) / len(some), 1e-6)
        for batch, some in by_batch.items()
    }
    return kv_token_s, base
