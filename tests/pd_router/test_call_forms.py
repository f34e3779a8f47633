"""Covers structured.call_form: what a model of each kind may write when it's to call a tool, as
llguidance takes it, and that toolcalls finds the call in that."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from pd_router import toolcalls
from pd_router.structured import BadForm, call_form, check
from pd_router.toolcalls import Format
from tests.tiny_model import tiny_model_dir

CITY = {"enum": ["Paris", "Rome"]}


def tool(name: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": name} if schema is None else {"name": name, "parameters": schema}
    return {"type": "function", "function": function}


def of_city(city: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"city": city},
        "required": ["city"],
        "additionalProperties": False,
        **more,
    }


WEATHER = tool("weather", of_city({"$ref": "#/$defs/City"}, **{"$defs": {"City": CITY}}))
WIND = tool("wind", of_city({"$ref": "#/definitions/City"}, definitions={"City": CITY}))
NOW = tool("now", None)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return from_tokenizer(AutoTokenizer.from_pretrained(tiny_model_dir()))


def takes(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """The whole of it, and nothing more is needed."""
    matcher = LLMatcher(tokenizer, grammar)
    ids = tokenizer.tokenize_str(text)
    return matcher.consume_tokens(ids) and matcher.is_accepting()


def written(form: Format, name: str, arguments: Any) -> str:
    key = "parameters" if form == "object" else "arguments"
    call = json.dumps({"name": name, key: arguments})
    return {"tagged": f"<tool_call>\n{call}\n</tool_call>", "list": f"[{call}]", "object": call}[
        form
    ]


@pytest.mark.parametrize("form", ["tagged", "list", "object"])
def test_a_call_of_any_tool_and_nothing_else(tokenizer: LLTokenizer, form: Format) -> None:
    made = call_form(form, [WEATHER, WIND, NOW])
    check(made)
    for name, arguments in (
        ("weather", {"city": "Rome"}),
        ("wind", {"city": "Paris"}),
        ("now", {}),
    ):
        text = written(form, name, arguments)
        assert takes(tokenizer, made.grammar, text), text
        reader = toolcalls.reader(form, {"weather", "wind", "now"})
        said, calls = reader.push(text)
        rest, more = reader.finish()
        assert said + rest == ""
        [call] = calls + more
        assert (call.name, json.loads(call.arguments)) == (name, arguments)
    for text in (
        "Let me look.",
        written(form, "weather", {"city": "Berlin"}),
        written(form, "weather", {}),
        written(form, "storm", {"city": "Rome"}),
        written(form, "weather", {"city": "Rome"})[:-1],
    ):
        assert not takes(tokenizer, made.grammar, text), text


def test_the_tool_that_is_named(tokenizer: LLTokenizer) -> None:
    made = call_form("tagged", [WIND])
    assert takes(tokenizer, made.grammar, written("tagged", "wind", {"city": "Rome"}))
    assert not takes(tokenizer, made.grammar, written("tagged", "weather", {"city": "Rome"}))


@pytest.mark.parametrize(
    "tools",
    [
        [tool("a", {"$ref": "#"})],
        [tool("a", of_city({"$ref": "https://example.com/city"}))],
        [tool("a", of_city({"$ref": "#/properties/city"}))],
        [tool("a", {"$defs": 3})],
        [tool("a", {"$defs": {"City": CITY}}), tool("b", {"$defs": {"City": {"type": "null"}}})],
        [tool("a", {"description": "x" * 40_000})],
        [tool("a", of_city({"pattern": "("}))],
    ],
    ids=["itself", "elsewhere", "a place", "no definitions", "two cities", "too long", "a pattern"],
)
def test_schemas_that_cannot_be_kept_to(tools: list[dict[str, Any]]) -> None:
    with pytest.raises(BadForm) as caught:
        check(call_form("tagged", tools))
    assert caught.value.param == "tool_choice"
    assert caught.value.message


def test_what_a_client_writes_is_no_rule_of_the_grammar(tokenizer: LLTokenizer) -> None:
    """Nor may it say how its schema is read."""
    odd = tool("odd", of_city({"const": 'x"\ncall: "y'}, **{"x-guidance": {"lenient": True}}))
    made = call_form("object", [odd])
    check(made)
    assert "lenient" not in made.grammar
    assert takes(tokenizer, made.grammar, written("object", "odd", {"city": 'x"\ncall: "y'}))
    assert not takes(tokenizer, made.grammar, "y")
