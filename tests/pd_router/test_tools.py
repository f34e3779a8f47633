"""Covers tools: pd_router.toolcalls on text cut anywhere, pd_router.messages, and the whole
way with the openai client: the template gets the tools, calls come out of the answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError

from pd_router import toolcalls
from pd_router.errors import ApiError
from pd_router.openai import parse_chat
from pd_router.toolcalls import Call, Format
from tests.pd_router.http_rig import MODEL, Rig, go, rig, says, tiny_bundle

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
CALLS = [Call("weather", '{"city": "Paris"}'), Call("weather", '{"city": "Rome"}')]
TAGGED = f"<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n{ROME}\n</tool_call>"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> answer in <tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}:{{ c.function.arguments.city }}>"
    "{% endfor %}{% endfor %}"
)


# ---- calls in text ----------------------------------------------------------------------


def read(form: Format, pieces: list[str]) -> tuple[str, list[Call]]:
    reader = toolcalls.reader(form, {"weather"})
    found = [*(reader.push(piece) for piece in pieces), reader.finish()]
    return "".join(text for text, _ in found), [call for _, calls in found for call in calls]


EXAMPLES: list[tuple[Format, str, str, list[Call]]] = [
    ("tagged", TAGGED, "", CALLS),
    ("tagged", f"Let me look. {TAGGED}", "Let me look. ", CALLS),
    ("tagged", f"<tool_call>{PARIS}</tool_call>\n so be it ", "so be it ", CALLS[:1]),
    ("tagged", f"<tool_call>{PARIS}", "", CALLS[:1]),  # ended without the closing tag
    ("tagged", "no <tool call> <tool_cal", "no <tool call> <tool_cal", []),
    ("tagged", "<tool_call>nothing</tool_call> more", "<tool_call>nothing</tool_call> more", []),
    ("tagged", "<tool_call>half", "<tool_call>half", []),
    ("tagged", '<tool_call>{"name": "now"}</tool_call>', "", [Call("now", "{}")]),
    ("list", f"[{PARIS}, {ROME}]", "", CALLS),
    ("list", f"[TOOL_CALLS] [{PARIS}]", "", CALLS[:1]),
    ("list", "[1] is a footnote", "[1] is a footnote", []),
    ("list", "plain [text]", "plain [text]", []),
    ("object", PARIS.replace("arguments", "parameters"), "", CALLS[:1]),
    ("object", f" {PARIS}; {ROME}", "", CALLS),
    ("object", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ("object", f"{PARIS} and more", f"{PARIS} and more", []),
    ("object", "{", "{", []),
    ("object", "  ", "  ", []),
    ("object", "Hello {you}", "Hello {you}", []),
]


@pytest.mark.parametrize(("form", "text", "said", "calls"), EXAMPLES)
def test_calls_are_found_however_the_text_is_cut(
    form: Format, text: str, said: str, calls: list[Call]
) -> None:
    for size in range(1, len(text) + 1):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(form, pieces) == (said, calls), size


@given(
    form=st.sampled_from(["tagged", "list", "object"]),
    pieces=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<tool", "{", "}", "[", '"name": 1', "\n", "a"]
        )
    ),
)
def test_without_a_call_nothing_is_lost(form: Format, pieces: list[str]) -> None:
    assert read(form, pieces) == ("".join(pieces), [])


def test_what_a_template_says_tells_the_form() -> None:
    assert toolcalls.format_of(TEMPLATE) == "tagged"
    assert toolcalls.format_of("{{ '[TOOL_CALLS]' }}") == "list"
    assert toolcalls.format_of('Respond in the format {"name": function name, ') == "object"
    assert toolcalls.format_of("<tool_call>\n<function=name>") is None
    assert toolcalls.format_of("{{ messages }}") is None


# ---- what is asked ------------------------------------------------------------------------


def chat(**fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(json.dumps(body).encode())


def call(**changes: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    return {"id": "c1", "type": "function", "function": function} | changes


def test_tools_and_calls_as_templates_read_them() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    ask = chat(tools=[WEATHER], tool_choice="auto", messages=messages)
    assert ask.tools == (WEATHER,)
    assert ask.messages[1:] == (
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call(function={"name": "weather", "arguments": {"city": "Paris"}})],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    )
    assert chat(tools=[WEATHER], tool_choice="none").tools == ()


def wanted(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "a"} | changes}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [WEATHER] * 129}, "tools"),
        (tool(name=""), "tools[0].function.name"),
        (tool(strict=True), "tools[0].function.strict"),
        (tool(nonsense=1), "tools[0].function.nonsense"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "weather", "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "tool_choice.function"),
        ({"tool_choice": wanted("wind"), "tools": [WEATHER]}, "tool_choice.function.name"),
        ({"tool_choice": wanted("weather")}, "tool_choice.function.name"),
        ({"tool_choice": "required", "tools": [WEATHER], "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required", "tools": [WEATHER], "min_tokens": 1}, "min_tokens"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, None),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [call()]}]}, None),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [call(type="x")]}]}, None),
        ({"messages": [{"role": "assistant", "tool_calls": [call()] * 129}]}, None),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call(function={"name": "a"})]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert param is None or caught.value.param == param


@pytest.mark.parametrize("arguments", ["{", "[]", "3"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    function = {"name": "a", "arguments": arguments}
    with pytest.raises(ApiError) as caught:
        chat(messages=[{"role": "assistant", "tool_calls": [call(function=function)]}])
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


# ---- the whole way ------------------------------------------------------------------------


def asked(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "the weather?"}]
    return {"model": MODEL, "messages": messages, "tools": [WEATHER]} | fields


def prompt_of(r: Rig) -> str:
    stack = r.texts.current
    assert stack is not None
    return stack.decode_all(list(r.sessions.started[-1].request.token_ids))


def test_the_client_gets_calls_and_brings_their_results() -> None:
    async def scenario() -> None:
        async with rig(bundle=tiny_bundle(chat_template=TEMPLATE)) as r, r.client() as client:
            r.sessions.script = says(r.tokens(TAGGED))
            answer = await client.chat.completions.create(**asked())
            assert "<tools>" in prompt_of(r)
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            made = choice.message.tool_calls or []
            assert [(c.function.name, c.function.arguments) for c in made] == CALLS
            assert len({c.id for c in made}) == 2
            result = {"role": "tool", "tool_call_id": made[0].id, "content": "rain"}
            messages = [*asked()["messages"], choice.message, result]
            r.sessions.script = says(r.tokens("It rains."))
            answer = await client.chat.completions.create(**asked(messages=messages))
            assert "<weather:Paris><weather:Rome>[tool]rain" in prompt_of(r)
            assert answer.choices[0].message.content == "It rains."
            assert answer.choices[0].finish_reason == "stop"
            one = asked(parallel_tool_calls=False)
            r.sessions.script = says(r.tokens(TAGGED))
            answer = await client.chat.completions.create(**one)
            assert len(answer.choices[0].message.tool_calls or []) == 1

    go(scenario())


def test_a_call_that_is_asked_for_is_the_answers_form() -> None:
    """The workers keep to it from the first token on; a schema that can't be is a 400."""

    async def scenario() -> None:
        async with rig(bundle=tiny_bundle(chat_template=TEMPLATE)) as r, r.client() as client:

            async def grammar(**fields: Any) -> str:
                r.sessions.script = says(r.tokens(f"<tool_call>\n{PARIS}\n</tool_call>"))
                answer = await client.chat.completions.create(**asked(**fields))
                assert answer.choices[0].finish_reason == "tool_calls"
                assert answer.choices[0].message.content is None
                return str(r.sessions.started[-1].request.sampling.grammar)

            wind = {"type": "function", "function": {"name": "wind"}}
            assert await grammar() == await grammar(tool_choice="auto") == ""
            any_tool = await grammar(tools=[WEATHER, wind], tool_choice="required")
            assert "weather" in any_tool
            assert "wind" in any_tool
            strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
            assert await grammar(tools=[strict, wind], tool_choice="required") == any_tool
            one = await grammar(tools=[WEATHER, wind], tool_choice=wanted("wind"))
            assert "weather" not in one
            for schema in ({"$ref": "#"}, {"type": "object", "$defs": 3}, {"pattern": "("}):
                bad = {"type": "function", "function": {"name": "bad", "parameters": schema}}
                with pytest.raises(BadRequestError) as caught:
                    await grammar(tools=[bad], tool_choice="required")
                assert caught.value.param == "tool_choice"

    go(scenario())


def test_calls_in_a_stream() -> None:
    async def scenario() -> None:
        async with rig(bundle=tiny_bundle(chat_template=TEMPLATE)) as r, r.client() as client:
            r.sessions.script = says(r.tokens(f"Let me look. {TAGGED}"))
            text, calls, ends = "", [], []
            async for event in await client.chat.completions.create(**asked(stream=True)):
                choice = event.choices[0]
                text += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                ends.append(choice.finish_reason)
            assert text == "Let me look. "
            assert [c.index for c in calls] == [0, 1]
            assert [(c.function.name, c.function.arguments) for c in calls] == CALLS
            assert ends[-1] == "tool_calls"
            assert set(ends[:-1]) == {None}

    go(scenario())


def test_a_model_without_tools_says_so() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as client:
            messages = asked()["messages"]
            tries: list[tuple[dict[str, Any], str]] = [
                (asked(), "tools"),
                (
                    {"messages": [*messages, {"role": "assistant", "tool_calls": [call()]}]},
                    "messages[1].tool_calls",
                ),
                (
                    {"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]},
                    "messages[0].role",
                ),
            ]
            for fields, param in tries:
                with pytest.raises(BadRequestError) as caught:
                    await client.chat.completions.create(**{"model": MODEL} | fields)
                assert caught.value.param == param
            assert not r.sessions.started
        unknown = tiny_bundle(chat_template="{{ tools }}{{ messages }}")
        async with rig(bundle=unknown) as r, r.client() as client:
            with pytest.raises(BadRequestError, match="isn't known here") as caught:
                await client.chat.completions.create(**asked())
            assert caught.value.param == "tools"

    go(scenario())
