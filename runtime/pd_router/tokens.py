"""`/tokenize` and `/detokenize`, in the form that vLLM gave them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pd_router.errors import invalid
from pd_router.messages import Message, ToolSpec, chat_messages, chat_tools
from pd_router.openai import decode_strictly
from pd_router.prepare import render
from pd_router.text import TextStack

MAX_TOKENS = 1 << 20
MAX_CHARS = 1 << 20  # some seconds of a core


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """A prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolSpec] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    tokens: Annotated[list[int], Meta(max_length=MAX_TOKENS)]
    model: str | None = None


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


CheckModel = Callable[[str], None]
"""Raises where this isn't the name of what is served here."""


async def tokenize(
    body: bytes,
    stack: TextStack,
    pool: ThreadPoolExecutor,
    context_tokens: int | None,
    check_model: CheckModel,
) -> dict[str, Any]:
    request = decode_strictly(_tokenize, body)
    if request.model is not None:
        check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "Give either 'prompt' or 'messages'.")
    if request.messages is not None:
        text = render(stack, chat_messages(request.messages), chat_tools(request.tools, kept=True))
        special = bool(request.add_special_tokens)  # the template writes them itself
    else:
        text = request.prompt or ""
        special = request.add_special_tokens is not False
    if len(text) > MAX_CHARS:
        what = "prompt" if request.messages is None else "messages"
        message = f"The text has {len(text):,} characters, at most {MAX_CHARS:,} are taken."
        raise invalid(what, message)
    ids = await stack.encode(text, pool, add_special_tokens=special)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": context_tokens,
        "tokens": list(ids),
    }
    if request.return_token_strs:
        answer["token_strs"] = [stack.token_bytes(i).decode("utf-8", "replace") for i in ids]
    return answer


def detokenize(body: bytes, stack: TextStack, check_model: CheckModel) -> dict[str, Any]:
    request = decode_strictly(_detokenize, body)
    if request.model is not None:
        check_model(request.model)
    tokens = request.tokens
    for place, token in enumerate(tokens):
        if not 0 <= token < stack.vocab_size:
            message = f"'tokens[{place}]' is {token}; ids go from 0 to {stack.vocab_size - 1}."
            raise invalid(f"tokens[{place}]", message)
    return {"prompt": stack.decode_all(tokens)}
