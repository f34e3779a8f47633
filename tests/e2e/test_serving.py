"""The OpenAI API over a prefill and a decode worker, through the openai client: every token
is the one that transformers' `generate` gives.

Streaming or not, several choices, logprobs, stop strings across the hand-over, max_tokens at
its edges, usage and cached tokens.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.cluster import Cluster, serving, spec
from tests.e2e.asking import exactly, text_of
from tests.reference import Prompt, Reference

BLOCK = 16
CHAT: Prompt = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=cluster.base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def complete(client: OpenAI, prompt: Any, **options: Any) -> Any:
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    options = {"model": "tiny", "temperature": 0, "extra_body": extra, **options}
    return client.completions.create(prompt=prompt, **options)


def chat(client: OpenAI, messages: Any, **options: Any) -> Any:
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    options = {"model": "tiny", "temperature": 0, "extra_body": extra, **options}
    return client.chat.completions.create(messages=messages, **options)


def streamed(events: Any, choices: int = 1) -> tuple[list[list[int]], list[str], list[str], Any]:
    """(token ids, texts, finish reasons) by choice, and the usage that came last."""
    ids: list[list[int]] = [[] for _ in range(choices)]
    texts, finishes, usage = [""] * choices, [""] * choices, None
    for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            ids[choice.index] += choice.token_ids
            texts[choice.index] += choice.text or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    return ids, texts, finishes, usage


def plain_start(reference: Reference) -> tuple[str, str, str]:
    """A prompt and the texts of its first two new tokens, which are whole characters."""
    for tokens in range(40, 80):
        prompt = exactly(reference, tokens)
        first, second = (reference.decode([t]) for t in reference.generate(prompt, 2))
        if first.isascii() and second.isascii() and first and second:
            return prompt, first, second
    raise AssertionError("no prompt with a plain beginning")


@pytest.mark.parametrize(
    "tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 511, 512, 513, 1200]
)
def test_tokens_are_those_of_generate(client: OpenAI, reference: Reference, tokens: int):
    prompt = exactly(reference, tokens)
    want = reference.generate(prompt, 24)

    plain = complete(client, prompt, max_tokens=24)
    ids, texts, finishes, _ = streamed(complete(client, prompt, max_tokens=24, stream=True))

    assert plain.choices[0].token_ids == want
    assert ids == [want]
    assert texts == [plain.choices[0].text]
    assert finishes == [plain.choices[0].finish_reason]
    assert plain.usage.prompt_tokens == tokens
    assert plain.usage.completion_tokens == len(want)


def test_chat(client: OpenAI, reference: Reference):
    want = reference.generate(CHAT, 24)
    answer = chat(client, CHAT, max_tokens=24)
    assert answer.choices[0].token_ids == want
    assert answer.choices[0].message.content == reference.decode(want)
    assert answer.choices[0].message.role == "assistant"

    events = list(
        chat(client, CHAT, max_tokens=24, stream=True, stream_options={"include_usage": True})
    )
    said = "".join(c.delta.content or "" for e in events for c in e.choices)
    assert said == reference.decode(want)
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == len(want)
    assert all(event.usage is None for event in events[:-1])


def test_three_choices_have_right_indices_and_usage(client: OpenAI, reference: Reference):
    """Sampled: three that are alike could change places unnoticed."""
    prompt = exactly(reference, 40)
    options = {"max_tokens": 20, "temperature": 1.0, "seed": 11, "extra_body": {"ignore_eos": True}}

    first = complete(client, prompt, n=1, **options).choices[0].token_ids
    pair = complete(client, prompt, n=2, **options)
    plain = complete(client, prompt, n=3, **options)
    ids, texts, finishes, usage = streamed(
        complete(
            client, prompt, n=3, stream=True, stream_options={"include_usage": True}, **options
        ),
        choices=3,
    )

    assert [c.index for c in plain.choices] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in plain.choices}) == 3
    assert plain.choices[0].token_ids == first
    assert [c.token_ids for c in plain.choices[:2]] == [c.token_ids for c in pair.choices]
    assert ids == [c.token_ids for c in plain.choices]
    assert texts == [c.text for c in plain.choices]
    assert finishes == ["length"] * 3
    for counted in (plain.usage, usage):
        assert counted.prompt_tokens == 40
        assert counted.completion_tokens == 3 * 20
        assert counted.total_tokens == 40 + 3 * 20


def test_sampled_choices_differ_and_repeat_with_the_seed(client: OpenAI):
    options = {"max_tokens": 12, "n": 2, "temperature": 1.0, "seed": 7}
    first = complete(client, "The river runs", **options)
    again = complete(client, "The river runs", **options)
    other = complete(client, "The river runs", **{**options, "seed": 8})
    ids = [c.token_ids for c in first.choices]
    assert ids[0] != ids[1]
    assert [c.token_ids for c in again.choices] == ids
    assert [c.token_ids for c in other.choices] != ids


def test_a_repetition_penalty_from_the_first_token_on(client: OpenAI, reference: Reference):
    prompt = exactly(reference, 35)
    want = reference.generate(prompt, 16, repetition_penalty=0.25)
    assert want[0] != reference.generate(prompt, 1)[0]
    extra = {"return_token_ids": True, "repetition_penalty": 0.25}
    answer = complete(client, prompt, max_tokens=16, extra_body=extra)
    assert answer.choices[0].token_ids == want


def test_biases(client: OpenAI, reference: Reference):
    prompt = exactly(reference, 34)
    best = reference.generate(prompt, 1)[0]
    never = complete(client, prompt, max_tokens=8, logit_bias={str(best): -100})
    assert best not in never.choices[0].token_ids
    always = complete(client, prompt, max_tokens=4, logit_bias={"77": 100})
    assert always.choices[0].token_ids == [77] * 4


FORM = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1])
def test_structured_output(client: OpenAI, reference: Reference, temperature: float):
    """The model's own answer would be nonsense, from its first token on."""
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": FORM}}
    answer = chat(client, CHAT, response_format=asked, n=2, seed=3, temperature=temperature)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content)
        assert found.keys() == {"answer", "sure"}
        assert found["answer"] in ("yes", "no")
    events = complete(
        client,
        exactly(reference, 33),
        max_tokens=40,
        stream=True,
        temperature=temperature,
        extra_body={"structured_outputs": {"regex": "(red|green|blue)( [0-9]{3}){2}"}},
    )
    ids, texts, finishes, _ = streamed(events)
    assert re.fullmatch("(red|green|blue)( [0-9]{3}){2}", texts[0])
    assert (len(ids), finishes) == (1, ["stop"])


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_also_of_the_first_token(client: OpenAI, reference: Reference, stream: bool):
    prompt = exactly(reference, 33)
    new = reference.generate(prompt, 6)
    want = reference.logprobs(prompt, new)

    reply = complete(client, prompt, max_tokens=6, logprobs=2, stream=stream)
    events = list(reply) if stream else [reply]
    found = [c.logprobs for e in events for c in e.choices if c.logprobs]

    got = [value for part in found for value in part.token_logprobs]
    assert got == pytest.approx(want, abs=1e-3)
    # By text, so that tokens of equal text (parts of characters) share an entry.
    assert all(top for part in found for top in part.top_logprobs)


def test_chat_logprobs(client: OpenAI, reference: Reference):
    want = reference.logprobs(CHAT, reference.generate(CHAT, 4))
    answer = chat(client, CHAT, max_tokens=4, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(want, abs=1e-3)
    assert all(entry.top_logprobs[0].logprob >= entry.logprob - 1e-3 for entry in content)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_the_hand_over(client: OpenAI, reference: Reference, stream: bool):
    prompt, first, second = plain_start(reference)
    stop = first[-1:] + second[:1]
    whole = reference.decode(reference.generate(prompt, 12))

    reply = complete(client, prompt, max_tokens=12, stop=stop, stream=stream)
    _, texts, finishes, _ = streamed(reply if stream else [reply])

    assert texts == [whole[: whole.index(stop)]]
    assert finishes == ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_completed_by_the_first_token(
    client: OpenAI, reference: Reference, stream: bool
):
    prompt, stop, _ = plain_start(reference)
    reply = complete(client, prompt, max_tokens=12, stop=stop, stream=stream)
    ids, texts, finishes, _ = streamed(reply if stream else [reply])
    assert texts == [""]
    assert finishes == ["stop"]
    assert len(ids[0]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_first_token_that_ends_the_answer(client: OpenAI, reference: Reference, stream: bool):
    prompt = exactly(reference, 31)
    end = reference.generate(prompt, 1)
    reply = complete(
        client,
        prompt,
        max_tokens=12,
        stream=stream,
        extra_body={"stop_token_ids": end},
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    ids, texts, finishes, usage = streamed(reply if stream else [reply])
    assert (ids, texts, finishes) == ([end], [""], ["stop"])
    assert usage.completion_tokens == 1


def test_max_tokens_zero_one_two(client: OpenAI, reference: Reference):
    prompt = exactly(reference, 32)
    want = reference.generate(prompt, 2)
    for limit in (0, 1, 2):
        answer = complete(client, prompt, max_tokens=limit)
        assert answer.choices[0].token_ids == want[:limit]
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == limit


def test_max_tokens_absent(client: OpenAI, reference: Reference):
    """A completion then has 16, as OpenAI says; a chat goes on to the context's end."""
    prompt = exactly(reference, 30)
    answer = complete(client, prompt)
    assert answer.choices[0].token_ids == reference.generate(prompt, 16)

    long = [{"role": "user", "content": text_of(1950)}]
    left = 2048 - len(reference.ids(long))
    assert 0 < left < 1200
    answer = chat(client, long, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == left
    assert answer.choices[0].finish_reason == "length"


def test_max_tokens_larger_than_what_is_left_ends_at_the_context(
    client: OpenAI, reference: Reference
):
    prompt = exactly(reference, 1900)
    answer = complete(client, prompt, max_tokens=5000, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 148
    assert answer.choices[0].finish_reason == "length"


def test_cached_tokens_are_what_prefill_did_not_compute(client: OpenAI, reference: Reference):
    prompt = exactly(reference, 5 * BLOCK + 3)
    first = complete(client, prompt, max_tokens=4)
    second = complete(client, prompt, max_tokens=4)
    assert (first.usage.prompt_tokens_details.cached_tokens or 0) < 5 * BLOCK
    assert second.usage.prompt_tokens_details.cached_tokens == 5 * BLOCK
    assert second.choices[0].token_ids == first.choices[0].token_ids


def test_a_prompt_that_is_cached_to_its_end_is_computed_from_its_last_block_on(
    client: OpenAI, reference: Reference
):
    prompt = exactly(reference, 6 * BLOCK)
    want = reference.generate(prompt, 8)
    answers = [complete(client, prompt, max_tokens=8) for _ in range(2)]
    assert [a.choices[0].token_ids for a in answers] == [want] * 2
    cached = answers[1].usage.prompt_tokens_details.cached_tokens
    assert cached in (5 * BLOCK, 6 * BLOCK - 1)


def test_models_are_listed(client: OpenAI):
    assert [m.id for m in client.models.list()] == ["tiny"]


def test_nothing_is_held_after_all_that(cluster: Cluster):
    cluster.until_settled()


@pytest.mark.parametrize("engine", [{"chunkTokens": 0}, {"chunkTokens": 24, "blockTokens": 32}])
def test_any_chunk_and_block_size_gives_the_same_tokens(
    model: Path, reference: Reference, tmp_path: Path, engine: dict[str, int]
):
    pools = {role: {"replicas": 1, "engine": engine} for role in ("prefill", "decode")}
    prompts = [exactly(reference, n) for n in (31, 32, 33, 300)]
    with (
        serving(spec(model, **pools), tmp_path) as running,
        OpenAI(base_url=running.base_url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        got = [complete(client, p, max_tokens=10).choices[0].token_ids for p in prompts]
    assert got == [reference.generate(p, 10) for p in prompts]


def test_one_worker_that_does_both_gives_the_same_tokens(
    model: Path, reference: Reference, tmp_path: Path
):
    prompts = [exactly(reference, n) for n in (1, 16, 17, 600)]
    with (
        serving(spec(model, colocated={"replicas": 1}), tmp_path) as running,
        OpenAI(base_url=running.base_url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        got = [complete(client, p, max_tokens=10).choices[0].token_ids for p in prompts]
    assert got == [reference.generate(p, 10) for p in prompts]
