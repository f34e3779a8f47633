"""Chat templates, rendered as transformers' apply_chat_template does, in a sandbox with bounds.

A template is a program that comes with a model. Jinja's sandbox keeps it from all but what it is
given; that it ends, and takes no more memory than a prompt may, is seen to here: every turn of a
loop and every call is counted, and what would make a long text or list is looked at before it is
made.
"""

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

MOST_STEPS = 300_000
"""Turns of loops and calls, of one prompt: some for each message, and no second in all."""
MOST_CHARS = 16 << 20
"""Of a prompt, and of any text or list on the way to it: twice what a request may have."""
_STEP, _JOIN = "pdcluster_step", "pdcluster_join"
_WIDE = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^}]*:[^}]*\{")


class TemplateFailed(ValueError):
    """The chat template refused the messages; the text is the template's own."""


class ChatTemplate:
    """One model's. TemplateError where it is none."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            parsed = environment.parse(source)
            self.variables: set[str] = jinja2.meta.find_undeclared_variables(parsed)
            self._template = environment.from_string(source)
        except (SyntaxError, RecursionError, ValueError) as error:  # Python's, of what it became
            raise jinja2.TemplateError(f"the chat template can't be compiled: {error}") from error

    def render(self, **given: Any) -> str:
        """The prompt of a chat. TemplateFailed with the template's message."""
        try:
            return _bounded(self._template.generate(**given, **{_STEP: _Steps()}))
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"The chat template refused the messages: {error}") from error
        except Exception as error:  # a template is the model's code: it may raise anything
            raise TemplateFailed(f"The chat template failed: {error}") from error


# ---- bounds ------------------------------------------------------------------------------


class _Steps:
    """Counts, and ends what doesn't end."""

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def __call__(self) -> str:
        self._left -= 1
        if self._left < 0:
            raise jinja2.TemplateError(f"more than {MOST_STEPS:,} steps")
        return ""


def _bounded(pieces: Any) -> str:
    found, size = [], 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        _check(size)
    return "".join(found)


def _check(size: float) -> None:
    if size > MOST_CHARS:
        raise jinja2.TemplateError(f"something of more than {MOST_CHARS:,} characters or items")


def _join(*parts: Any) -> str:
    """Of `~`."""
    texts = [str(part) for part in parts]
    _check(sum(map(len, texts)))
    return "".join(texts)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


class _Counted(jinja2.visitor.NodeTransformer):
    """Puts a step into each turn of each loop, and looks at what `~` joins."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        step = jinja2.nodes.Call(jinja2.nodes.Name(_STEP, "load"), [], [], None, None)
        node.body.insert(0, jinja2.nodes.Output([step]).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        name = jinja2.nodes.Name(_JOIN, "load")
        return jinja2.nodes.Call(name, node.nodes, [], None, None).set_lineno(node.lineno)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        made: jinja2.nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        made.set_environment(self)
        return made

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "+":
            _check(_size(left) + _size(right))
        elif operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    _check(_size(some) * times)
                    _check(_digits(some) + _digits(times))
        elif operator == "**":
            _check(_digits(left) * max(right, 1) if isinstance(right, int) else 0)
        elif isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, _Steps):
            context[_STEP]()
        for one in (*args, *kwargs.values()):
            if isinstance(one, int):
                _check(one)
        name = getattr(obj, "__name__", "")
        if name in ("format", "format_map"):
            of = getattr(obj, "__wrapped__", obj)  # the sandbox has its own around it
            _check_format(str(getattr(of, "__self__", "")))
        if name in ("join", "replace", "translate", "expandtabs"):
            owner = _size(getattr(obj, "__self__", ""))
            _check((owner + 1) * (1 + sum(_length(one) for one in args)))
        return super().call(context, obj, *args, **kwargs)


def _digits(number: Any) -> int:
    return number.bit_length() // 3 if isinstance(number, int) else 0


def _length(value: Any) -> int:
    """Of a text, or of all texts of a list."""
    if isinstance(value, list | tuple):
        return sum(map(_size, value)) + len(value)
    return _size(value)


def _check_format(pattern: str) -> None:
    """Widths come from the pattern alone, and have four digits at most."""
    if _WIDE.search(pattern):
        raise jinja2.TemplateError("a format with a width of more than four digits, or of any")


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """One that takes a width, a count, or a text to put in."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        longest = sorted((_length(one) for one in given), reverse=True)[:2]
        _check((longest[0] + 1) * (longest[-1] + 1))
        for one in given:
            if isinstance(one, int):
                _check(one * (1 + max(str(text).count("\n") for text in given)))
        return function(*args, **kwargs)

    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which is wrong in a prompt."""
    if indent is not None and indent > 64:
        raise jinja2.TemplateError(f"tojson with an indent of {indent}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


# ---- what templates are given --------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training; here it changes nothing."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    plain = jinja2.filters.FILTERS
    for name in ("center", "indent", "batch", "slice", "wordwrap", "replace", "truncate"):
        environment.filters[name] = _bounded_filter(plain[name])
    for name in ("format", "xmlattr", "pprint", "urlize"):  # no template of a model has them
        del environment.filters[name]
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals[_JOIN] = _join
    for name in ("lipsum", "cycler"):
        environment.globals.pop(name, None)
    return environment
