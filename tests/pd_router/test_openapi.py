"""Covers pd_router.openapi: the document is whole, served where it is looked for, and says of
requests what parsing them does. `tests/fuzz/api.py` holds answers of real processes against it.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from pd_core.failures import Failure, FailureKind
from pd_router.keys import Keyring
from pd_router.openai import parse_chat, parse_completion
from pd_router.openapi import FAILURES, document
from tests.client import request
from tests.pd_router.http_rig import MODEL, Rig, go, rig, says

KEY = "sk-0123456789abcdef"


def read(keyed: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(document(MODEL, keyed))
    return found


async def ask(r: Rig, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    response = await request(r.http.host, r.http.port, method, path, body, headers)
    try:
        return response.status, await response.json()
    finally:
        await response.close()


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, operation)
        for path, methods in read()["paths"].items()
        for method, operation in methods.items()
        if method != "parameters"
    ]


def test_it_is_served() -> None:
    async def body() -> None:
        async with rig() as r:
            assert await ask(r, "GET", "/openapi.json") == (200, read())

    go(body())


def test_with_keys_it_says_so_and_needs_one(tmp_path: Path) -> None:
    (tmp_path / "alice").write_text(KEY)
    keyring = Keyring(tmp_path)
    keyring.load()

    async def body() -> None:
        async with rig(keyring=keyring) as r:
            status, _ = await ask(r, "GET", "/openapi.json")
            assert status == 401
            status, found = await ask(r, "GET", "/openapi.json", authorization=f"Bearer {KEY}")
            assert (status, found["security"]) == (200, [{"key": []}])
            assert found["paths"]["/health"]["get"]["security"] == []
            assert "401" in found["paths"]["/v1/models"]["get"]["responses"]

    go(body())


def test_no_reference_leads_nowhere() -> None:
    whole = read()
    text = json.dumps(whole)
    for part in text.split('"$ref": "')[1:]:
        name = part.partition('"')[0].removeprefix("#/components/schemas/")
        assert name in whole["components"]["schemas"]
    jsonschema_rs.meta.validate(
        {"$defs": whole["components"]["schemas"]} | {"$ref": "#/$defs/ChatRequest"}
    )


def test_each_failure_has_its_status_in_it() -> None:
    statuses = {Failure(kind, "").traits.http_status for kind in FailureKind}
    statuses -= {499}  # nobody is there to see it
    assert statuses <= set(FAILURES)
    for path in ("/v1/chat/completions", "/v1/completions"):
        told = read()["paths"][path]["post"]["responses"]
        assert statuses <= {int(status) for status in told}


def test_examples_are_answered() -> None:
    async def body() -> None:
        async with rig() as r:
            r.sessions.script = says(r.tokens("yes"))
            for path, method, operation in operations():
                content = operation.get("requestBody", {}).get("content", {})
                example = content.get("application/json", {}).get("example")
                place = path.replace("{model}", MODEL)
                status, answer = await ask(r, method.upper(), place, example)
                assert status == 200, (path, answer)

    go(body())


@pytest.mark.parametrize(
    ("name", "parse", "least"),
    [
        ("ChatRequest", parse_chat, {"messages": [{"role": "user", "content": "hi"}]}),
        ("CompletionRequest", parse_completion, {"prompt": "hi"}),
    ],
)
def test_what_may_have_only_some_values_may_have_these(
    name: str, parse: Any, least: dict[str, Any]
) -> None:
    fields = read()["components"]["schemas"][name]["properties"]
    fixed = {field: schema["enum"] for field, schema in fields.items() if "enum" in schema}
    assert len(fixed) > 4
    for field, values in fixed.items():
        for value in values:
            parse(json.dumps({"model": MODEL, **least, field: value}).encode())
