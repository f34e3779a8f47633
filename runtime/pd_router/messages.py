"""A chat's messages and tools: as OpenAI's clients send them, and as chat templates read them."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pd_router.errors import invalid, unsupported

MAX_MESSAGES = 2048
MAX_TOOLS = 128  # as OpenAI has it
MAX_CALLS = 128  # in one message
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "refusal")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def published(**keywords: Any) -> Meta:
    """Of a field: JSON Schema that `openapi` publishes. It is checked apart from decoding, with
    better words than msgspec's."""
    return Meta(extra_json_schema=keywords)


_Function = Annotated[str, published(enum=["function"])]

ChatMessage = dict[str, Any]  # role, content and what else a template may read
Tool = dict[str, Any]


_OfOtherKinds = Annotated[Any, published(type="null")]


class ContentPart(Struct, forbid_unknown_fields=True):
    type: Annotated[str, published(enum=list(_TEXT_PARTS))]
    text: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    # Of kinds that are refused by their type, which says more than an unknown field.
    image_url: _OfOtherKinds = None
    input_audio: _OfOtherKinds = None
    file: _OfOtherKinds = None


class CalledFunction(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str  # JSON


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call in an answer that a client sends back."""

    function: CalledFunction
    id: str | None = None
    type: _Function = "function"
    index: int | None = None  # clients that put streamed answers together leave it in


class Message(Struct, forbid_unknown_fields=True):
    role: Annotated[str, published(enum=list(_ROLES))]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], published(maxItems=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # the assistant's, in the place of a content
    # Answers that clients send back carry these, empty.
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class Function(Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: Annotated[str, published(pattern=f"^{_TOOL_NAME.pattern}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Struct, forbid_unknown_fields=True):
    """A tool that the model may call."""

    type: _Function
    function: Function


class FunctionName(Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    """The one that the model is to call."""

    type: _Function
    function: FunctionName


def chat_messages(messages: list[Message]) -> tuple[ChatMessage, ...]:
    """As templates read them; ApiError for what isn't text."""
    if not messages:
        raise invalid("messages", "'messages' must hold at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise invalid(
            "messages",
            f"'messages' has {len(messages)} messages, at most {MAX_MESSAGES} are taken.",
        )
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def chat_tools(tools: list[ToolSpec] | None, *, kept: bool = False) -> tuple[Tool, ...]:
    """As templates read them. `kept`: a call of one can't but keep to its schema."""
    if len(tools or ()) > MAX_TOOLS:
        raise invalid("tools", f"'tools' has {len(tools or ())} tools, at most {MAX_TOOLS} fit.")
    return tuple(_tool(f"tools[{i}]", tool, kept=kept) for i, tool in enumerate(tools or ()))


def _tool(path: str, tool: ToolSpec, *, kept: bool) -> Tool:
    if tool.type != "function":
        raise invalid(f"{path}.type", f"'{path}.type' is {tool.type[:40]!r}; only 'function' is.")
    function = tool.function
    if not _TOOL_NAME.fullmatch(function.name):
        where = f"{path}.function.name"
        raise invalid(where, f"'{where}' must be 1 to 64 letters, digits, '_', '-' or '.'.")
    if function.strict and not kept:
        but = "arguments keep to the schema where 'tool_choice' asks for a call"
        raise unsupported(f"{path}.function.strict", but)
    function = msgspec.structs.replace(function, strict=None)
    return {"type": "function", "function": msgspec.to_builtins(function)}


def _message(path: str, message: Message) -> ChatMessage:
    if message.role == "function":
        raise unsupported(f"{path}.role", "use 'tool'")
    if message.role not in _ROLES:
        raise invalid(
            f"{path}.role",
            f"Invalid value for '{path}.role': {message.role[:40]!r}, "
            f"expected one of {', '.join(_ROLES)}.",
        )
    for name in ("annotations", "audio", "function_call"):
        if getattr(message, name):
            raise unsupported(f"{path}.{name}")
    if message.refusal and (message.content or message.role != "assistant"):
        where = f"{path}.refusal"
        raise invalid(where, f"'{where}' belongs to messages of the assistant without content.")
    found: ChatMessage = {"role": message.role, "content": _content(path, message)}
    for name in ("name", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            found[name] = value
    _add_calls(path, message, found)
    return found


def _add_calls(path: str, message: Message, found: ChatMessage) -> None:
    """Calls of an earlier answer, and which of them a tool's message answers."""
    if message.tool_calls:
        where = f"{path}.tool_calls"
        if message.role != "assistant":
            raise invalid(where, f"'{where}' belongs to messages of the assistant.")
        if len(message.tool_calls) > MAX_CALLS:
            raise invalid(where, f"'{where}' has more than {MAX_CALLS} calls.")
        found["tool_calls"] = [
            _call(f"{where}[{number}]", call) for number, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        if not message.tool_call_id:
            where = f"{path}.tool_call_id"
            raise invalid(
                where, f"Missing required parameter: '{where}'.", "missing_required_parameter"
            )
        found["tool_call_id"] = message.tool_call_id
    elif message.tool_call_id:
        where = f"{path}.tool_call_id"
        raise invalid(where, f"'{where}' belongs to messages with the role 'tool'.")


def _call(path: str, call: ToolCall) -> dict[str, Any]:
    """Templates want the arguments as an object, clients send them as JSON."""
    if call.type != "function":
        raise invalid(f"{path}.type", f"'{path}.type' is {call.type[:40]!r}; only 'function' is.")
    where = f"{path}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        raise invalid(where, f"'{where}' isn't valid JSON.") from None
    if not isinstance(arguments, dict):
        raise invalid(where, f"'{where}' must be a JSON object.")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _content(path: str, message: Message) -> str:
    """The text of a message; several parts are lines of their own, as in vLLM."""
    path = f"{path}.content"
    content = message.content
    if isinstance(content, str):
        return content or message.refusal or ""
    if content is None:
        if message.role != "assistant":
            raise invalid(path, f"'{path}' must be a string or an array of text parts.")
        return message.refusal or ""
    return "\n".join(_part(f"{path}[{index}]", part) for index, part in enumerate(content))


def _part(path: str, part: ContentPart) -> str:
    if part.type not in _TEXT_PARTS:
        where = f"{path}.type"
        raise invalid(where, f"'{where}' is {part.type[:40]!r}; this model takes only text.")
    for name in ("text", "refusal", "image_url", "input_audio", "file"):
        if name != part.type and getattr(part, name) not in (UNSET, None):
            where = f"{path}.{name}"
            raise invalid(where, f"'{where}' doesn't belong to a part with type {part.type!r}.")
    text = part.text if part.type == "text" else part.refusal
    if isinstance(text, UnsetType):
        where = f"{path}.{part.type}"
        raise invalid(
            where, f"Missing required parameter: '{where}'.", "missing_required_parameter"
        )
    return text
