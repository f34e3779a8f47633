"""Tokens of a prefill and a decode worker = tokens of one `both` worker = tokens of
transformers' `generate`: greedy, fp32, through the openai client, streaming and not.

Prompts of 1 to 1,500 tokens: around block borders, plain and chat, several choices, a
stop string across the hand-over, a first token that ends the answer, max_tokens 1.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import Goal, arguments, report, table
from bench.models import load_tokenizer, model_dir, prompt_of
from tests.cluster import serving, spec

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
    prompt: str | list[dict[str, str]]
    max_tokens: int = 12
    choices: int = 1
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What has to be equal. `tokens` counts the end token too; pieces where asked for."""

    texts: tuple[str, ...]
    finishes: tuple[str, ...]
    tokens: int
    pieces: tuple[str, ...] = field(default=())


class Reference:
    """transformers' own `generate`, in fp32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        eos = self._model.generation_config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [eos])

    def ids(self, case: Case) -> list[int]:
        if isinstance(case.prompt, str):
            return list(self._tokenizer(case.prompt)["input_ids"])
        text = self._tokenizer.apply_chat_template(
            case.prompt, tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def generate(self, case: Case) -> list[int]:
        """The new token ids, the end token included."""
        ids = self._torch.tensor([self.ids(case)])
        with self._torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=case.max_tokens,
                do_sample=False,
            )
        return [int(t) for t in out[0, ids.shape[1] :]]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def answer(self, case: Case) -> Answer:
        """What the API has to say: the stop string cuts text and tokens."""
        new = self.generate(case)
        finish = "stop" if new[-1] in self._eos else "length"
        text, count = self.decode(new), len(new)
        if case.stop and (at := text.find(case.stop)) >= 0:
            count = next(i for i in range(1, count) if case.stop in self.decode(new[:i]))
            text, finish = text[:at], "stop"
        return Answer((text,) * case.choices, (finish,) * case.choices, count * case.choices)

    def ends_at_once(self, case: Case) -> bool:
        return self.generate(case)[0] in self._eos


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
    plain = Case("", prompt)
    first, second = (reference.decode([t]) for t in reference.generate(plain)[:2])
    return Case("stop across the hand-over", prompt, stop=first[-2:] + second[:2])


def _ends_first(reference: Reference) -> Case:
    """A prompt whose first new token ends the answer."""
    for question, answer in (
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Say hello.", "Hello! How can I help you today?"),
        ("What is two plus two?", "Two plus two is four."),
    ):
        case = Case("first token ends it", _ENDED.format(question, answer))
        if reference.ends_at_once(case):
            return case
    raise RuntimeError("the model ends none of the finished answers: choose others")


def ask(client: Any, case: Case, stream: bool, logprobs: bool) -> Answer:
    """One request through the openai client."""
    options: dict[str, Any] = {"model": "tiny", "max_tokens": case.max_tokens, "temperature": 0}
    if case.choices > 1:
        options["n"] = case.choices
    if case.stop:
        options["stop"] = case.stop
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    if isinstance(case.prompt, str):
        options["prompt"] = case.prompt
        reply = client.completions.create(**options, **({"logprobs": 0} if logprobs else {}))
    else:
        options["messages"] = case.prompt
        reply = client.chat.completions.create(
            **options, **({"logprobs": True} if logprobs else {})
        )
    events = list(reply) if stream else [reply]
    return _collect(events, case.choices)


def _collect(events: Sequence[Any], choices: int) -> Answer:
    texts = [""] * choices
    finishes = [""] * choices
    pieces: list[str] = []
    tokens = 0
    for event in events:
        if event.usage:
            tokens = event.usage.completion_tokens
        for choice in event.choices:
            texts[choice.index] += _text(choice) or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            if choice.index == 0:
                pieces += _pieces(choice)
    return Answer(tuple(texts), tuple(finishes), tokens, tuple(pieces))


def _text(choice: Any) -> str | None:
    if hasattr(choice, "text"):
        return choice.text or ""
    message = choice.delta if hasattr(choice, "delta") else choice.message
    return message.content or ""


def _pieces(choice: Any) -> list[str]:
    """The tokens' own texts, where logprobs were asked for."""
    logprobs = getattr(choice, "logprobs", None)
    if logprobs is None:
        return []
    if getattr(logprobs, "content", None) is not None:
        return [entry.token for entry in logprobs.content]
    return list(logprobs.tokens or [])


def same(got: Answer, want: Answer) -> bool:
    return (got.texts, got.finishes, got.tokens) == (want.texts, want.finishes, want.tokens)


def compare(
    base_url: str, cases: Sequence[Case], wanted: Sequence[Answer]
) -> dict[str, list[bool]]:
    """For each case: equal when streamed, when not, and with logprobs' tokens too."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300)
    found: dict[str, list[bool]] = {"plain": [], "stream": []}
    for case, want in zip(cases, wanted, strict=True):
        plain = ask(client, case, stream=False, logprobs=False)
        streamed = ask(client, case, stream=True, logprobs=True)
        found["plain"].append(same(plain, want))
        found["stream"].append(same(streamed, want) and _pieces_fit(streamed, want, case))
        for how, got in (("plain", plain), ("stream", streamed)):
            if not found[how][-1]:
                print(f"differs ({how}): {case.name}\n  got  {got}\n  want {want}", file=sys.stderr)
    client.close()
    return found


def _pieces_fit(got: Answer, want: Answer, case: Case) -> bool:
    """The tokens named by logprobs are as many as were counted."""
    return len(got.pieces) == want.tokens // case.choices


def main(quick: bool) -> None:
    folder = model_dir()
    reference = Reference(folder)
    cases = make_cases(reference, load_tokenizer(folder), quick)
    wanted = [reference.answer(case) for case in cases]
    results = {}
    pools: dict[str, dict[str, Any]] = {
        "pd": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
        "both": {"colocated": {"replicas": 1}},
    }
    for name, pool in pools.items():
        with tempfile.TemporaryDirectory() as work, serving(spec(folder, **pool), Path(work)) as c:
            results[name] = compare(c.base_url, cases, wanted)
    rows = [
        (case.name, len(reference.ids(case)), want.tokens, *_marks(results, i))
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
