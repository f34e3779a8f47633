"""The document at `/openapi.json`: paths, requests as they are checked, answers.

Requests are the very types that decode them. Answers are written piece by piece elsewhere
(`replies`), so their types here only tell; tests hold each answer against the document.
"""

from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pd_router.openai import ChatRequest, CompletionRequest
from pd_router.tokens import DetokenizeRequest, TokenizeRequest

PATH = "/openapi.json"
_VERSION = "3.2.0"  # the first that can describe the events of a stream
_REF = "#/components/schemas/{name}"
_Count = Annotated[int, Meta(ge=0)]


# ---- answers -----------------------------------------------------------------------------


class Problem(Struct, forbid_unknown_fields=True):
    """What went wrong, in OpenAI's form. `param` is the path of the field that is wrong."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Failure(Struct, forbid_unknown_fields=True):
    error: Problem


class Status(Struct, forbid_unknown_fields=True):
    status: Literal["ok", "ready"]


class Model(Struct, forbid_unknown_fields=True):
    """`max_model_len`, in tokens, is there once workers have told it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: _Count | UnsetType = UNSET


class ModelList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[Model]


class PromptDetails(Struct, forbid_unknown_fields=True):
    cached_tokens: _Count


class Usage(Struct, forbid_unknown_fields=True):
    """Tokens. `cached_tokens` are those of the prompt that were not computed."""

    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count
    prompt_tokens_details: PromptDetails


class AnswerFunction(Struct, forbid_unknown_fields=True):
    """`arguments` is JSON, as the model wrote it."""

    name: str
    arguments: str


class AnswerCall(Struct, forbid_unknown_fields=True):
    """`index` is there in streams."""

    id: str
    type: Literal["function"]
    function: AnswerFunction
    index: _Count | UnsetType = UNSET


class TopToken(Struct, forbid_unknown_fields=True):
    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class ChatToken(TopToken, forbid_unknown_fields=True):
    top_logprobs: list[TopToken]


class ChatLogprobs(Struct, forbid_unknown_fields=True):
    content: list[ChatToken]
    refusal: None


class CompletionLogprobs(Struct, forbid_unknown_fields=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[_Count]


class AnswerMessage(Struct, forbid_unknown_fields=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(Struct, forbid_unknown_fields=True):
    index: _Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct, forbid_unknown_fields=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChunkChoice(Struct, forbid_unknown_fields=True):
    index: _Count
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, forbid_unknown_fields=True):
    """`usage` is there where it was asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(Struct, forbid_unknown_fields=True):
    """`finish_reason` is null in a stream's chunks but the last of a choice."""

    index: _Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, forbid_unknown_fields=True):
    """A whole answer, or a chunk of a stream, where `usage` is there if it was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Tokens(Struct, forbid_unknown_fields=True):
    count: _Count
    max_model_len: _Count | None
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Text(Struct, forbid_unknown_fields=True):
    prompt: str


# ---- the document --------------------------------------------------------------------------

_REQUESTS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_ANSWERS = (
    Failure, Status, ModelList, ChatCompletion, ChatCompletionChunk, Completion, Tokens, Text,
)  # fmt: skip

FAILURES = {
    400: "The request is wrong, or longer than the context or a worker's KV.",
    401: "There is no API key, or it isn't known.",
    404: "Another model, or another path.",
    405: "Another method is needed.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Come again later: a rate limit, a full queue, or it could only be late.",
    431: "The headers are too large.",
    500: "A mistake of the router's or a worker's.",
    502: "Workers died, or hand-overs failed, more often than the request could begin again.",
    503: "No usable workers, no room, or a router that goes.",
    504: "The request's time was over, or its workers stood still.",
}
_ALWAYS = (400, 404, 405, 431, 500)
_WITH_BODY = (408, 413, 415, 429, 503)
_GENERATING = (502, 504)
_COME_AGAIN = (429, 503)  # with Retry-After


@lru_cache(maxsize=4)
def document(model: str, keyed: bool) -> bytes:
    """JSON. `model`: the name that clients send. `keyed`: whether they need an API key."""
    types = (*_REQUESTS, *_ANSWERS)
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    for request in _REQUESTS:
        name = schemas[request.__name__]["properties"]["model"]
        optional = [None] if "default" in name else []
        schemas[request.__name__]["properties"]["model"] = {"enum": [model, *optional]}
    components: dict[str, Any] = {"schemas": schemas}
    whole: dict[str, Any] = {
        "openapi": _VERSION,
        "info": {
            "title": "PDCluster",
            "version": "1",
            "description": "OpenAI's API, served by prefill and decode workers.",
        },
        "paths": _paths(model, keyed),
        "components": components,
    }
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
    return msgspec.json.encode(whole)


def _paths(model: str, keyed: bool) -> dict[str, Any]:
    shared = (*_ALWAYS, 401) if keyed else _ALWAYS
    probes: dict[str, Any] = {"security": []} if keyed else {}
    hello = {"role": "user", "content": "Hello!"}
    name = {"name": "model", "in": "path", "required": True, "schema": {"enum": [model]}}
    return {
        "/v1/chat/completions": _post(
            "A chat, streamed or not.",
            ChatRequest,
            {"model": model, "messages": [hello], "max_completion_tokens": 16},
            _generated(ChatCompletion, ChatCompletionChunk),
            (*shared, *_WITH_BODY, *_GENERATING),
        ),
        "/v1/completions": _post(
            "Text or tokens go on, streamed or not.",
            CompletionRequest,
            {"model": model, "prompt": "Once upon a time", "max_tokens": 16},
            _generated(Completion, Completion),
            (*shared, *_WITH_BODY, *_GENERATING),
        ),
        "/tokenize": _post(
            "Text, or messages by the chat template, to tokens.",
            TokenizeRequest,
            {"prompt": "Hello!"},
            _json(Tokens),
            (*shared, *_WITH_BODY),
        ),
        "/detokenize": _post(
            "Tokens to text.",
            DetokenizeRequest,
            {"tokens": [1, 2, 3]},
            _json(Text),
            (*shared, *_WITH_BODY),
        ),
        "/v1/models": _get("What is served.", ModelList, shared),
        "/v1/models/{model}": {"parameters": [name], **_get("The model.", Model, shared)},
        "/health": _get("Whether the router answers.", Status, _ALWAYS, **probes),
        "/ready": _get("Whether a request would find workers.", Status, (*_ALWAYS, 503), **probes),
    }


def _get(summary: str, answer: type, failures: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _responses(_json(answer), failures), **more}}


def _post(
    summary: str,
    request: type,
    example: dict[str, Any],
    content: dict[str, Any],
    failures: tuple[int, ...],
) -> dict[str, Any]:
    body = {"application/json": {"schema": _ref(request), "example": example}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": body},
            "responses": _responses(content, failures),
        }
    }


def _responses(content: dict[str, Any], failures: tuple[int, ...]) -> dict[str, Any]:
    found = {"200": _response("The answer.", content)}
    for status in sorted(failures):
        found[str(status)] = _response(FAILURES[status], _json(Failure))
        if status in _COME_AGAIN:
            seconds = {"required": True, "schema": {"type": "integer", "minimum": 0}}
            found[str(status)]["headers"]["Retry-After"] = seconds
    return found


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    request_id = {"required": True, "schema": {"type": "string"}}
    return {
        "description": description,
        "headers": {"X-Request-Id": request_id},
        "content": content,
    }


def _generated(whole: type, chunk: type) -> dict[str, Any]:
    """An answer as a whole, and as events. A failure ends a stream that has begun."""
    decoded = {"anyOf": [_ref(chunk), _ref(Failure)]}
    encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": decoded}
    event = {
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, encoded]}},
        "required": ["data"],
    }
    return _json(whole) | {"text/event-stream": {"itemSchema": event}}


def _json(answer: type) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(answer)}}


def _ref(found: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=found.__name__)}
