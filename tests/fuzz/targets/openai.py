"""Bodies of requests: parsed, checked, rendered by chat templates, tokenized.

The first byte picks the way in; what is left is the body.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pd_router import tokens
from pd_router.errors import ApiError
from pd_router.openai import Ask, parse_chat, parse_completion
from pd_router.prepare import sampling_for, tokenize
from pd_router.text import TextStack
from pd_router.types import Limits
from tests.fuzz.aloop import FuzzLoop
from tests.pd_router.http_rig import tiny_bundle

PACKAGES = ("pd_router",)
WORDS = (
    b'"model":', b'"tiny"', b'"messages":', b'"role":', b'"user"', b'"assistant"', b'"tool"',
    b'"content":', b'"prompt":', b'"n":', b'"stop":', b'"max_tokens":', b'"logit_bias":',
    b'"tools":', b'"tool_calls":', b'"function":', b'"arguments":', b'"type":', b'"stream":true',
    b'"stream_options":', b'"logprobs":', b'"seed":', b'"stop_token_ids":', b'"tokens":', b"null",
    b"1e400", b"-1", b"9223372036854775808", b"[", b"{", b"\\ud800", b"\\u0000", b"<|im_end|>",
)  # fmt: skip
_TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}'
    "{% for m in messages %}{{ m.role + ':' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}"
)
_LIMITS = Limits(context_tokens=2048, pool_tokens=4096)
_loop = FuzzLoop()
_pool = ThreadPoolExecutor(1)
_stacks = (TextStack(tiny_bundle()), TextStack(tiny_bundle(chat_template=_TOOLS)))
_PARSE: tuple[Callable[[bytes], Ask], ...] = (parse_chat, parse_completion)


def one(data: bytes) -> None:
    if not data:
        return
    way, body = data[0], data[1:]
    stack = _stacks[way >> 2 & 1]
    try:
        _loop.run(_taken(way & 3, body, stack))
    except ApiError as error:
        assert 400 <= error.status < 500, error
        assert error.body()


async def _taken(way: int, body: bytes, stack: TextStack) -> None:
    if way == 2:
        await tokens.tokenize(body, stack, _pool, _LIMITS.context_tokens, _any_model)
    elif way == 3:
        tokens.detokenize(body, stack, _any_model)
    else:
        ask = _PARSE[way](body)
        for ids in await tokenize(ask, stack, _LIMITS, _pool):
            assert all(0 <= token < stack.vocab_size for token in ids)
            sampling_for(ask, stack, ids, _LIMITS)
    await asyncio.sleep(0)


def _any_model(name: str) -> None:
    assert isinstance(name, str)


def seeds() -> list[bytes]:
    chat = b'{"model":"tiny","messages":[{"role":"user","content":"hello"}]}'
    tool = (
        b'{"model":"tiny","messages":[{"role":"user","content":[{"type":"text","text":"a"}]},'
        b'{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function",'
        b'"function":{"name":"f","arguments":"{\\"a\\":1}"}}]},'
        b'{"role":"tool","tool_call_id":"1","content":"b"}],"tools":[{"type":"function",'
        b'"function":{"name":"f","parameters":{"type":"object"}}}]}'
    )
    plain = (
        b'{"model":"tiny","prompt":["a","b"],"n":2,"stop":["x"],"logit_bias":{"5":-1.5},'
        b'"seed":-3,"max_tokens":4,"temperature":0.5,"top_p":0,"stream":true,'
        b'"stream_options":{"include_usage":true},"stop_token_ids":[3],"logprobs":2}'
    )
    return [
        b"\0" + chat,
        b"\4" + tool,
        b"\1" + plain,
        b'\1{"model":"tiny","prompt":[[1,2],[3]]}',
        b'\2{"model":"tiny","prompt":"hello"}',
        b'\2{"model":"tiny","messages":[{"role":"user","content":"a"}]}',
        b'\3{"model":"tiny","tokens":[1,2,3]}',
    ]
