"""Forms of answers: schemas, regular expressions, grammars and choices of clients, read and
compiled as a router does, and, where they can be kept to, used as an engine does.

The first byte picks the kind.
"""

import json
from typing import Any

import msgspec

from pd_router.structured import (
    BadForm,
    Form,
    ResponseFormat,
    StructuredOutputs,
    check,
    checker,
    form_of,
)

PACKAGES = ("pd_router",)
WORDS = (
    b'"type":"object"', b'"properties":', b'"required":', b'"$ref":', b'"$defs":', b'"anyOf":',
    b'"oneOf":', b'"allOf":', b'"enum":', b'"const":', b'"pattern":', b'"items":', b'"minItems":',
    b'"maxItems":', b'"minimum":', b'"additionalProperties":', b'"x-guidance":', b'"format":',
    b"start: ", b"%json ", b"%regex ", b"%lark ", b"(?i)", b"{1,1000}", b"\\p{L}", b"[^", b"|",
    b"#", b"TEXT: /", b"-> ", b"~3..5",
)  # fmt: skip


def one(data: bytes) -> None:
    if not data:
        return
    text = data[1:].decode("utf-8", "replace")
    try:
        form = form_of(*_asked(data[0] % 6, text))
        if form is not None:
            checker().submit(check, form).result()
    except BadForm as bad:
        assert bad.param
        assert bad.message
    else:
        assert form is None or isinstance(form, Form)


def _asked(kind: int, text: str) -> tuple[ResponseFormat | None, StructuredOutputs | None]:
    if kind == 0:
        return None, StructuredOutputs(json=text)
    if kind == 1:
        return None, StructuredOutputs(regex=text)
    if kind == 2:
        return None, StructuredOutputs(grammar=text)
    if kind == 3:
        return None, StructuredOutputs(choice=text.split("\n"))
    decoded = _decoded(text)
    if kind == 4:
        whole = {"type": "json_schema", "json_schema": {"schema": decoded}}
        try:
            return msgspec.convert(whole, ResponseFormat), None
        except msgspec.ValidationError:
            return None, None
    try:
        return None, msgspec.convert(decoded, StructuredOutputs)
    except msgspec.ValidationError:
        return None, None


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError):
        return None


def seeds() -> list[bytes]:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1},
            "age": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"tag": {"enum": ["a", "b", None]}},
    }
    raw = json.dumps(schema).encode()
    return [
        b"\0" + raw,
        b"\4" + raw,
        b"\1[a-z]{2,5}(foo|bar)?",
        b'\2start: greeting " " /[a-z]+/\ngreeting: "hello" | "bye"',
        b"\3yes\nno",
        b'\5{"json": {"anyOf": [{"const": 1}, {"type": "null"}]}}',
    ]
