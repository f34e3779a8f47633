"""Calls of tools that a client insists on, through real workers: a random model calls nothing by
itself, so what is called here is called because the answer keeps to that form, from the first
token on, on prefill and on decode."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.cluster import Cluster, serving, spec

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> answer in <tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}{% endfor %}"
)
HI: Any = [{"role": "user", "content": "How is the weather at sea?"}]
CITIES = ["Paris", "Rome"]


def tool(name: str) -> Any:
    schema = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"City": {"enum": CITIES}},
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("weather"), tool("wind")]
WIND: Any = {"type": "function", "function": {"name": "wind"}}


@pytest.fixture(scope="module")
def client(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp("tools")
    shutil.copytree(model, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    one: dict[str, int] = {"replicas": 1}
    router = {"routing": {"disaggregate": "always"}}
    made = spec(folder / "model", prefill=one, decode=one, router=router)
    running: Cluster
    with (
        serving(made, folder) as running,
        OpenAI(base_url=running.base_url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def asked(choice: Any, **options: Any) -> dict[str, Any]:
    fields = {"model": "tiny", "messages": HI, "tools": TOOLS, "tool_choice": choice}
    return {**fields, "max_tokens": 200, **options}


def check(call: Any, names: set[str]) -> None:
    assert call.name in names
    arguments = json.loads(call.arguments)
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in CITIES
    assert arguments["days"] in (1, 2)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("choice", "names"), [("required", {"weather", "wind"}), (WIND, {"wind"})])
def test_a_call_that_is_asked_for(
    client: OpenAI, choice: Any, names: set[str], temperature: int
) -> None:
    answer = client.chat.completions.create(**asked(choice, temperature=temperature, n=3, seed=1))
    for one in answer.choices:
        assert one.finish_reason == "tool_calls"
        assert one.message.content is None
        [call] = one.message.tool_calls or []
        assert call.type == "function"
        check(call.function, names)


def test_in_a_stream(client: OpenAI) -> None:
    events = list(client.chat.completions.create(**asked("required", stream=True)))
    choices = [choice for event in events for choice in event.choices]
    assert not any(choice.delta.content for choice in choices)
    [call] = [call for choice in choices for call in choice.delta.tool_calls or []]
    check(call.function, {"weather", "wind"})
    assert choices[-1].finish_reason == "tool_calls"


def test_its_result_goes_back(client: OpenAI) -> None:
    first = client.chat.completions.create(**asked(WIND)).choices[0].message
    [call] = first.tool_calls or []
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "a storm"}
    messages = [*HI, first.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**asked("none", messages=messages, max_tokens=5))
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_what_cannot_be_called_is_named(client: OpenAI) -> None:
    storm: Any = {"type": "function", "function": {"name": "storm"}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked(storm))
    assert refused.value.param == "tool_choice.function.name"
