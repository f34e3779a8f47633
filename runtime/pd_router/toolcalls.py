"""Calls of tools in what a model writes: found in text that comes in pieces. Pure.

Which way a model writes them its chat template tells. What looks like a call and isn't
one goes out as the text that it is: nothing is lost.
"""

import json
from collections.abc import Collection
from typing import Any, Literal, NamedTuple, Protocol

Format = Literal["tagged", "list", "object"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LIST_MARK = "[TOOL_CALLS]"
# What templates of each kind say to the model.
_SIGNS: tuple[tuple[str, Format], ...] = (
    (_LIST_MARK, "list"),
    ('{"name": function name', "object"),
    ("<function=", "tagged"),  # in tags too, but not as JSON: see format_of
    (_OPEN, "tagged"),
)


class Call(NamedTuple):
    """`arguments`: JSON, as OpenAI's clients want it."""

    name: str
    arguments: str


Found = tuple[str, list[Call]]
"""(text that goes out, calls)"""


def format_of(template: str) -> Format | None:
    """How a model with this chat template writes calls. None: not in a way known here.

    tagged: JSON between <tool_call> tags (Hermes, Qwen); list: a JSON array (Mistral);
    object: JSON objects and nothing else (Llama 3).
    """
    for sign, found in _SIGNS:
        if sign in template:
            return None if sign == "<function=" else found
    return None


class Reader(Protocol):
    """Finds the calls in one choice's text."""

    def push(self, text: str) -> Found: ...

    def finish(self) -> Found:
        """What is left when no more text comes."""
        ...


def reader(form: Format, names: Collection[str]) -> Reader:
    """`names`: of the tools that there are."""
    return _Tagged() if form == "tagged" else _Whole(form, names)


class _Tagged:
    """Text, with calls between tags."""

    def __init__(self) -> None:
        self._held = ""  # may turn out to begin a tag
        self._body: list[str] | None = None  # since the opening tag; None: outside
        self._tail = ""  # the end of the body, which may begin the closing tag
        self._after_call = False  # blanks between calls are the format's, not the answer's

    def push(self, text: str) -> Found:
        out: list[str] = []
        calls: list[Call] = []
        while text:
            text = (
                self._outside(text, out) if self._body is None else self._inside(text, out, calls)
            )
        return "".join(out), calls

    def finish(self) -> Found:
        if self._body is None:
            held, self._held = self._held, ""
            return held, []
        body, self._body = "".join(self._body), None
        call = _call(_parse(body))
        return ("", [call]) if call is not None else (_OPEN + body, [])

    def _outside(self, text: str, out: list[str]) -> str:
        """Says what is no tag; returns what follows an opening one."""
        text = self._held + text
        before, tag, after = text.partition(_OPEN)
        if tag:
            self._held, self._body, self._tail = "", [], ""
            self._say(before, out)
            return after
        keep = next(n for n in range(len(_OPEN) - 1, -1, -1) if text.endswith(_OPEN[:n]))
        cut = len(text) - keep
        self._say(text[:cut], out)
        self._held = text[cut:]
        return ""

    def _say(self, text: str, out: list[str]) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            out.append(text)

    def _inside(self, text: str, out: list[str], calls: list[Call]) -> str:
        """Collects; returns what follows the closing tag."""
        assert self._body is not None
        at = (self._tail + text).find(_CLOSE)
        self._body.append(text)
        if at < 0:
            self._tail = (self._tail + text)[1 - len(_CLOSE) :]
            return ""
        body, _, after = "".join(self._body).partition(_CLOSE)
        self._body = None
        call = _call(_parse(body))
        if call is None:
            self._say(f"{_OPEN}{body}{_CLOSE}", out)
        else:
            calls.append(call)
            self._after_call = True
        return after


class _Whole:
    """An answer that is calls as a whole, or has none: known by how it begins."""

    def __init__(self, form: Format, names: Collection[str]) -> None:
        self._starts = ("[",) if form == "list" else ("{",)
        self._names = names
        self._held: list[str] = []
        self._holds: bool | None = None  # None: only blanks have come

    def push(self, text: str) -> Found:
        if self._holds is False:
            return text, []
        self._held.append(text)
        begun = text.lstrip()
        if self._holds is None and begun:
            self._holds = begun.startswith(self._starts)
            if not self._holds:
                return self._release(), []
        return "", []

    def finish(self) -> Found:
        text = self._release()
        calls = [_call(document) for document in _documents(text.strip())]
        known = [call for call in calls if call is not None and call.name in self._names]
        return ("", known) if known and len(known) == len(calls) else (text, [])

    def _release(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        return text


def _documents(text: str) -> list[Any]:
    """The JSON objects of a whole answer: an array, or objects one after the other. Empty
    unless all of it is that."""
    text = text.removeprefix(_LIST_MARK).strip()
    found: list[Any] = []
    decoder = json.JSONDecoder()
    while text:
        try:
            document, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return []
        found += document if isinstance(document, list) else [document]
        text = text[end:].lstrip(" \n\t;")
    return found


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(document: Any) -> Call | None:
    """None when this isn't a call."""
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return None
    arguments = document.get("arguments", document.get("parameters"))
    if isinstance(arguments, str):
        arguments = _parse(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return Call(document["name"], json.dumps(arguments, ensure_ascii=False))
