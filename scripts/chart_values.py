"""The chart's schema and its README's table of values, from the comments of values.yaml.

The comment above a key describes it. What its value doesn't show stands there in lines of its
own: `@type NAME` names one of the types below, `@schema {…}` adds words of JSON schema. Each
key is described, and whatever isn't described is refused at `helm install`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

HEAD = "## Values\n"
_TYPE, _SCHEMA = "@type ", "@schema "
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Value:
    """One key of values.yaml."""

    path: tuple[str, ...]
    text: str
    schema: Schema
    default: Any
    parts: tuple["Value", ...]


class Undescribed(ValueError):
    """A key whose comment doesn't say enough."""


# ---- types ---------------------------------------------------------------------------------


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    made: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**made, "required": list(required)} if required else made


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _one_of(*words: str) -> Schema:
    return {"enum": list(words)}


_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_WEIGHT: Schema = {"type": "integer", "minimum": 1, "maximum": 100}
_LABELS: Schema = {"type": "object", "additionalProperties": _TEXT}
_QUANTITIES: Schema = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}


def _said(schema: Schema, text: str) -> Schema:
    return {"description": text, **schema}


def _requirements(*operators: str) -> Schema:
    one = _object(("key", "operator"), key=_NAME, operator=_one_of(*operators), values=_list(_TEXT))
    return _list(one)


_LABEL_SELECTOR = _object(
    matchLabels=_LABELS,
    matchExpressions=_requirements("In", "NotIn", "Exists", "DoesNotExist"),
)
_NODE_REQUIREMENTS = _requirements("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
_NODE_TERM = _object(matchExpressions=_NODE_REQUIREMENTS, matchFields=_NODE_REQUIREMENTS)
_POD_TERM = _object(
    ("topologyKey",),
    labelSelector=_LABEL_SELECTOR,
    namespaceSelector=_LABEL_SELECTOR,
    namespaces=_list(_NAME),
    topologyKey=_NAME,
    matchLabelKeys=_list(_NAME),
    mismatchLabelKeys=_list(_NAME),
)
_REQUIRED, _PREFERRED = (
    f"{word}DuringSchedulingIgnoredDuringExecution" for word in ("required", "preferred")
)
_NODE_AFFINITY = _object(
    (),
    **{
        _REQUIRED: _object(("nodeSelectorTerms",), nodeSelectorTerms=_list(_NODE_TERM)),
        _PREFERRED: _list(_object(("weight", "preference"), weight=_WEIGHT, preference=_NODE_TERM)),
    },
)
_POD_AFFINITY = _object(
    (),
    **{
        _REQUIRED: _list(_POD_TERM),
        _PREFERRED: _list(
            _object(("weight", "podAffinityTerm"), weight=_WEIGHT, podAffinityTerm=_POD_TERM)
        ),
    },
)
TYPES: Mapping[str, tuple[str, Schema]] = {
    "name": ("text", _NAME),
    "labels": ("map of text", _LABELS),
    "secrets": (
        "list",
        _list(_object(("name",), name=_said(_NAME, "A Secret in the release's namespace."))),
    ),
    "peers": (
        "list",
        _list(
            _object(
                namespaceLabels=_said(_LABELS, "Labels of the namespace; none: any."),
                podLabels=_said(_LABELS, "Labels of the pods; none: any."),
            )
        ),
    ),
    "resources": (
        "as in a container",
        _object(
            requests=_said(_QUANTITIES, "What the node sets aside."),
            limits=_said(_QUANTITIES, "What the container may take."),
            claims=_said(
                _list(_object(("name",), name=_NAME, request=_NAME)), "Claims of the pod."
            ),
        ),
    ),
    "tolerations": (
        "as in a pod",
        _list(
            _object(
                key=_NAME,
                operator=_one_of("Exists", "Equal"),
                value=_TEXT,
                effect=_one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
                tolerationSeconds={"type": "integer"},
            )
        ),
    ),
    "affinity": (
        "as in a pod",
        _object(
            nodeAffinity=_said(_NODE_AFFINITY, "To nodes, by their labels."),
            podAffinity=_said(_POD_AFFINITY, "To where these pods are."),
            podAntiAffinity=_said(_POD_AFFINITY, "Away from where these pods are."),
        ),
    ),
    "spread": (
        "as in a pod",
        _list(
            _object(
                ("maxSkew", "topologyKey", "whenUnsatisfiable"),
                maxSkew={"type": "integer", "minimum": 1},
                topologyKey=_NAME,
                whenUnsatisfiable=_one_of("DoNotSchedule", "ScheduleAnyway"),
                labelSelector=_LABEL_SELECTOR,
                minDomains={"type": "integer", "minimum": 1},
                nodeAffinityPolicy=_one_of("Honor", "Ignore"),
                nodeTaintsPolicy=_one_of("Honor", "Ignore"),
                matchLabelKeys=_list(_NAME),
            )
        ),
    ),
}
"""Name -> how the table calls it, and its schema. Those that "as in" names are Kubernetes' own."""

_PLAIN: Mapping[type, tuple[str, Schema]] = {
    bool: ("true or false", {"type": "boolean"}),
    int: ("number", {"type": "integer"}),
    str: ("text", _TEXT),
}


# ---- reading -------------------------------------------------------------------------------


def read(text: str) -> tuple[Value, ...]:
    """Every key with what its comment says. Raises Undescribed."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        raise Undescribed("values.yaml is no mapping")
    return _parts(node, yaml.safe_load(text), text.splitlines(), ())


def _parts(
    node: yaml.MappingNode, values: Any, lines: list[str], path: tuple[str, ...]
) -> tuple[Value, ...]:
    return tuple(
        _value(key, part, values[key.value], lines, (*path, key.value)) for key, part in node.value
    )


def _value(
    key: yaml.Node, node: yaml.Node, default: Any, lines: list[str], path: tuple[str, ...]
) -> Value:
    text, kind, more = _comment(lines, key.start_mark.line, ".".join(path))
    if kind is not None:
        return Value(path, text, {**TYPES[kind][1], **more}, default, ())
    if isinstance(node, yaml.MappingNode) and node.value:
        parts = _parts(node, default, lines, path)
        return Value(path, text, {**_object(), **more}, default, parts)
    if "type" in more:
        return Value(path, text, more, default, ())
    if type(default) not in _PLAIN:
        raise Undescribed(f"values.yaml: what {'.'.join(path)} holds isn't seen: add a @type")
    plain = {} if "enum" in more else _PLAIN[type(default)][1]
    return Value(path, text, {**plain, **more}, default, ())


def _comment(lines: list[str], at: int, name: str) -> tuple[str, str | None, Schema]:
    """The comment above a line: its words, its type and its words of JSON schema."""
    above = []
    while at and lines[at - 1].lstrip().startswith("#"):
        at -= 1
        above.append(lines[at].lstrip().removeprefix("#").strip())
    words, kind, schema = [], None, {}
    for line in reversed(above):
        if line.startswith(_TYPE):
            kind = line.removeprefix(_TYPE)
        elif line.startswith(_SCHEMA):
            schema.update(yaml.safe_load(line.removeprefix(_SCHEMA)))
        else:
            words.append(line)
    if not words:
        raise Undescribed(f"values.yaml: {name} has no comment")
    if kind is not None and kind not in TYPES:
        raise Undescribed(f"values.yaml: {name} is of type {kind}; there are {', '.join(TYPES)}")
    return " ".join(words), kind, schema


def leaves(values: tuple[Value, ...]) -> Iterator[Value]:
    """Those that hold no others."""
    for one in values:
        if one.parts:
            yield from leaves(one.parts)
        else:
            yield one


# ---- writing -------------------------------------------------------------------------------

_GLOBAL: Schema = {"description": "Helm's own, for parent charts.", "type": "object"}


def schema(text: str) -> str:
    """values.schema.json."""
    properties = {**_properties(read(text)), "global": _GLOBAL}
    made = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": "Generated from values.yaml by scripts/chart.py: change it there.",
        "title": "Values of the pdcluster chart",
        **_object(**properties),
    }
    return json.dumps(made, indent=2) + "\n"


def _properties(values: tuple[Value, ...]) -> Schema:
    return {one.path[-1]: _whole(one) for one in values}


def _whole(one: Value) -> Schema:
    made = _said(one.schema, one.text)
    return {**made, "properties": _properties(one.parts)} if one.parts else made


def table(text: str) -> str:
    """The README's section about values, from its head to the end."""
    lines = [
        HEAD,
        "Made from the comments of `values.yaml`, as is `values.schema.json`, which refuses all "
        "else. `ci/` has an example for each feature.",
        "",
        "| value | type | default | what |",
        "|---|---|---|---|",
        *_rows(read(text)),
    ]
    return "\n".join([*lines, ""])


def _rows(values: tuple[Value, ...]) -> Iterator[str]:
    for one in values:
        cells = [f"`{'.'.join(one.path)}`", _kind(one), _default(one), one.text]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield from _rows(one.parts)


def _kind(one: Value) -> str:
    if one.parts:
        return ""
    if "enum" in one.schema:
        return ", ".join(f"`{word}`" for word in one.schema["enum"])
    for word, known in TYPES.values():
        if known.items() <= one.schema.items():
            return word
    if one.schema["type"] == "array":
        return "list of text"
    return _PLAIN[type(one.default)][0]


def _default(one: Value) -> str:
    return "" if one.parts else f"`{json.dumps(one.default)}`"
