"""Structured output at the router: which forms are understood, and that a form which can't be
kept to is the client's mistake, said in words."""

import asyncio
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pd_router.errors import ApiError
from pd_router.openai import parse_chat
from pd_router.structured import BadForm, Form, StructuredOutputs, check, checker, form_of
from tests import client
from tests.pd_router.http_rig import MODEL, go, rig, says

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def form(**fields: Any) -> Form | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(json.dumps(body).encode()).form


def checked(found: Form | None) -> None:
    assert found is not None
    checker().submit(check, found).result(30)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": PERSON}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": 'start: "a"+'}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"choice": ["yes", 'say "no"\n', "ü"]}},
            "structured_outputs.choice",
        ),
    ],
)
def test_forms(fields: dict[str, Any], param: str) -> None:
    found = form(**fields)
    assert found is not None
    assert found.param == param
    checked(found)


def test_any_text() -> None:
    assert form() is None
    assert form(response_format={"type": "text"}) is None
    assert form_of(None, None) is None


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "the dialect of Rust's regex"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": 'root ::= "a"'}, r"as a Lark grammar \(llguidance's dialect\)"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"type": "object", "not": {}}}, "not"),
        ({"json": {"x-guidance": {"no": 1}, "$ref": "http://x/y"}}, "http://x/y"),
    ],
)
def test_what_cant_be_kept_to(outputs: dict[str, Any], said: str) -> None:
    found = form(structured_outputs=outputs)
    with pytest.raises(BadForm, match=said) as caught:
        checked(found)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["json", "regex", "grammar", "choice"])
def test_older_names_say_what_to_write(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        form(**{f"guided_{name}": "a"})
    assert (caught.value.param, caught.value.code) == (f"guided_{name}", "unknown_parameter")
    assert f'use "structured_outputs": {{"{name}": ...}}' in caught.value.failure.message


def test_a_digit_is_any_of_unicodes() -> None:
    """As docs/reference/api.md warns."""
    tokens = LLTokenizer("byte")
    other = tokens.tokenize_str("\N{ARABIC-INDIC DIGIT THREE}")
    for regex, taken in ((r"\d", len(other)), ("[0-9]", 0)):
        found = form(structured_outputs={"regex": regex})
        assert found is not None
        assert LLMatcher(tokens, found.grammar).validate_tokens(other) == taken
        assert LLMatcher(tokens, found.grammar).validate_tokens(tokens.tokenize_str("3")) == 1


def test_a_schema_that_makes_the_library_panic_is_refused() -> None:
    """It cuts what it quotes in its message within a character."""
    many = "\N{REPLACEMENT CHARACTER}" * 60
    schema = json.dumps({"minimum": {"name": {"type": "strinteger", many: 1}}})
    found = form_of(None, StructuredOutputs(json=schema))
    assert found is not None
    with pytest.raises(BadForm, match="more simply"):
        checker().submit(check, found).result(30)


def test_tools_beside_a_form() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    fields: dict[str, Any] = {"response_format": {"type": "json_object"}, "tools": [tool]}
    with pytest.raises(ApiError) as caught:
        form(**fields)
    assert caught.value.param == "tools"
    assert form(**fields, tool_choice="none") is not None


@pytest.mark.parametrize("rules", ["grammar", "json"])
def test_rules_that_refer_to_rules_without_end_harm_nobody(rules: str) -> None:
    """As deep as the limits allow: on a usual stack that would be the end of the process."""
    if rules == "grammar":
        lines = [f"r{i}: r{i + 1}" for i in range(1300)]
        outputs: dict[str, Any] = {"grammar": "\n".join(["start: r0", *lines, 'r1300: "a"'])}
    else:
        schema: dict[str, Any] = {f"{i}": {"items": {"$ref": f"#/{i + 1}"}} for i in range(900)}
        outputs = {"json": {"$ref": "#/0", **schema, "900": {}}}
    checked(form(structured_outputs=outputs))


def test_over_http() -> None:
    async def ask(r: Any, **fields: Any) -> tuple[int, Any]:
        r.sessions.script = says(r.tokens("yes"))
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        answer = await client.request(
            r.http.host, r.http.port, "POST", "/v1/chat/completions", body
        )
        document = json.loads(await answer.body())
        await answer.close()
        return answer.status, document

    async def scenario() -> None:
        async with rig() as r:
            status, _ = await ask(r, response_format={"type": "json_object"})
            assert status == 200
            grammar = r.sessions.started[-1].request.sampling.grammar
            assert json.loads(grammar)["grammars"][0]["json_schema"]["type"] == "object"
            status, document = await ask(r, structured_outputs={"regex": "a("})
            assert (status, document["error"]["param"]) == (400, "structured_outputs.regex")
            assert len(r.sessions.started) == 1
            async with asyncio.timeout(30):
                assert (await ask(r))[0] == 200
            assert r.sessions.started[-1].request.sampling.grammar == ""

    go(scenario())
