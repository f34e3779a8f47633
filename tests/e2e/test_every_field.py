"""Every field that OpenAI's released client can send, and every extra of ours, through a real
router: each is taken, or refused with a 400 that names it. None is passed over in silence."""

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec
import openai
import pytest
from openai import OpenAI
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from pd_router.openai import ChatRequest, CompletionRequest
from tests.cluster import Cluster
from tests.e2e.asking import exactly
from tests.reference import Reference

HI: Any = [{"role": "user", "content": "How far is the sea?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sea": {"enum": ["far", "near"]}},
    "required": ["sea"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

# With a value that is taken.
BOTH: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "logit_bias": {"40": -100},
    "max_tokens": 2,
    "n": 2,
    "presence_penalty": 0.5,
    "seed": 7,
    "stop": ["\n\n\n", "never"],
    "temperature": 0.5,
    "top_p": 0.5,
    "user": "me",
}
CHAT = BOTH | {
    "function_call": "none",
    "functions": [],
    "logprobs": True,
    "max_completion_tokens": 2,
    "metadata": {"for": "tests"},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prompt_cache_key": "me",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "none",
    "response_format": {"type": "json_schema", "json_schema": {"name": "sea", "schema": SCHEMA}},
    "safety_identifier": "me",
    "service_tier": "auto",
    "store": False,
    "tool_choice": "none",
    "tools": [],
    "verbosity": "medium",
}
COMPLETION = BOTH | {"best_of": 1, "echo": False, "logprobs": 2, "suffix": ""}
# Ours, beside OpenAI's.
EXTRAS: dict[str, Any] = {
    "cache_salt": "mine",
    "ignore_eos": True,
    "min_p": 0.1,
    "min_tokens": 1,
    "priority": -3,
    "repetition_penalty": 1.1,
    "return_token_ids": True,
    "session_id": "talk",
    "stop_token_ids": [5],
    "structured_outputs": {"regex": "[a-z]+"},
    "top_k": 5,
}
# With a value that isn't, and what the error names.
REFUSED_BOTH: list[tuple[str, Any, str]] = [
    ("frequency_penalty", 2.5, "frequency_penalty"),
    ("logit_bias", {"sea": 1}, "logit_bias"),
    ("logit_bias", {"40": 101}, "logit_bias.40"),
    ("max_tokens", -1, "max_tokens"),
    ("n", 0, "n"),
    ("n", 17, "n"),
    ("presence_penalty", -3, "presence_penalty"),
    ("seed", 1.5, "seed"),
    ("stop", ["x"] * 17, "stop"),
    ("stop", [""], "stop[0]"),
    ("temperature", 2.1, "temperature"),
    ("top_p", 1.1, "top_p"),
    ("cache_salt", "", "cache_salt"),
    ("ignore_eos", "yes", "ignore_eos"),
    ("min_p", 2, "min_p"),
    ("min_tokens", 3, "min_tokens"),  # of two at most
    ("priority", 1001, "priority"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("session_id", 5, "session_id"),
    ("stop_token_ids", [99999], "stop_token_ids[0]"),
    ("structured_outputs", {"regex": "("}, "structured_outputs.regex"),
    ("top_k", -2, "top_k"),
    ("guided_json", {}, "guided_json"),
    ("best", 1, "best"),
]
REFUSED_CHAT: list[tuple[str, Any, str]] = [
    *REFUSED_BOTH,
    ("audio", {"voice": "x", "format": "mp3"}, "audio"),
    ("echo", True, "echo"),
    ("function_call", {"name": "look"}, "function_call"),
    ("functions", [{"name": "look"}], "functions"),
    ("max_completion_tokens", -1, "max_completion_tokens"),
    ("modalities", ["text", "audio"], "modalities"),
    ("moderation", {"model": "x"}, "moderation"),
    ("prediction", {"type": "content", "content": "x"}, "prediction"),
    ("prompt_cache_options", {"x": 1}, "prompt_cache_options"),
    ("reasoning_effort", "high", "reasoning_effort"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("service_tier", "flex", "service_tier"),
    ("store", True, "store"),
    ("stream_options", {"include_usage": True}, "stream_options"),  # without 'stream'
    ("tool_choice", "required", "tool_choice"),
    ("tools", [TOOL], "tools"),  # this model's template has none
    ("top_logprobs", 21, "top_logprobs"),
    ("top_logprobs", 2, "top_logprobs"),  # without 'logprobs'
    ("verbosity", "high", "verbosity"),
    ("web_search_options", {"search_context_size": "low"}, "web_search_options"),
]
REFUSED_COMPLETION: list[tuple[str, Any, str]] = [
    *REFUSED_BOTH,
    ("best_of", 3, "best_of"),
    ("echo", True, "echo"),
    ("logprobs", 21, "logprobs"),
    ("messages", [], "messages"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("suffix", "the end", "suffix"),
    ("tools", [TOOL], "tools"),
]


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=cluster.base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(client: OpenAI, **fields: Any) -> Any:
    body = {"max_tokens": 2, **fields} if "max_completion_tokens" not in fields else fields
    return client.chat.completions.create(model="tiny", messages=HI, extra_body=body)


def complete(client: OpenAI, **fields: Any) -> Any:
    body = {"max_tokens": 2, **fields}
    return client.completions.create(model="tiny", prompt="How far", extra_body=body)


def named(rows: list[tuple[str, Any, str]]) -> set[str]:
    return {row[0] for row in rows}


def test_no_field_is_left_out() -> None:
    """Of the released client's, and of those that the router publishes."""
    always = {"model", "messages", "prompt", "stream"}
    for hints, published, here in (
        (chat_params.CompletionCreateParamsBase, ChatRequest, {*CHAT, *named(REFUSED_CHAT)}),
        (
            completion_params.CompletionCreateParamsBase,
            CompletionRequest,
            {*COMPLETION, *named(REFUSED_COMPLETION)},
        ),
    ):
        sent = set(get_type_hints(hints)) - always
        assert sent <= here, f"without a row: {sent - here}"
        known = {field.name for field in msgspec.structs.fields(published)} - always
        shared = {"response_format", "metadata", "safety_identifier", "prompt_cache_key"}
        shared |= {"prompt_cache_retention", "service_tier", "store", "max_completion_tokens"}
        assert known <= here | set(EXTRAS) | shared, f"without a row: {known - here}"


@pytest.mark.parametrize("name", [*CHAT, *EXTRAS])
def test_chat_takes(client: OpenAI, name: str) -> None:
    answer = chat(client, **{name: (CHAT | EXTRAS)[name]})
    assert len(answer.choices) == (2 if name == "n" else 1)
    assert answer.usage.completion_tokens <= 2 * len(answer.choices)


@pytest.mark.parametrize("name", [*COMPLETION, *EXTRAS])
def test_completions_take(client: OpenAI, name: str) -> None:
    answer = complete(client, **{name: (COMPLETION | EXTRAS)[name]})
    assert len(answer.choices) == (2 if name == "n" else 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "value", "param"), REFUSED_CHAT)
def test_chat_refuses(client: OpenAI, name: str, value: Any, param: str, stream: bool) -> None:
    """Streams too hear of it by a status, not by an event."""
    stream = stream and name != "stream_options"
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **{name: value}, stream=stream)
    assert refused.value.param == param
    assert param in refused.value.message
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(("name", "value", "param"), REFUSED_COMPLETION)
def test_completions_refuse(client: OpenAI, name: str, value: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **{name: value})
    assert refused.value.param == param
    assert param in refused.value.message


# ---- that those of ours do what they say ----------------------------------------------------


def ids(answer: Any) -> list[int]:
    [choice] = answer.choices
    return list(choice.token_ids)


@pytest.mark.parametrize(
    "fields", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 0}, {"temperature": 0}], ids=str
)
def test_narrowed_to_the_likeliest_it_is_greedy(
    client: OpenAI, reference: Reference, fields: dict[str, Any]
) -> None:
    answer = chat(client, max_tokens=12, return_token_ids=True, seed=3, **fields)
    assert ids(answer) == reference.generate(HI, 12)


def test_an_end_that_comes_too_early_is_not_taken(client: OpenAI, reference: Reference) -> None:
    [end] = reference.eos
    wished = {"temperature": 0, "logit_bias": {str(end): 100}, "max_tokens": 9}
    assert chat(client, **wished).usage.completion_tokens == 1
    answer = chat(client, **wished, min_tokens=4, return_token_ids=True)
    assert end not in ids(answer)[:4]
    assert ids(answer)[4:] == [end]
    assert answer.choices[0].finish_reason == "stop"


def test_a_salt_parts_caches(client: OpenAI, reference: Reference) -> None:
    """Nobody learns from the time or the count what another salt has sent."""
    prompt = exactly(reference, 97)

    def cached(salt: str) -> int:
        body = {"max_tokens": 2, "cache_salt": salt}
        answer = client.completions.create(model="tiny", prompt=prompt, extra_body=body)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0

    assert [cached("a"), cached("b")] == [0, 0]
    assert cached("a") >= 80


def test_usage_comes_last_in_a_stream(client: OpenAI) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    with client.chat.completions.create(
        model="tiny",
        messages=HI,
        max_tokens=2,
        **options,
    ) as stream:
        events: Any = list(stream)
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens >= 2
    assert all(event.usage is None for event in events[:-1])
    assert {choice.index for event in events[:-1] for choice in event.choices} == {0, 1}


def test_an_answer_keeps_to_its_schema(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sea", "schema": SCHEMA}}
    answer = chat(client, max_tokens=60, response_format=form)
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(answer.choices[0].message.content)["sea"] in ("far", "near")


def test_request_ids_go_out_as_they_came_in(client: OpenAI) -> None:
    given = {"X-Request-ID": "mine-1"}
    named_by_us = client.chat.completions.create(
        model="tiny",
        messages=HI,
        max_tokens=1,
        extra_headers=given,
    )
    assert named_by_us._request_id == "mine-1"
    assert chat(client)._request_id
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("nothing", extra_headers=given)
    assert missing.value.request_id == "mine-1"


def test_the_model_is_listed_and_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_tokens_there_and_back(cluster: Cluster, reference: Reference) -> None:
    root = cluster.base_url.removesuffix("/v1")
    with OpenAI(base_url=root, api_key="none", max_retries=0, timeout=60) as client:
        there = client.post("/tokenize", body={"prompt": "How far?"}, cast_to=dict[str, Any])
        assert there["tokens"] == reference.ids("How far?")
        assert there["count"] == len(there["tokens"])
        back = client.post("/detokenize", body={"tokens": there["tokens"]}, cast_to=dict[str, Any])
        assert back == {"prompt": "How far?"}
