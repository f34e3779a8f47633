"""Covers pd_router.openai and replies: what is taken, what is refused and in which words,
and that no body whatsoever gets anything but an Ask or an ApiError."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.failures import Failure, FailureKind
from pd_router.errors import ApiError
from pd_router.openai import Ask, parse_chat, parse_completion
from pd_router.replies import Part, Replies, TokenLogprob, Usage


def chat(**fields: Any) -> Ask:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(json.dumps(body).encode())


def completion(**fields: Any) -> Ask:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def refusal(parse: Any, body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body)
    return caught.value


def refused(make: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    error = caught.value
    assert error.status == 400
    assert error.failure.traits.openai_type == "invalid_request_error"
    return error


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


PART = "messages[0].content[0]"
UNKNOWN = "unknown_parameter"


def text_part(**fields: Any) -> dict[str, Any]:
    return message(content=[{"type": "text", "text": "hi"} | fields])


# ---- what is taken ---------------------------------------------------------------------


def test_defaults_are_openais() -> None:
    ask = chat()
    assert (ask.temperature, ask.top_p, ask.top_k, ask.min_p) == (1.0, 1.0, 0, 0.0)
    assert (ask.choices, ask.stream, ask.stops, ask.max_tokens) == (1, False, (), None)
    assert ask.messages == ({"role": "user", "content": "hi"},)
    assert completion().max_tokens == 16


def test_null_is_as_if_absent() -> None:
    names = [
        "stream",
        "stream_options",
        "n",
        "stop",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "top_k",
        "min_p",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "cache_salt",
        "user",
        "tools",
        "tool_choice",
        "response_format",
        "logprobs",
        "top_logprobs",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "max_completion_tokens",
    ]
    ask = chat(seed=1, **dict.fromkeys(set(names) - {"seed"}))
    assert ask == chat(seed=1)


def test_seeds_are_64_bits_and_differ_when_absent() -> None:
    assert chat(seed=-1).seed == 2**64 - 1
    assert refused(chat, seed=2**63).param == "seed"
    assert chat().seed != chat().seed


def test_a_floor_above_the_limit_is_refused() -> None:
    assert chat(min_tokens=5, max_tokens=5).min_tokens == 5
    error = refused(chat, min_tokens=6, max_tokens=5)
    assert (error.param, error.code) == ("min_tokens", "invalid_value")


@pytest.mark.parametrize("name", ["user", "metadata", "safety_identifier", "prompt_cache_key"])
def test_fields_that_change_nothing_have_their_type_all_the_same(name: str) -> None:
    assert refused(chat, **{name: 3}).param == name


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 2**31 - 1}, 2**31 - 1),
    ],
)
def test_max_tokens_has_two_names(fields: dict[str, int], limit: int) -> None:
    assert chat(**fields).max_tokens == limit
    assert completion(**fields).max_tokens == limit


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"repetition_penalty": 1.0},
        {"logit_bias": {}},
        {"store": False},
        {"service_tier": "auto"},
        {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x"},
        {"tools": [], "tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"reasoning_effort": "none", "verbosity": "medium"},
        {"prompt_cache_key": "k"},
    ],
)
def test_what_changes_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert chat(seed=3, **fields) == chat(seed=3)


def test_penalties_and_biases() -> None:
    ask = chat(
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias={"7": -100, "12": 1.5, "0": 0},
    )
    assert (ask.presence_penalty, ask.frequency_penalty) == (-2.0, 0.5)
    assert ask.repetition_penalty == 1.3
    assert ask.logit_bias == ((0, 0.0), (7, -100.0), (12, 1.5))


def test_content_as_parts_and_an_answer_sent_back() -> None:
    ask = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "tool_calls": None,
                "function_call": None,
                "audio": None,
            },
            {"role": "user", "content": "", "name": "bob"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": None, "refusal": "never"},
        ]
    )
    assert ask.messages == (
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "", "name": "bob"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "never"},
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a"], ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ([[]], ((),)),
    ],
)
def test_prompts_in_all_their_forms(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_stops_and_streams() -> None:
    assert chat(stop="x").stops == ("x",)
    assert chat(stop=["x", "y"]).stops == ("x", "y")
    ask = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (ask.stream, ask.include_usage, ask.usage_in_each_chunk) == (True, True, True)


def test_logprobs_of_both_endpoints() -> None:
    assert (chat(logprobs=True).logprobs, chat(logprobs=True).top_logprobs) == (True, 0)
    assert chat(logprobs=True, top_logprobs=20).top_logprobs == 20
    assert (completion(logprobs=0).logprobs, completion(logprobs=3).top_logprobs) == (True, 3)
    assert not completion().logprobs


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    whole = chat(n=2.0, max_tokens=5e1, stop_token_ids=[7.0], seed=1)
    assert whole == chat(n=2, max_tokens=50, stop_token_ids=[7], seed=1)
    assert completion(prompt=[1.0, 2]).prompts == ((1, 2),)
    assert refused(chat, n=2.0, max_tokens=5.5).param == "max_tokens"
    assert refused(chat, n=2.0, nonsense=1).param == "nonsense"


# ---- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [5]}, "messages[0]", "invalid_type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        (message(content=5), "messages[0].content", "invalid_type"),
        (message(content=None), "messages[0].content", "invalid_value"),
        (message(content=[{"text": "x"}]), "messages[0].content[0].type", None),
        (message(content=[{"type": "text"}]), "messages[0].content[0].text", None),
        (message(content=[{"type": "text", "text": 1}]), "messages[0].content[0].text", None),
        (message(content=[{"type": "image_url", "image_url": {}}]), None, "invalid_value"),
        (text_part(cache_control={"type": "ephemeral"}), f"{PART}.cache_control", UNKNOWN),
        (text_part(nonsense=None), f"{PART}.nonsense", UNKNOWN),
        (text_part(image_url={"url": "x"}), f"{PART}.image_url", "invalid_value"),
        (text_part(refusal="x"), f"{PART}.refusal", "invalid_value"),
        (text_part(type="refusal"), f"{PART}.text", "invalid_value"),
        (message(content=[{"type": "refusal"}]), f"{PART}.refusal", "missing_required_parameter"),
        (message(annotations=[{}]), "messages[0].annotations", "unsupported_parameter"),
        (message(refusal="no"), "messages[0].refusal", "invalid_value"),
        (message(role="assistant", refusal="no"), "messages[0].refusal", "invalid_value"),
        (message(role="robot"), "messages[0].role", "invalid_value"),
        (message(role="function"), "messages[0].role", "unsupported_parameter"),
        (message(tool_calls=[{}]), "messages[0].tool_calls[0].function", None),
        (message(nonsense=1), "messages[0].nonsense", "unknown_parameter"),
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"model": 5}, "model", "invalid_type"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 17}, "n", "invalid_value"),
        ({"n": 1.5}, "n", "invalid_type"),
        ({"n": True}, "n", "invalid_type"),
        ({"n": 10**60}, "n", None),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 10**30}, "max_tokens", None),
        ({"max_tokens": "9"}, "max_tokens", "invalid_type"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value"),
        ({"stop": "a" * 1001}, "stop", "invalid_value"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids", "invalid_value"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "invalid_type"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logprobs": 5}, "logprobs", "invalid_type"),
        ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
        ({"presence_penalty": False}, "presence_penalty", "invalid_type"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"repetition_penalty": 11}, "repetition_penalty", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
        ({"logit_bias": {"5": "a"}}, "logit_bias[...]", "invalid_type"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "invalid_value"),  # would be 5 once more
        ({"logit_bias": {"five": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
        ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "invalid_value"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "invalid_value"),
        (
            {"structured_outputs": {"regex": "a" * 16_001}},
            "structured_outputs.regex",
            "invalid_value",
        ),
        (
            {"structured_outputs": {"json": {"a": "b" * 32_000}}},
            "structured_outputs.json",
            "invalid_value",
        ),
        (
            {
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "structured_outputs",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "ignore_eos",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_object"}, "min_tokens": 1},
            "min_tokens",
            "invalid_value",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"audio": {}}, "audio", "unsupported_parameter"),
        ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ],
)
def test_chat_refusals(fields: dict[str, Any], param: str | None, code: str | None) -> None:
    error = refused(chat, **fields)
    if param is not None:
        assert error.param == param
        assert param in error.failure.message
    if code is not None:
        assert error.code == code


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [[1], [2.5]]}, "prompt[1][0]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 64, "n": 3}, "n"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
def test_completion_refusals(fields: dict[str, Any], param: str) -> None:
    assert refused(completion, **fields).param == param


@pytest.mark.parametrize("choices", [17, 129, 2**70, 10**4000])
@pytest.mark.parametrize("ask", [chat, completion])
def test_too_many_choices_are_told_how_many_there_may_be(
    ask: Callable[..., Any], choices: int
) -> None:
    said = refused(ask, n=choices).failure.message
    assert said == "'n' is too large: at most 16 choices are made of a prompt."


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nul",
        b"{",
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"model": "\\ud800", "messages": []}',
        b'{"model": "m", "temperature": NaN, "messages": []}',
        b'{"model": "m", "messages": []} and more',
        b'{"unknown":',
        b'{"messages": [[[',
        b"\xef\xbb\xbf{}",
    ],
)
def test_broken_json(body: bytes) -> None:
    error = refusal(parse_chat, body)
    assert (error.status, error.code, error.param) == (400, "invalid_json", None)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "messages": ' + b"[" * 200_000,
        b'{"model": "m", "metadata": ' + b"[" * 200_000,
        b'{"model": "m", "metadata": ' + b'{"a":' * 200_000,
        b'{"model": "m", "metadata": ' + b"[" * 200_000 + b"]" * 200_000 + b', "messages": []}',
        b'{"model": "m", "temperature": 1e999, "messages": []}',
        b'{"model": "m", "max_tokens": 1' + b"0" * 5000 + b', "messages": []}',
        b'{"model": "m", "n": 1' + b"0" * 4290 + b', "messages": [{"role":"user","content":""}]}',
        b'{"' + b"x" * 1_000_000 + b'": 1, "model": "m", "messages": []}',
        b"[]",
        b"5",
    ],
)
def test_absurd_bodies(body: bytes) -> None:
    error = refusal(parse_chat, body)
    assert error.status == 400
    assert len(error.body()) < 3000


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
_fields = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "n",
        "stop",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "top_k",
        "min_p",
        "logprobs",
        "top_logprobs",
        "tools",
        "response_format",
        "logit_bias",
        "stop_token_ids",
        "echo",
        "best_of",
        "suffix",
        "max_completion_tokens",
        "metadata",
        "user",
        "x",
    ]
)


@given(st.dictionaries(_fields, _json), st.booleans())
def test_any_json_is_answered(fields: dict[str, Any], good: bool) -> None:
    base = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} if good else {}
    for parse in (parse_chat, parse_completion):
        try:
            outcome: Ask | ApiError = parse(json.dumps(base | fields).encode())
        except ApiError as error:
            outcome = error
        if isinstance(outcome, ApiError):
            assert outcome.status == 400
            assert json.loads(outcome.body())["error"]["message"]


@given(st.binary(max_size=200))
def test_any_bytes_are_answered(body: bytes) -> None:
    assert refusal(parse_chat, body).status == 400


def test_failures_become_openais_errors() -> None:
    error = ApiError.of(Failure(FailureKind.NO_WORKERS, "nobody"))
    body = json.loads(error.body())
    assert body == {
        "error": {"message": "nobody", "type": "server_error", "param": None, "code": "no_workers"}
    }
    assert error.event() == b"data: " + error.body() + b"\n\n"


# ---- answers ---------------------------------------------------------------------------------


def _event(chunk: bytes) -> dict[str, Any]:
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    assert b"\n" not in chunk[6:-2]
    decoded: dict[str, Any] = json.loads(chunk[6:])
    return decoded


@given(st.text(), st.booleans(), st.sampled_from([None, "stop", "length"]), st.booleans())
def test_chunks_are_json_events(text: str, first: bool, finish: Any, is_chat: bool) -> None:
    ask = chat() if is_chat else completion()
    part = Part(3, first=first, text=text, finish=finish)
    event = _event(Replies(ask, "id-1", 7).chunk(part, None))
    (choice,) = event["choices"]
    assert (event["id"], event["created"], event["model"]) == ("id-1", 7, "m")
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (3, finish, None)
    if is_chat:
        assert choice["delta"].get("content", "") == text
        assert choice["delta"].get("role") == ("assistant" if first else None)
    else:
        assert choice["text"] == text
    assert "usage" not in event


def test_usage_is_null_in_chunks_when_it_comes_at_the_end() -> None:
    ask = chat(stream=True, stream_options={"include_usage": True})
    replies = Replies(ask, "x", 0)
    assert _event(replies.chunk(Part(0, text="a"), None))["usage"] is None
    last = _event(replies.usage_chunk(Usage(5, 7, 3)))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    each = _event(replies.chunk(Part(0, text="a"), Usage(5, 1, 0)))
    assert each["usage"]["total_tokens"] == 6


def test_logprobs_of_a_chat_and_of_a_completion() -> None:
    token = TokenLogprob(b"\xc3", -0.5, ((b"\xc3", -0.5), (b"b", -math.inf)), 4)
    part = Part(0, text="x", finish="stop", logprobs=[token])
    body = json.loads(Replies(chat(logprobs=True), "x", 0).body([part], Usage(1, 1, 0), [(1,)]))
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == (
        "\N{REPLACEMENT CHARACTER}",
        [195],
        -0.5,
    )
    assert [other["logprob"] for other in entry["top_logprobs"]] == [-0.5, -9999.0]
    body = json.loads(Replies(completion(logprobs=2), "x", 0).body([part], Usage(1, 1, 0), [(1,)]))
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5]
    assert logprobs["text_offset"] == [4]
    assert logprobs["top_logprobs"][0]["b"] == -9999.0


def test_token_ids_where_asked_for() -> None:
    ask = completion(prompt=["a", "b"], n=2, return_token_ids=True)
    parts = [Part(i, text="x", finish="stop", token_ids=[i]) for i in range(4)]
    body = json.loads(Replies(ask, "x", 0).body(parts, Usage(2, 4, 0), [(10,), (20, 21)]))
    assert [c["prompt_token_ids"] for c in body["choices"]] == [[10], [10], [20, 21], [20, 21]]
    assert [c["token_ids"] for c in body["choices"]] == [[0], [1], [2], [3]]
    ask = chat(return_token_ids=True)
    body = json.loads(Replies(ask, "x", 0).body(parts[:1], Usage(2, 4, 0), [(10,)]))
    assert body["prompt_token_ids"] == [10]
