"""docs/reference/api.md beside what a router says of itself at `/openapi.json`: the same paths,
fields and statuses, none more and none less.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pd_router import openapi
from pd_router.openai import COMPLETION_DEFAULT_TOKENS
from pd_router.structured import StructuredOutputs, check, checker, form_of
from tests.client import request
from tests.documents import ROOT
from tests.pd_router.http_rig import go, rig

PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()


def rows(head: str, page: str = PAGE) -> Iterator[str]:
    """First cells of the table with this head."""
    _, _, after = page.partition(f"| {head} |")
    assert after, f"no table of {head}"
    for line in after.splitlines()[2:]:
        if not line.startswith("| "):
            return
        yield line.split(" | ")[0].removeprefix("| ")


def named(head: str, page: str = PAGE) -> list[str]:
    """What stands in backquotes there."""
    return [name for cell in rows(head, page) for name in re.findall("`([^`]+)`", cell)]


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def ask() -> None:
        async with rig() as r:
            answer = await request(r.http.host, r.http.port, "GET", openapi.PATH, None, {})
            found.update(await answer.json())
            await answer.close()

    go(ask())
    return found


def fields(served: dict[str, Any], *names: str) -> set[str]:
    return {
        field for name in names for field in served["components"]["schemas"][name]["properties"]
    }


def test_paths(served: dict[str, Any]) -> None:
    page = {name.rpartition(" ")[2].replace("NAME", "{model}") for name in named("path")}
    assert page == {*served["paths"], openapi.PATH}


def test_methods(served: dict[str, Any]) -> None:
    for cell in rows("path"):
        method, *_ = re.findall("`([A-Z]+) ", cell)
        for path in re.findall(r"(/[^` ,]*)`", cell):
            if path != openapi.PATH:
                assert method.lower() in served["paths"][path.replace("NAME", "{model}")]


def test_fields_of_requests(served: dict[str, Any]) -> None:
    page = named("field")
    assert len(page) == len(set(page))
    assert set(page) == fields(served, "ChatRequest", "CompletionRequest")
    page = named("field of `/tokenize`, `/detokenize`")
    assert set(page) == fields(served, "TokenizeRequest", "DetokenizeRequest")


def test_statuses(served: dict[str, Any]) -> None:
    page = [int(code) for cell in rows("status") for code in cell.split(", ")]
    said = {
        int(code)
        for methods in served["paths"].values()
        for operation in methods.values()
        if isinstance(operation, dict)
        for code in operation["responses"]
    }
    assert sorted(page) == sorted(said - {200} | {401})  # that one where keys are wanted


def examples() -> dict[str, StructuredOutputs]:
    """Of the table of structured outputs, by the field that each is about."""
    _, _, after = PAGE.partition("| one of | for example | |\n|---|---|---|\n")
    cells = [
        re.split(r"(?<!\\\\) \| ", line)[:2] for line in after.partition("\n\n")[0].splitlines()
    ]
    return {
        name.strip("|` "): msgspec.json.decode(
            text.strip("`").replace("\\|", "|"), type=StructuredOutputs
        )
        for name, text in cells
    }


def test_examples_of_forms_can_be_kept_to() -> None:
    found = examples()
    assert set(found) == set(StructuredOutputs.__struct_fields__)
    for name, outputs in found.items():
        form = form_of(None, outputs)
        assert form is not None
        assert form.param == f"structured_outputs.{name}"
        checker().submit(check, form).result(30)


def test_how_long_answers_are() -> None:
    [line] = [one for one in PAGE.splitlines() if one.startswith("| `max_tokens`")]
    assert f"a completion's {COMPLETION_DEFAULT_TOKENS} tokens" in line


def test_a_field_too_many_is_found(served: dict[str, Any]) -> None:
    more = PAGE.replace("`temperature`", "`temperature`, `warmth`", 1)
    assert set(named("field", more)) - fields(served, "ChatRequest") >= {"warmth"}
    assert json.dumps(served).count('"warmth"') == 0
