"""What a request says of its answer's form, as a grammar in llguidance's words.

OpenAI's `response_format`, and vLLM's `structured_outputs` for regular expressions, grammars
(Lark's form) and lists of choices. Grammars are checked here, so that a mistake is the
client's 400 and no worker's business.
"""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal, NamedTuple

from llguidance import LLMatcher
from msgspec import Struct

from pd_router.toolcalls import Format

MAX_SCHEMA_CHARS = 32_000
MAX_RULES_CHARS = 16_000  # of a regular expression, a grammar, all choices
MAX_OUTPUT_CHOICES = 1000
_STACK_BYTES = 256 << 20
_DIALECTS = {
    "structured_outputs.grammar": " as a Lark grammar (llguidance's dialect)",
    "structured_outputs.regex": " as a regular expression (the dialect of Rust's regex)",
}
_SAID = 300  # characters of llguidance's words that are handed on
# Nothing, a blank, or a new line with what indents it: without an end to it a small model may
# write white space until its tokens are used up.
_FLEXIBLE = {"whitespace_flexible": True, "whitespace_pattern": r" |\n {0,40}"}
_CHOICE = "tool_choice"
_DEFINITIONS = {"$defs", "definitions"}
# What stands around a call, in Lark's form.
_AROUND: dict[Format, tuple[str, str]] = {
    "tagged": (r'"<tool_call>\n"', r'"\n</tool_call>"'),
    "list": ('"["', '"]"'),
    "object": ("", ""),
}


class JsonSchema(Struct, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None  # a form is always kept


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None


class Form(NamedTuple):
    """A grammar, and the name of the field that asks for it."""

    param: str
    grammar: str


class BadForm(Exception):
    """What is wrong with which field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param, self.message = param, message


def form_of(response: ResponseFormat | None, outputs: StructuredOutputs | None) -> Form | None:
    """None: any text. BadForm where it can't be read; `check` looks into the grammar."""
    forms = [form for form in (_of_response(response), _of_outputs(outputs)) if form is not None]
    if len(forms) > 1:
        raise BadForm("structured_outputs", "stands beside 'response_format'; give one of them.")
    return forms[0] if forms else None


def _of_response(response: ResponseFormat | None) -> Form | None:
    if response is None or response.type == "text":
        return None
    if response.type == "json_object":
        return _json("response_format", {"type": "object"})
    param = "response_format.json_schema"
    if response.json_schema is None:
        raise BadForm(param, "is missing beside the type 'json_schema'.")
    if response.json_schema.schema is None:
        raise BadForm(f"{param}.schema", "is missing.")
    return _json(f"{param}.schema", response.json_schema.schema)


def _of_outputs(outputs: StructuredOutputs | None) -> Form | None:
    if outputs is None:
        return None
    names = ("json", "regex", "grammar", "choice")
    given = [name for name in names if getattr(outputs, name) is not None]
    if len(given) != 1:
        raise BadForm("structured_outputs", f"takes exactly one of {', '.join(names)}.")
    param = f"structured_outputs.{given[0]}"
    if outputs.json is not None:
        return _json(param, outputs.json)
    if outputs.regex is not None:
        return Form(param, LLMatcher.grammar_from_regex(_bounded(param, outputs.regex)))
    if outputs.grammar is not None:
        return Form(param, LLMatcher.grammar_from_lark(_bounded(param, outputs.grammar)))
    choices = outputs.choice or []
    if not 1 <= len(choices) <= MAX_OUTPUT_CHOICES or not all(choices):
        raise BadForm(param, f"takes 1 to {MAX_OUTPUT_CHOICES} strings, none of them empty.")
    quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Form(param, LLMatcher.grammar_from_lark(f"start: {_bounded(param, quoted)}"))


def _bounded(param: str, text: str, most: int = MAX_RULES_CHARS) -> str:
    if len(text) > most:
        raise BadForm(param, f"has more than {most} characters.")
    return text


def _json(param: str, schema: str | dict[str, Any]) -> Form:
    try:
        if isinstance(schema, str):
            schema = json.loads(_bounded(param, schema, MAX_SCHEMA_CHARS))
        if not isinstance(schema, dict):
            raise BadForm(param, "must be an object.")
        # An `x-guidance` of the client's would change how the schema is read.
        schema = {key: value for key, value in schema.items() if key != "x-guidance"}
        plain = json.dumps(schema, separators=(",", ":"))
    except RecursionError:
        raise BadForm(param, "is nested too deeply.") from None
    except ValueError:
        raise BadForm(param, "isn't valid JSON.") from None
    options: Any = _FLEXIBLE
    plain = _bounded(param, plain, MAX_SCHEMA_CHARS)
    return Form(param, LLMatcher.grammar_from_json_schema(plain, overrides=options))


def call_form(form: Format, tools: Sequence[dict[str, Any]]) -> Form:
    """A call of one of these tools, as a model of this kind writes calls, and nothing else.
    BadForm where their schemas can't be put together."""
    arguments = "parameters" if form == "object" else "arguments"
    shared: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        function = tool["function"]
        schema = dict(function.get("parameters") or {"type": "object"})
        for place in _DEFINITIONS & schema.keys():
            _share(shared.setdefault(place, {}), schema.pop(place), function["name"])
        schema.pop("x-guidance", None)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, arguments: schema},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    _refuse_other_references([calls, shared])
    whole = {"anyOf": calls, **shared, "x-guidance": _FLEXIBLE}
    before, after = _AROUND[form]
    rules = f"start: {before} call {after}\ncall: %json {json.dumps(whole)}"
    return Form(_CHOICE, LLMatcher.grammar_from_lark(_bounded(_CHOICE, rules, MAX_SCHEMA_CHARS)))


def _share(known: dict[str, Any], more: Any, name: str) -> None:
    """Definitions move to the whole's root, where references look for them."""
    if not isinstance(more, dict) or any(known.get(k, v) != v for k, v in more.items()):
        raise BadForm(_CHOICE, f"can't be kept to: the definitions of {name!r} don't fit.")
    known |= more


def _refuse_other_references(schemas: Any) -> None:
    """To definitions alone: other places are elsewhere in the whole."""
    left = [schemas]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            to = one.get("$ref")
            if isinstance(to, str) and not to.startswith(tuple(f"#/{d}/" for d in _DEFINITIONS)):
                raise BadForm(_CHOICE, f"can't be kept to: a tool's schema refers to {to[:80]!r}.")
            left += one.values()
        elif isinstance(one, list):
            left += one


@cache
def checker() -> ThreadPoolExecutor:
    """Where `check` may run: llguidance goes as deep into its stack as rules refer to rules,
    and of a stack of the usual size a client's grammar could reach the end."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        pool.submit(int).result()  # its thread is made now, with this stack
    finally:
        threading.stack_size(before)
    return pool


def check(form: Form) -> None:
    """BadForm unless the grammar can be kept to. For `checker` alone."""
    try:
        failed, said = LLMatcher.validate_grammar_with_warnings(form.grammar)
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise BadForm(form.param, "can't be read: write it more simply") from error
    if failed:
        dialect = _DIALECTS.get(form.param, "")
        words = " ".join(said[0].split())[:_SAID]
        raise BadForm(form.param, f"can't be kept to{dialect}: {words}")


def _is_panic(error: BaseException) -> bool:
    """llguidance is Rust, and some nonsense makes it panic: pyo3 raises what is no Exception,
    of a class that can't be imported."""
    return type(error).__name__ == "PanicException"
