"""OpenAI's answers: whole ones and the chunks of a stream."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pd_router.openai import Ask
from pd_router.toolcalls import Call
from pd_router.types import FinishReason

DONE = b"data: [DONE]\n\n"
# JSON has no infinity; OpenAI writes this for a token that can't come.
_NO_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One emitted token with its log-probability (natural log) and the likeliest others."""

    raw: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int  # in characters of the choice's text


@dataclass(slots=True)
class Part:
    """What one choice has to say: some of it in a stream, all of it otherwise."""

    choice: int
    first: bool = True
    text: str = ""
    finish: FinishReason | Literal["tool_calls"] | None = None
    calls: list[tuple[int, Call]] = field(default_factory=list)  # numbered within the choice
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `cached` are those of the prompt that were not computed."""

    prompt: int
    completion: int
    cached: int

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Replies:
    """Builds the bytes of one request's answer."""

    def __init__(self, ask: Ask, reply_id: str, created: int) -> None:
        self._ask = ask
        self._chat = ask.kind == "chat"
        self._head = {"id": reply_id, "object": "", "created": created, "model": ask.model}
        name = "chat.completion.chunk" if self._chat else "text_completion"
        head = msgspec.json.encode(self._head | {"object": name})
        self._chunk_head = b"data: " + head[:-1] + b',"choices":['

    def chunk(self, part: Part, usage: Usage | None) -> bytes:
        """One server-sent event of a stream."""
        encode = msgspec.json.encode
        finish = b"null" if part.finish is None else b'"%s"' % part.finish.encode()
        text = encode(part.text)
        if self._chat:
            role = b'"role":"assistant",' if part.first else b""
            body = b'"delta":{%s"content":%s}' % (role, text)
            if part.calls:
                body = b'"delta":' + encode(self._calling_delta(part))
            elif not part.text and not part.first:
                body = b'"delta":{}'
        else:
            body = b'"text":' + text
        logprobs = encode(self._logprobs(part)) if self._ask.logprobs else b"null"
        extra = b""
        if self._ask.return_token_ids:
            extra = b',"token_ids":' + encode(part.token_ids)
        return b'%s{"index":%d,%s,"logprobs":%s,"finish_reason":%s%s}]%s}\n\n' % (
            self._chunk_head,
            part.choice,
            body,
            logprobs,
            finish,
            extra,
            self._usage_tail(usage),
        )

    @property
    def plain(self) -> bool:
        """Whether a chunk is nothing but its text between what is always the same."""
        ask = self._ask
        return not (ask.logprobs or ask.return_token_ids or ask.usage_in_each_chunk)

    def around(self, choice: int) -> tuple[bytes, bytes]:
        """What stands before and after the text (JSON, without its quotes) in the events of
        a choice, after its first and before its last. Only where chunks are `plain`."""
        marker = "-"
        event = self.chunk(Part(choice, first=False, text=marker), None)
        before, found, after = event.rpartition(b'"%s"' % marker.encode())
        if not found:
            raise AssertionError(f"no text in {event!r}")
        return before + b'"', b'"' + after

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event before [DONE] where `include_usage` asks for it."""
        return b"%s],%s}\n\n" % (self._chunk_head, _usage_member(usage))

    def _usage_tail(self, usage: Usage | None) -> bytes:
        if usage is not None:
            return b"," + _usage_member(usage)
        return b',"usage":null' if self._ask.include_usage else b""

    def body(
        self, parts: Sequence[Part], usage: Usage, prompt_ids: Sequence[Sequence[int]]
    ) -> bytes:
        """The answer of a request that doesn't stream."""
        name = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(part, prompt_ids) for part in parts]
        answer = self._head | {"object": name, "choices": choices, "usage": usage.fields()}
        if self._chat and self._ask.return_token_ids:
            answer["prompt_token_ids"] = prompt_ids[0]
        return msgspec.json.encode(answer)

    def _choice(self, part: Part, prompt_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": part.choice}
        if self._chat:
            choice["message"] = _message(part)
        else:
            choice["text"] = part.text
        choice["logprobs"] = self._logprobs(part) if self._ask.logprobs else None
        choice["finish_reason"] = part.finish
        if self._ask.return_token_ids:
            choice["token_ids"] = part.token_ids
            if not self._chat:
                choice["prompt_token_ids"] = prompt_ids[part.choice // self._ask.choices]
        return choice

    def _calling_delta(self, part: Part) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant", "content": None} if part.first else {}
        if part.text:
            delta["content"] = part.text
        calls = [{"index": number, **_called(call)} for number, call in part.calls]
        return delta | {"tool_calls": calls}

    def _logprobs(self, part: Part) -> dict[str, Any]:
        return _chat_logprobs(part.logprobs) if self._chat else _completion_logprobs(part.logprobs)


def _message(part: Part) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
    if part.calls:
        message["content"] = part.text if part.text.strip() else None
        message["tool_calls"] = [_called(call) for _, call in part.calls]
    return message


def _called(call: Call) -> dict[str, Any]:
    # Nine letters and digits: templates of Mistral's models take no other ids.
    return {
        "id": secrets.token_hex(5)[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _usage_member(usage: Usage) -> bytes:
    return b'"usage":' + msgspec.json.encode(usage.fields())


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NO_LOGPROB


def _show(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(raw: bytes, logprob: float) -> dict[str, Any]:
        return {"token": _show(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        entry(token.raw, token.logprob) | {"top_logprobs": [entry(*other) for other in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "tokens": [_show(token.raw) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {_show(raw): _finite(logprob) for raw, logprob in token.top} for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }
