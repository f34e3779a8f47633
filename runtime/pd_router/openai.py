"""OpenAI's requests: parsed strictly, checked, and turned into one form, `Ask`.

A field that would change the answer and isn't supported is refused by name; one that
wouldn't is taken and ignored. Errors carry the JSON path of what is wrong.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from pd_router.errors import ApiError, invalid, unsupported
from pd_router.messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatMessage,
    Message,
    NamedTool,
    Tool,
    ToolSpec,
    chat_messages,
    chat_tools,
    published,
)
from pd_router.structured import BadForm, Form, ResponseFormat, StructuredOutputs, form_of

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_BIAS = 100
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.001, 10
MAX_TOP_LOGPROBS = 20
MOST_TOKENS = (1 << 31) - 1
MAX_SEQUENCES = 128  # prompts times choices
COMPLETION_DEFAULT_TOKENS = 16  # as OpenAI's /v1/completions has it
MAX_PRIORITY = 1000
_MASK64 = (1 << 64) - 1
_TOKEN_ID = re.compile(r"(0|[1-9][0-9]{0,8})")  # one name for each token

# Taken only with one of these values, which change nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
    "suffix": ("",),
}


# ---- the requests as they come ------------------------------------------------------
#
# `openapi` publishes these.


def _harmless(name: str) -> Meta:
    return published(enum=[None, *_HARMLESS[name]])


_Count = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Stop = Annotated[str, published(minLength=1, maxLength=MAX_STOP_CHARS)]
_TokenId = Annotated[int, published(minimum=0)]
_Bias = Annotated[float, published(minimum=-MAX_BIAS, maximum=MAX_BIAS)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in each chunk, as vLLM has it


class _Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and plain completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, extra_json_schema={"maximum": MAX_CHOICES})] | None = None
    stop: _Stop | Annotated[list[_Stop], published(maxItems=MAX_STOPS)] | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: _Share | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: (
        Annotated[
            dict[str, _Bias],
            published(
                maxProperties=MAX_BIASES, propertyNames={"pattern": f"^{_TOKEN_ID.pattern}$"}
            ),
        ]
        | None
    ) = None
    # Extensions under the names that vLLM gave them.
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: _Share | None = None
    repetition_penalty: (
        Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None
    min_tokens: _Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[_TokenId], published(maxItems=MAX_STOP_TOKENS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    session_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    # Harmless.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    store: Annotated[Any, _harmless("store")] = None
    service_tier: Annotated[Any, _harmless("service_tier")] = None


class ChatRequest(_Common, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[Message], published(minItems=1, maxItems=MAX_MESSAGES)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[ToolSpec], published(maxItems=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    functions: Annotated[Any, _harmless("functions")] = None
    function_call: Annotated[Any, _harmless("function_call")] = None
    modalities: Annotated[Any, _harmless("modalities")] = None
    audio: Annotated[Any, _harmless("audio")] = None
    prediction: Annotated[Any, _harmless("prediction")] = None
    reasoning_effort: Annotated[Any, _harmless("reasoning_effort")] = None
    verbosity: Annotated[Any, _harmless("verbosity")] = None
    web_search_options: Annotated[Any, _harmless("web_search_options")] = None


class CompletionRequest(_Common, forbid_unknown_fields=True, kw_only=True):
    prompt: str | Annotated[list[str | _TokenId | list[_TokenId]], published(minItems=1)]
    max_completion_tokens: _Count | None = None  # load generators send both names
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: Annotated[Any, _harmless("echo")] = None
    suffix: Annotated[Any, _harmless("suffix")] = None


# ---- the one form ---------------------------------------------------------------------

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request. Exactly one of `messages` and `prompts` is filled. `one_call`: the
    model's first call of a tool is its only one."""

    kind: Literal["chat", "completion"]
    model: str
    messages: tuple[ChatMessage, ...]
    prompts: tuple[Prompt, ...]
    choices: int  # for each prompt
    stream: bool
    include_usage: bool
    usage_in_each_chunk: bool
    stops: tuple[str, ...]
    max_tokens: int | None  # None: up to the context's end
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]  # each token once
    form: Form | None  # that the answer keeps to
    logprobs: bool
    top_logprobs: int
    return_token_ids: bool
    cache_salt: bytes
    priority: int  # larger goes first, among requests of one class
    session_id: str  # the same for all of a conversation; empty: unknown
    tools: tuple[Tool, ...] = ()  # that the model may call
    one_call: bool = False
    must_call: tuple[Tool, ...] = ()  # one of these, and say nothing else


_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_Request = TypeVar("_Request", bound=Struct)


def parse_chat(body: bytes) -> Ask:
    """ApiError where the body isn't a chat request that we can serve."""
    request = decode_strictly(_chat_decoder, body)
    _refuse_unsupported(request)
    messages = chat_messages(request.messages)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    limit = _one_limit(request.max_tokens, request.max_completion_tokens)
    tools = chat_tools(request.tools, kept=request.tool_choice not in (None, "auto"))
    return _ask(
        request,
        kind="chat",
        messages=messages,
        tools=() if request.tool_choice == "none" else tools,
        must_call=_must_call(request, tools),
        one_call=request.parallel_tool_calls is False,
        max_tokens=limit,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
    )


def parse_completion(body: bytes) -> Ask:
    """ApiError where the body isn't a completion request that we can serve."""
    request = decode_strictly(_completion_decoder, body)
    _refuse_unsupported(request)
    prompts, choices = _prompts(request.prompt), _choices(request.n)
    if len(prompts) * choices > MAX_SEQUENCES:
        sequences = f"{len(prompts)} prompts with {choices} choices each"
        raise invalid("n", f"{sequences}: at most {MAX_SEQUENCES} choices are made in all.")
    if request.best_of is not None and request.best_of != choices:
        raise unsupported("best_of", "only the value of 'n' is")
    limit = _one_limit(request.max_tokens, request.max_completion_tokens)
    return _ask(
        request,
        kind="completion",
        prompts=prompts,
        max_tokens=COMPLETION_DEFAULT_TOKENS if limit is None else limit,
        logprobs=request.logprobs is not None,
        top_logprobs=request.logprobs or 0,
    )


def _ask(
    request: ChatRequest | CompletionRequest,
    *,
    kind: Literal["chat", "completion"],
    max_tokens: int | None,
    logprobs: bool,
    top_logprobs: int,
    messages: tuple[ChatMessage, ...] = (),
    prompts: tuple[Prompt, ...] = (),
    tools: tuple[Tool, ...] = (),
    one_call: bool = False,
    must_call: tuple[Tool, ...] = (),
) -> Ask:
    choices = _choices(request.n)
    options = request.stream_options
    if options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream': true.")
    if len(request.stop_token_ids or ()) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"'stop_token_ids' takes at most {MAX_STOP_TOKENS} ids.")
    if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
        message = (
            f"'min_tokens' is {request.min_tokens}, more than the {max_tokens} of 'max_tokens'."
        )
        raise invalid("min_tokens", message)
    seed = secrets.randbits(64) if request.seed is None else request.seed
    return Ask(
        kind=kind,
        model=request.model,
        messages=messages,
        prompts=prompts,
        choices=choices,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        usage_in_each_chunk=bool(options and options.continuous_usage_stats),
        stops=_stops(request.stop),
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        seed=seed & _MASK64,
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        repetition_penalty=request.repetition_penalty or 1.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_biases(request.logit_bias or {}),
        form=_form(request),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        return_token_ids=bool(request.return_token_ids),
        cache_salt=(request.cache_salt or "").encode(),
        priority=request.priority or 0,
        session_id=request.session_id or "",
        tools=tools,
        one_call=one_call,
        must_call=must_call,
    )


# ---- checks -----------------------------------------------------------------------------

_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_FLOAT_FOR_INT = re.compile(r"^Expected `.*\bint\b.*`, got `float`")
_GUIDED = re.compile(r"^guided_(json|regex|grammar|choice)$")  # vLLM's names before
_MISSING = re.compile(r"^Object missing required field `(.*)`$", re.DOTALL)


def decode_strictly(decoder: msgspec.json.Decoder[_Request], body: bytes) -> _Request:
    """ApiError, with the path of what is wrong, unless the body is what it should be."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        # It is found at the first wrong field, so before a syntax error that comes later.
        whole = _checked_syntax(body)
        if not _FLOAT_FOR_INT.search(str(error)):
            raise _mismatch(str(error)) from None
    except (msgspec.DecodeError, RecursionError):
        _checked_syntax(body)
        raise invalid(None, "The body isn't valid JSON.", "invalid_json") from None
    # To JSON, 5.0 is the number that 5 is.
    try:
        return msgspec.convert(_integral(whole), decoder.type)
    except msgspec.ValidationError as error:
        raise _mismatch(str(error)) from None
    except RecursionError:
        raise invalid(None, "The body's JSON is nested too deeply.", "invalid_json") from None


def _integral(value: Any) -> Any:
    """With integers in the place of floats that are whole numbers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_integral(one) for one in value]
    if isinstance(value, dict):
        return {key: _integral(one) for key, one in value.items()}
    return value


def _checked_syntax(body: bytes) -> Any:
    """What the body says; ApiError unless it is JSON."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        message = f"The body isn't valid JSON: {error}"
    except RecursionError:
        message = "The body's JSON is nested too deeply."
    raise invalid(None, message, "invalid_json")


def _mismatch(text: str) -> ApiError:
    """msgspec's finding with the path as the parameter's name."""
    found = _PATH.search(text)
    path = found[1] if found else ""
    text = text[: found.start()] if found else text
    if match := _UNKNOWN.match(text):
        path = f"{path}.{match[1]}" if path else match[1]
        message = f"Unrecognized request argument supplied: {path}"
        if guided := _GUIDED.match(path):
            message += f'; use "structured_outputs": {{"{guided[1]}": ...}}'
        return invalid(path, message, "unknown_parameter")
    if match := _MISSING.match(text):
        path = f"{path}.{match[1]}" if path else match[1]
        message = f"Missing required parameter: '{path}'."
        return invalid(path, message, "missing_required_parameter")
    text = text.replace("`", "")
    code = "invalid_type" if ", got " in text else "invalid_value"
    where = f"'{path}'" if path else "the body"
    return invalid(path or None, f"Invalid value for {where}: {text[:1].lower()}{text[1:]}.", code)


def _refuse_unsupported(request: Struct) -> None:
    for name, harmless in _HARMLESS.items():
        value = getattr(request, name, None)
        # To Python, False is 0 and True is 1.
        if value is not None and not any(
            type(value) is type(one) and value == one for one in harmless
        ):
            raise unsupported(name)


def _choices(asked: int | None) -> int:
    """For each prompt."""
    choices = asked or 1
    if choices > MAX_CHOICES:
        raise invalid("n", f"'n' is too large: at most {MAX_CHOICES} choices are made of a prompt.")
    return choices


def _one_limit(old: int | None, new: int | None) -> int | None:
    if old is not None and new is not None and old != new:
        raise invalid(
            "max_tokens", "'max_tokens' and 'max_completion_tokens' differ; give one of them."
        )
    return old if new is None else new


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"'stop' has {len(stops)} strings, at most {MAX_STOPS} are allowed.")
    for index, text in enumerate(stops):
        path = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not text:
            raise invalid(path, f"'{path}' must not be empty.")
        if len(text) > MAX_STOP_CHARS:
            raise invalid(path, f"'{path}' has more than {MAX_STOP_CHARS} characters.")
    return stops


def _form(request: ChatRequest | CompletionRequest) -> Form | None:
    try:
        form = form_of(request.response_format, request.structured_outputs)
    except BadForm as bad:
        raise invalid(bad.param, f"'{bad.param}' {bad.message}") from None
    if form is None:
        return None
    _refuse_beside_a_form(request)
    if isinstance(request, ChatRequest) and request.tools and request.tool_choice != "none":
        raise invalid("tools", "'tools' can't stand beside a form: a call wouldn't keep to it.")
    return form


def _refuse_beside_a_form(request: ChatRequest | CompletionRequest) -> None:
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise invalid(name, f"'{name}' can't stand beside a form, which says where to end.")


def _must_call(request: ChatRequest, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Of which tools the client wants a call."""
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none"):
        return ()
    found = tools
    if isinstance(choice, NamedTool):
        found = tuple(t for t in tools if t["function"]["name"] == choice.function.name)
    if not found:
        where = "tool_choice.function.name" if isinstance(choice, NamedTool) else "tool_choice"
        raise invalid(where, f"'{where}' asks for a call, but 'tools' has no such tool.")
    _refuse_beside_a_form(request)
    return found


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """By token id. Values outside the range are refused, not cut: the client meant something."""
    if len(biases) > MAX_BIASES:
        raise invalid("logit_bias", f"'logit_bias' names more than {MAX_BIASES} tokens.")
    found: dict[int, float] = {}
    for key, bias in biases.items():
        if not _TOKEN_ID.fullmatch(key):
            message = (
                f"'logit_bias' has the key {key[:40]!r}; its keys are token ids, such as '42'."
            )
            raise invalid("logit_bias", message)
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            where = f"logit_bias.{key}"
            raise invalid(where, f"'{where}' is {bias:g}, not within -{MAX_BIAS} to {MAX_BIAS}.")
        found[int(key)] = bias
    return tuple(sorted(found.items()))


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise invalid("prompt", "'prompt' must not be an empty array.")
    if all(isinstance(item, int) for item in prompt):
        return (tuple(item for item in prompt if isinstance(item, int)),)
    if len(prompt) > MAX_PROMPTS:
        raise invalid(
            "prompt", f"'prompt' has {len(prompt)} prompts, at most {MAX_PROMPTS} are taken."
        )
    for index, item in enumerate(prompt):
        if type(item) is not type(prompt[0]):
            path = f"prompt[{index}]"
            raise invalid(path, f"'{path}' isn't of the same kind as 'prompt[0]'.", "invalid_type")
    return tuple(
        item if isinstance(item, str) else tuple(item)
        for item in prompt
        if not isinstance(item, int)
    )
