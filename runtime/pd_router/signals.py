"""What this router tells those who scale the workers. Pure: time is an argument.

Counters only grow, from the process's start on: who reads twice knows what happened in
between, and `process` tells a restart from a fall to zero. Demand is counted at the door,
also what is turned away for want of workers or room: what got through would cap itself.
Documents of several routers merge: counters and sketches add up; of what workers say of
themselves, whichever router heard it last is right.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pd_core.sketch import WindowSketch
from pd_router.types import Timeline

WINDOW_S = 60.0


class Queued(NamedTuple):
    """What waits in admission: the work of no worker yet."""

    requests: int = 0
    tokens: int = 0
    sequences: int = 0


@dataclass(slots=True)
class Counters:
    """Since the process's start. A request is one prompt, a sequence one choice of it."""

    arrived_requests: int = 0
    arrived_sequences: int = 0
    arrived_tokens: int = 0  # of their prompts, cached or not
    unread_requests: int = 0  # turned away before their tokens were counted
    started_requests: int = 0  # those whose first text went out
    started_tokens: int = 0
    uncached_tokens: int = 0  # of these: computed by somebody
    uncached_squared: float = 0.0  # sums over requests: how time grows with a prompt's length
    uncached_cubed: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    prefill_token_s: float = 0.0  # each prompt's seconds times its uncached tokens
    overhead_s: float = 0.0  # TTFT less all waits and less the computing
    grant_wait_s: float = 0.0
    ended_sequences: int = 0
    ended_tokens: int = 0  # that these sequences put out


class Length(NamedTuple):
    """Of prompts of about one length, sequences that came and that ended, and what those put
    out: answers to long prompts may be short. Since the process's start."""

    arrived: int = 0
    ended: int = 0
    tokens: int = 0


def length_class(prompt_tokens: int) -> int:
    """Prompts of one class differ by less than a factor of two: 2^(class-1) tokens and more."""
    return prompt_tokens.bit_length()


class Signals:
    """Counts, and keeps the last minute's distributions."""

    def __init__(self, process: str, now: float) -> None:
        self._process = process
        self._began = now
        self._counters = Counters()
        self._lengths: dict[int, Length] = {}
        self._held = 0
        self._sketches = {
            name: WindowSketch(WINDOW_S)
            for name in (
                *("ttft_s", "tpot_s"),
                "own_ttft_s",  # without the wait for decode's grant, which isn't prefill's fault
                *("queue_s", "grant_wait_s", "uncached_tokens"),
            )
        }

    def arrived(self, tokens: int, choices: int) -> None:
        """A prompt that could be served came, whether or not there is room for it now."""
        counters = self._counters
        counters.arrived_requests += 1
        counters.arrived_sequences += choices
        counters.arrived_tokens += tokens
        self._count(tokens, arrived=choices)

    def unread(self) -> None:
        """A request was turned away unread: the router is full."""
        self._counters.unread_requests += 1

    def hold(self, change: int) -> None:
        """Requests more or fewer wait for a worker, where there is none."""
        self._held += change

    def first_text(self, timeline: Timeline, ttft_s: float, now: float) -> None:
        counters = self._counters
        uncached = max(timeline.prompt_tokens - timeline.cached_tokens, 0)
        own_s = max(ttft_s - timeline.grant_wait_s, 0.0)
        counters.started_requests += 1
        counters.started_tokens += timeline.prompt_tokens
        counters.uncached_tokens += uncached
        counters.uncached_squared += float(uncached) ** 2
        counters.uncached_cubed += float(uncached) ** 3
        counters.prefill_queue_s += timeline.prefill_queue_s
        counters.prefill_s += timeline.prefill_s
        counters.prefill_token_s += timeline.prefill_s * uncached
        counters.grant_wait_s += timeline.grant_wait_s
        waits_s = timeline.queue_s + timeline.prefill_queue_s + timeline.prefill_s
        counters.overhead_s += max(own_s - waits_s, 0.0)
        for name, value in (
            ("ttft_s", ttft_s),
            ("own_ttft_s", own_s),
            ("queue_s", timeline.queue_s),
            ("grant_wait_s", timeline.grant_wait_s),
            ("uncached_tokens", float(uncached)),
        ):
            self._sketches[name].add(value, now)

    def ended(self, timeline: Timeline, now: float) -> None:
        """A prompt's way is over. One that put nothing out says nothing of lengths."""
        if timeline.completion_tokens:
            self._counters.ended_sequences += timeline.choices
            self._counters.ended_tokens += timeline.completion_tokens
            self._count(
                timeline.prompt_tokens, ended=timeline.choices, tokens=timeline.completion_tokens
            )
        if timeline.tpot_s is not None:
            self._sketches["tpot_s"].add(timeline.tpot_s, now)

    def _count(self, prompt_tokens: int, arrived: int = 0, ended: int = 0, tokens: int = 0) -> None:
        which = length_class(prompt_tokens)
        known = self._lengths.get(which, Length())
        self._lengths[which] = Length(
            known.arrived + arrived, known.ended + ended, known.tokens + tokens
        )

    def document(
        self, now: float, queued: Queued, workers: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """All of it, JSON-ready. Sketches: bucket -> count (pd_core.sketch)."""
        return {
            "process": self._process,
            "uptime_s": max(now - self._began, 0.0),
            "window_s": WINDOW_S,
            **{name: sketch.to_json(now) for name, sketch in self._sketches.items()},
            "counters": asdict(self._counters),
            "lengths": {str(which): list(one) for which, one in self._lengths.items()},
            "queued": queued._asdict(),
            "held_requests": self._held,
            "workers": list(workers),
        }
