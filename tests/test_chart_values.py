"""Covers scripts.chart_values: what comments say is in the schema and in the table, a key without
a comment or a type is refused, and of the chart's own values every one is described, used by a
template, and tried by an example.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from scripts import chart, chart_values

CHART = chart.ROOT / chart.CHART
VALUES = (CHART / "values.yaml").read_text()
SMALL = """\
# Of the whole file.

# Which one
# it is.
# @schema {enum: [a, b]}
kind: a

# What is inside.
# @schema {required: [count]}
inside:
  # How many | few.
  # @schema {minimum: 0}
  count: 1
  # Its labels.
  # @type labels
  labels: {}
"""


def test_the_schema_says_what_the_comments_say() -> None:
    made = json.loads(chart_values.schema(SMALL))
    assert made["additionalProperties"] is False
    assert made["properties"].pop("global")["type"] == "object"
    assert made["properties"] == {
        "kind": {"description": "Which one it is.", "enum": ["a", "b"]},
        "inside": {
            "description": "What is inside.",
            "type": "object",
            "additionalProperties": False,
            "required": ["count"],
            "properties": {
                "count": {"description": "How many | few.", "type": "integer", "minimum": 0},
                "labels": {
                    "description": "Its labels.",
                    "type": "object",
                    "additionalProperties": {"type": "string"},
                },
            },
        },
    }


def test_the_table_says_what_the_comments_say() -> None:
    assert chart_values.table(SMALL).splitlines()[-4:] == [
        '| `kind` | `a`, `b` | `"a"` | Which one it is. |',
        "| `inside` |  |  | What is inside. |",
        "| `inside.count` | number | `1` | How many \\| few. |",
        "| `inside.labels` | map of text | `{}` | Its labels. |",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n", "a has no comment"),
        ("# Of the file.\n\na: 1\n", "a has no comment"),
        ("# A.\na:\n  b: 1\n", "a.b has no comment"),
        ("# @schema {minimum: 1}\na: 1\n", "a has no comment"),
        ("# A.\na: {}\n", "what a holds isn't seen"),
        ("# A.\na: []\n", "what a holds isn't seen"),
        ("# A.\n# @type label\na: {}\n", "a is of type label; there are name, labels"),
        ("- 1\n", "no mapping"),
    ],
)
def test_what_isnt_described_is_refused(text: str, said: str) -> None:
    with pytest.raises(chart_values.Undescribed, match=re.escape(said)):
        chart_values.schema(text)


def parts(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of the schema that is about an object, with its path."""
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "object":
        yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from parts(part, f"{path}.{name}")
    yield from parts(schema.get("items"), f"{path}[]")


def test_nothing_unknown_is_taken_at_any_depth() -> None:
    """But for maps of text or of quantities, and for what is Helm's."""
    known = [False, {"type": "string"}, {"type": ["string", "number"]}]
    found = dict(parts(json.loads((CHART / "values.schema.json").read_text())))
    assert len(found) > 40
    open_ones = [
        path for path, part in found.items() if part.get("additionalProperties") not in known
    ]
    assert open_ones == [".global"]


def names() -> list[str]:
    return [".".join(one.path) for one in chart_values.leaves(chart_values.read(VALUES))]


def _within(name: str, found: set[str]) -> bool:
    """Whether one of them is this value, or holds it."""
    return any(name == one or name.startswith(f"{one}.") for one in found)


def test_every_value_is_used_by_a_template_and_no_other() -> None:
    texts = [path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file()]
    used = {one for text in texts for one in re.findall(r"\.Values\.([A-Za-z.]+\b)", text)}
    assert [name for name in names() if not _within(name, used)] == []
    known = {".".join(one.path[:depth]) for one in chart_values.leaves(chart_values.read(VALUES))
             for depth in range(1, len(one.path) + 1)}  # fmt: skip
    assert used <= known


def _set(document: Any, path: str = "") -> Iterator[str]:
    if isinstance(document, dict) and document:
        for name, part in document.items():
            yield from _set(part, f"{path}.{name}" if path else name)
    elif path:
        yield path


def test_every_value_is_tried_by_an_example() -> None:
    examples = [yaml.safe_load(path.read_text()) for path in (CHART / "ci").glob("*-values.yaml")]
    tried = {name for one in examples for name in _set(one)}
    without = [name for name in names() if not any(_within(one, {name}) for one in tried)]
    assert without == []
