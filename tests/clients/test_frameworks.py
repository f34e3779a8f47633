"""LangChain's and LiteLLM's OpenAI providers against a router: whole and streamed answers,
usage, tools there and back, errors. `make clients-test` brings both.
"""

import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet

import litellm
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

from tests.pd_router.http_rig import MODEL, Rig, go, rig, says, tiny_bundle
from tests.pd_router.test_tools import CALLS, TAGGED, TEMPLATE, WEATHER

pytestmark = pytest.mark.filterwarnings("ignore")  # what these libraries warn of is theirs
ASKED = "What is the capital?"
TEXT = "The capital of France is Paris."
ARGUMENTS = [{"city": "Paris"}, {"city": "Rome"}]


def chat(r: Rig, **options: Any) -> ChatOpenAI:
    url = f"http://{r.http}/v1"
    return ChatOpenAI(
        model=MODEL, base_url=url, api_key="none", max_retries=0, timeout=20, **options
    )


async def lite(r: Rig, **options: Any) -> Any:
    return await litellm.acompletion(
        model=f"openai/{MODEL}",
        api_base=f"http://{r.http}/v1",
        api_key="none",
        max_retries=0,
        timeout=20,
        **{"messages": [{"role": "user", "content": ASKED}]} | options,
    )


def test_langchain_chats() -> None:
    async def scenario() -> None:
        async with rig() as r:
            r.sessions.script = says(r.tokens(TEXT))
            answer = await chat(r, temperature=0.5, max_tokens=50, seed=3).ainvoke(ASKED)
            assert answer.text == TEXT
            assert answer.usage_metadata["output_tokens"] == len(r.tokens(TEXT)) + 1
            sampling = r.sessions.started[-1].request.sampling
            assert (sampling.max_tokens, sampling.seed) == (50, 3)
            pieces = [piece async for piece in chat(r, stream_usage=True).astream(ASKED)]
            assert "".join(piece.text for piece in pieces) == TEXT
            assert any(piece.usage_metadata for piece in pieces)
            plain = OpenAI(model=MODEL, base_url=f"http://{r.http}/v1", api_key="none")
            assert await plain.ainvoke(ASKED) == TEXT

    go(scenario(), 60)


def test_langchain_calls_tools() -> None:
    async def scenario() -> None:
        async with rig(bundle=tiny_bundle(chat_template=TEMPLATE)) as r:
            r.sessions.script = says(r.tokens(TAGGED))
            model = chat(r).bind_tools([WEATHER])
            answer = await model.ainvoke(ASKED)
            assert [call["args"] for call in answer.tool_calls] == ARGUMENTS
            whole = None
            async for piece in model.astream(ASKED):
                whole = piece if whole is None else whole + piece
            assert whole is not None
            assert [call["args"] for call in whole.tool_calls] == ARGUMENTS
            r.sessions.script = says(r.tokens("It rains."))
            results = [ToolMessage("rain", tool_call_id=c["id"]) for c in answer.tool_calls]
            history = [HumanMessage(ASKED), AIMessage("", tool_calls=answer.tool_calls), *results]
            assert (await model.ainvoke(history)).text == "It rains."

    go(scenario(), 60)


def test_litellm_chats() -> None:
    async def scenario() -> None:
        async with rig() as r:
            r.sessions.script = says(r.tokens(TEXT))
            answer = await lite(r, temperature=0, max_tokens=50)
            assert answer.choices[0].message.content == TEXT
            assert answer.usage.completion_tokens == len(r.tokens(TEXT)) + 1
            text = ""
            async for event in await lite(r, stream=True):
                text += event.choices[0].delta.content or ""
            assert text == TEXT

    go(scenario(), 60)


def test_litellm_calls_tools() -> None:
    async def scenario() -> None:
        async with rig(bundle=tiny_bundle(chat_template=TEMPLATE)) as r:
            r.sessions.script = says(r.tokens(TAGGED))
            answer = await lite(r, tools=[WEATHER])
            calls = answer.choices[0].message.tool_calls
            assert [(c.function.name, c.function.arguments) for c in calls] == CALLS
            assert answer.choices[0].finish_reason == "tool_calls"

    go(scenario(), 60)


def test_errors_keep_their_kind() -> None:
    async def scenario() -> None:
        async with rig() as r:
            with pytest.raises(litellm.BadRequestError, match="chat template has none"):
                await lite(r, tools=[WEATHER])
            with pytest.raises(Exception, match="chat template has none"):
                await chat(r).bind_tools([WEATHER]).ainvoke(ASKED)

    go(scenario(), 60)
