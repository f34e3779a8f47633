"""Decoding with guesses by prompt look-up against decoding without, one request and eight at
a time: on work that copies (quotes, edits of code) and on chat, greedy and sampled.

Ours against ours: the same runner in float32, schedulers with and without drafts in turn.
The time is that of decoding, from the first token of an answer to its last. With and without
guesses each answer must have the same tokens.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.common import Goal, arguments, median, report, table
from bench.models import load_tokenizer, model_dir
from pd_engine.blocks import BlockPool
from pd_engine.runner import Runner
from pd_engine.scheduler import Scheduler, SchedulerConfig
from pd_engine.types import Mode, Prefilled, Request, Sampling, Tokens

GOALS = {
    "copying_speedup": Goal(">=", 1.8),
    "chat_speedup": Goal(">=", 0.97),
    "copying_speedup_b8": Goal(">=", 1),
    "chat_speedup_b8": Goal(">=", 0.97),
    "differing_tokens": Goal("<=", 0),
}
DRAFT_TOKENS = 8
BLOCK_TOKENS = 16
_FOREVER = 1e12

_CODE = (
    '''class Ledger:
    """Amounts by account, in cents."""

    def __init__(self) -> None:
        self.accounts = {}
        self.entries = []

    def add(self, account: str, amount: int) -> None:
        self.accounts[account] = self.accounts.get(account, 0) + amount
        self.entries.append((account, amount))

    def balance(self, account: str) -> int:
        return self.accounts.get(account, 0)

    def total(self) -> int:
        return sum(self.accounts.values())

    def largest(self) -> str:
        return max(self.accounts, key=lambda account: self.accounts[account])
''',
    """def read_table(path):
    rows = []
    with open(path) as file:
        header = file.readline().strip().split(",")
        for line in file:
            values = line.strip().split(",")
            if len(values) != len(header):
                raise ValueError("a row has " + str(len(values)) + " values")
            rows.append(dict(zip(header, values)))
    return rows


def write_table(path, rows):
    header = list(rows[0])
    with open(path, "w") as file:
        file.write(",".join(header) + "\\n")
        for row in rows:
            file.write(",".join(row[name] for name in header) + "\\n")
""",
)
_TEXT = (
    "The lighthouse at Skerry Point was built in 1874, after three ships had been lost there in "
    "a single winter. Its first keeper, Anna Holm, lived in it for forty-one years. She wrote "
    "down the weather every morning, and her books are still read by those who study the "
    "climate of the coast. In 1931 the lamp was changed from oil to electricity. The cable was "
    "laid across the bay in a week, but it broke in the first storm and the old lamp had to be "
    "lit again. Since 1988 nobody lives in the tower. The light is switched by a computer in "
    "the harbour office, which is itself switched off when the harbour master goes home.",
    "Bread rises because yeast eats sugar and breathes out gas. The gas would leave the dough "
    "at once if gluten did not hold it. Kneading builds gluten, and so does time: a dough that "
    "rests overnight in a cold place needs no kneading at all. Salt slows the yeast down and "
    "makes the gluten stronger. A hot oven makes the last gas expand before the crust is hard, "
    "which is why bakers speak of oven spring. When the inside has reached ninety-four degrees "
    "the bread is done, whatever the colour of its crust.",
)
_COPYING = (
    *(f"Write this Python code again, with type hints, and change nothing else.\n\n{code}"
      for code in _CODE),
    *(f"Correct the spelling of this text and write all of it again:\n\n{text}" for text in _TEXT),
    *(f"Summarize this text in one sentence, then quote it in full:\n\n{text}" for text in _TEXT),
)  # fmt: skip
_CHAT = (
    "What is the difference between a comet and an asteroid?",
    "Give me five ideas for a birthday present for my father, who likes gardening.",
    "Tell a short story about a robot who learns to paint.",
    "How do I cook rice so that it does not stick?",
    "Explain to a child why the sky is blue.",
    "I have a job interview tomorrow and I am nervous. What should I do?",
    "Which countries border Switzerland, and which languages are spoken there?",
    "Write a polite e-mail to my landlord about a broken heating.",
)


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int
    copying: int  # prompts
    chat: int
    new_tokens: int


FULL = Plan(5, len(_COPYING), len(_CHAT), 128)
QUICK = Plan(1, 1, 1, 24)


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class Lab:
    """One runner; a fresh scheduler for each measurement."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = load_tokenizer(folder)
        self.runner = Runner(
            folder,
            dtype="float32",
            kv_cache_tokens=8192,
            block_tokens=BLOCK_TOKENS,
            threads=torch.get_num_threads(),
        )
        self.runner.warmup()
        self.drafted = self.guessed = 0

    def ids(self, text: str) -> tuple[int, ...]:
        chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return tuple(self.tokenizer.encode(chat, add_special_tokens=False).ids)

    def answers(
        self, prompts: Sequence[tuple[int, ...]], sampling: Sampling, drafts: int
    ) -> list[Answer]:
        """All at a time."""
        config = SchedulerConfig(
            max_batch_tokens=2048,
            chunk_tokens=512,
            max_running=len(prompts),
            max_queued=len(prompts),
            max_model_tokens=self.runner.max_model_tokens,
            recompute_max_tokens=self.runner.max_model_tokens,
            draft_tokens=drafts,
            draft_price=self.runner.draft_price,
            draft_price_per_token=self.runner.draft_price_per_token,
        )
        scheduler = Scheduler(config, BlockPool(self.runner.num_blocks, BLOCK_TOKENS))
        for number, ids in enumerate(prompts):
            key = (0, number)
            scheduler.add(
                Request(key, "r", 1, ids, len(ids), (0,), sampling, Mode.LOCAL, _FOREVER, _FOREVER),
                0.0,
            )
        found = [Answer() for _ in prompts]
        while (batch := scheduler.schedule(time.monotonic())) is not None:
            events = scheduler.absorb(batch, self.runner.step(batch), time.monotonic())
            now = time.perf_counter()
            self.drafted += sum(row.drafts for row in batch.rows)
            for event in events:
                if isinstance(event, Prefilled | Tokens):
                    outs = event.first if isinstance(event, Prefilled) else event.tokens
                    found[event.key[1]].tokens += [out.token for out in outs]
                    found[event.key[1]].times += [now] * len(outs)
                if isinstance(event, Tokens):
                    self.guessed += event.guessed
        return found

    def measure(
        self, prompts: Sequence[tuple[int, ...]], sampling: Sampling, drafts: int, at_a_time: int
    ) -> tuple[float, list[list[int]]]:
        """Seconds of decoding of all of them, and what was written."""
        seconds, written = 0.0, []
        for start in range(0, len(prompts), at_a_time):
            answers = self.answers(prompts[start : start + at_a_time], sampling, drafts)
            last_first = max(answer.times[0] for answer in answers)
            seconds += max(answer.times[-1] for answer in answers) - last_first
            written += [answer.tokens for answer in answers]
        return seconds, written


def differing(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> int:
    """Tokens at the same place that aren't the same, or are in one answer alone."""
    count = 0
    for one, other in zip(a, b, strict=True):
        count += abs(len(one) - len(other))
        count += sum(x != y for x, y in zip(one, other, strict=False))
    return count


def compare(
    lab: Lab, plan: Plan, metrics: dict[str, float | None]
) -> Iterator[tuple[str, float, float, float, float]]:
    """Fills the metrics; yields rows of the table."""
    sets = {
        "copying": [lab.ids(text) for text in _COPYING[: plan.copying]],
        "chat": [lab.ids(text) for text in _CHAT[: plan.chat]],
    }
    greedy = Sampling(max_tokens=plan.new_tokens, ignore_eos=True)
    sampled = Sampling(max_tokens=plan.new_tokens, ignore_eos=True, temperature=0.8, seed=3)
    wrong = 0
    for name, sampling, suffix, at_a_time in (
        ("copying", greedy, "", 1),
        ("chat", greedy, "", 1),
        ("chat", sampled, "_sampled", 1),
        ("copying", greedy, "_b8", 8),
        ("chat", greedy, "_b8", 8),
    ):
        prompts = sets[name]
        pairs = []
        lab.drafted = lab.guessed = tokens = 0
        for _ in range(plan.rounds):
            without, plain = lab.measure(prompts, sampling, 0, at_a_time)
            with_, guessed = lab.measure(prompts, sampling, DRAFT_TOKENS, at_a_time)
            pairs.append((without, with_))
            wrong += differing(plain, guessed)
            tokens = sum(len(written) for written in plain)
        metrics[f"{name}_speedup{suffix}"] = median(a / b for a, b in pairs)
        metrics[f"{name}_accepted{suffix}"] = lab.guessed / max(1, lab.drafted)
        yield (
            f"{name}{suffix}",
            tokens / median(a for a, _ in pairs),
            tokens / median(b for _, b in pairs),
            lab.drafted / plan.rounds / tokens,
            lab.guessed / max(1, lab.drafted),
        )
    metrics["differing_tokens"] = wrong


def main(quick: bool) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    lab = Lab(model_dir())
    metrics: dict[str, float | None] = {"draft_price": lab.runner.draft_price}
    rows = []
    for row in compare(lab, QUICK if quick else FULL, metrics):
        print(row, flush=True)
        rows.append(row)
    head = ("", "tokens/s without", "with", "guesses a token", "of them right")
    print("\n" + table(head, rows))
    report("speculation", metrics, GOALS, quick)


if __name__ == "__main__":
    main(arguments(__doc__))
