"""Tokens of a prefill and a decode worker = tokens of one `both` worker = tokens of
transformers' `generate`: greedy, fp32, through the openai client, streaming and not.

Prompts of 1 to 1,500 tokens: around block borders, plain and chat, several choices, a
stop string across the hand-over, a first token that ends the answer, max_tokens 1.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import Goal, arguments, report, table
from bench.models import load_tokenizer, model_dir, prompt_of
from tests.cluster import serving, spec
from tests.reference import Prompt, Reference

GOALS = {
    key: Goal(">=", 50) for key in ("prompts", "identical_pd", "identical_both", "identical_stream")
}
_LENGTHS = (
    1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256,
    257, 300, 400, 511, 512, 513, 700, 767, 768, 1023, 1024, 1025, 1500,
)  # fmt: skip
_QUICK_LENGTHS = (1, 15, 16, 17, 64, 513)
_CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Count from one to ten in words."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada, how can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "Übersetze ins Englische: Guten Morgen, wie geht es dir? 🙂"}],
    [{"role": "user", "content": "Write a haiku about rain."}],
)
_ENDED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `prompt` is text for /v1/completions, or a chat's messages."""

    name: str
    prompt: Prompt
    max_tokens: int = 12
    choices: int = 1
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What has to be equal, by choice. `tokens` is what usage counts, end tokens too."""

    texts: tuple[str, ...]
    finishes: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    tokens: int


def wanted_answer(reference: Reference, case: Case) -> Answer:
    """What the API has to say: a stop string cuts text and tokens."""
    new = reference.generate(case.prompt, case.max_tokens)
    finish = "stop" if new[-1] in reference.eos else "length"
    text = reference.decode(new)
    if case.stop and (at := text.find(case.stop)) >= 0:
        new = next(new[:i] for i in range(1, len(new)) if case.stop in reference.decode(new[:i]))
        text, finish = text[:at], "stop"
    n = case.choices
    return Answer((text,) * n, (finish,) * n, (tuple(new),) * n, len(new) * n)


def make_cases(reference: Reference, tokenizer: Any, quick: bool) -> list[Case]:
    lengths = _QUICK_LENGTHS if quick else _LENGTHS
    cases = [Case(f"plain {n}", prompt_of(tokenizer, n, i)) for i, n in enumerate(lengths)]
    chats = _CHATS[:2] if quick else _CHATS
    cases += [Case(f"chat {i}", chat, max_tokens=24) for i, chat in enumerate(chats)]
    cases += [
        Case("n = 3", prompt_of(tokenizer, 50, 101), choices=3),
        Case("n = 2, chat", _CHATS[0], choices=2),
        Case("max_tokens 1", prompt_of(tokenizer, 40, 102), max_tokens=1),
        Case("max_tokens 1, one block", prompt_of(tokenizer, 16, 103), max_tokens=1),
        Case("max_tokens 2", prompt_of(tokenizer, 33, 104), max_tokens=2),
        _stop_across(reference, prompt_of(tokenizer, 60, 105)),
        _stop_across(reference, prompt_of(tokenizer, 128, 106)),
        _ends_first(reference),
    ]
    return cases


def _stop_across(reference: Reference, prompt: str) -> Case:
    """A stop string that begins in token 0 and ends in token 1: either worker has half."""
    first, second = (reference.decode([t]) for t in reference.generate(prompt, 2))
    return Case("stop across the hand-over", prompt, stop=first[-2:] + second[:2])


def _ends_first(reference: Reference) -> Case:
    """A prompt whose first new token ends the answer."""
    for question, answer in (
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Say hello.", "Hello! How can I help you today?"),
        ("What is two plus two?", "Two plus two is four."),
    ):
        prompt = _ENDED.format(question, answer)
        if reference.generate(prompt, 1)[0] in reference.eos:
            return Case("first token ends it", prompt)
    raise RuntimeError("the model ends none of the finished answers: choose others")


def ask(client: Any, case: Case, stream: bool) -> Answer:
    """One request through the openai client."""
    options: dict[str, Any] = {"model": "tiny", "max_tokens": case.max_tokens, "temperature": 0}
    options["extra_body"] = {"return_token_ids": True}
    if case.choices > 1:
        options["n"] = case.choices
    if case.stop:
        options["stop"] = case.stop
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    if isinstance(case.prompt, str):
        reply = client.completions.create(prompt=case.prompt, **options)
    else:
        reply = client.chat.completions.create(messages=case.prompt, **options)
    return _collect(list(reply) if stream else [reply], case.choices)


def _collect(events: Sequence[Any], choices: int) -> Answer:
    texts = [""] * choices
    finishes = [""] * choices
    ids: list[tuple[int, ...]] = [()] * choices
    tokens = 0
    for event in events:
        if event.usage:
            tokens = event.usage.completion_tokens
        for choice in event.choices:
            texts[choice.index] += _text(choice)
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            ids[choice.index] += tuple(choice.token_ids)
    return Answer(tuple(texts), tuple(finishes), tuple(ids), tokens)


def _text(choice: Any) -> str:
    if hasattr(choice, "text"):
        return choice.text or ""
    message = choice.delta if hasattr(choice, "delta") else choice.message
    return message.content or ""


def compare(
    base_url: str, cases: Sequence[Case], wanted: Sequence[Answer]
) -> dict[str, list[bool]]:
    """For each case whether it is equal, streamed and not."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300)
    found: dict[str, list[bool]] = {"plain": [], "stream": []}
    for case, want in zip(cases, wanted, strict=True):
        for how in found:
            got = ask(client, case, stream=how == "stream")
            found[how].append(got == want)
            if got != want:
                print(f"differs ({how}): {case.name}\n  got  {got}\n  want {want}", file=sys.stderr)
    client.close()
    return found


def main(quick: bool) -> None:
    folder = model_dir()
    reference = Reference(folder)
    cases = make_cases(reference, load_tokenizer(folder), quick)
    wanted = [wanted_answer(reference, case) for case in cases]
    results = {}
    pools: dict[str, dict[str, Any]] = {
        "pd": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
        "both": {"colocated": {"replicas": 1}},
    }
    for name, pool in pools.items():
        with tempfile.TemporaryDirectory() as work, serving(spec(folder, **pool), Path(work)) as c:
            results[name] = compare(c.base_url, cases, wanted)
    rows = [
        (case.name, len(reference.ids(case.prompt)), want.tokens, *_marks(results, i))
        for i, (case, want) in enumerate(zip(cases, wanted, strict=True))
    ]
    print(table(("case", "prompt", "tokens", "PD", "PD stream", "both", "both stream"), rows))
    metrics = {
        "prompts": len(cases),
        "identical_pd": sum(results["pd"]["plain"]),
        "identical_both": sum(map(all, zip(*results["both"].values(), strict=True))),
        "identical_stream": sum(results["pd"]["stream"]),
    }
    report("identity", metrics, GOALS, quick)
    if any(metrics[key] != len(cases) for key in GOALS):
        raise SystemExit("tokens differ")


def _marks(results: dict[str, dict[str, list[bool]]], index: int) -> list[str]:
    found = [results[name][how][index] for name in ("pd", "both") for how in ("plain", "stream")]
    return ["=" if equal else "DIFFERS" for equal in found]


if __name__ == "__main__":
    main(arguments(__doc__))
