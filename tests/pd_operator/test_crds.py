"""The CRDs against `pd_operator.api`: the same fields, defaults, bounds and words; every field
is described, and the whole is small enough for every client. What a real API server makes of
them is in tests/envtest/test_crds.py.

`api` is watched while it reads documents that have every field: what it asks of a `Node` is
what it knows.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_operator import api
from pd_operator.apiparts import OWN_PATHS, OWN_VOLUMES
from pd_operator.fields import Node, parse_duration
from tests.pd_operator.objects import document

CRDS = Path(__file__).resolve().parent.parent.parent / "crds"
APPLY_LIMIT_BYTES = 256 * 1024
_BOUNDS = re.compile(r"write a duration from (\w+) to (\w+),")
_ITEM = re.compile(r"\[\d+\]")


def schema(plural: str) -> dict[str, Any]:
    body = yaml.safe_load((CRDS / f"pdcluster.dev_{plural}.yaml").read_text())
    [version] = body["spec"]["versions"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


SPEC = schema("pdclusters")["properties"]["spec"]


def walk(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every field below a schema, by its path; `[]` is any item of a list."""
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from walk(child, f"{path}.{name}")
        yield from walk(child.get("items", {}), f"{path}.{name}[]")


FIELDS = dict(walk(SPEC, "spec"))


@dataclass(frozen=True)
class Asked:
    """How `api` reads a field: "integer", "duration", ... and with which arguments."""

    how: str
    arguments: tuple[Any, ...]


class Watched:
    """Records what is asked of all Nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, Asked] = {}
        self.refused: set[str] = set()
        for how in ("integer", "number", "share", "duration", "choice", "flag", "text", "labels",
                    "texts", "quantities", "quantity", "child", "children", "raw"):  # fmt: skip
            monkeypatch.setattr(Node, how, self._watch(how, getattr(Node, how)))
        original = Node.not_yet

        def not_yet(node: Node, *names: str) -> None:
            self.refused |= {_ITEM.sub("[]", node.at(name)) for name in names}
            original(node, *names)

        monkeypatch.setattr(Node, "not_yet", not_yet)

    def _watch(self, how: str, original: Any) -> Any:
        def watched(node: Node, name: str, *arguments: Any, **named: Any) -> Any:
            path = _ITEM.sub("[]", node.at(name))
            known = self.asked.get(path)
            if known is None or known.how in ("raw", "child"):
                self.asked[path] = Asked(how, (*arguments, *named.values()))
            return original(node, name, *arguments, **named)

        return watched


def template(container: str) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}},
        "spec": {
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "a", "operator": "Equal", "value": "b"}],
            "imagePullSecrets": [{"name": "a"}],
            "volumes": [
                {"name": "a", "persistentVolumeClaim": {"claimName": "a"}},
                {"name": "b", "configMap": {"name": "a"}},
                {"name": "c", "secret": {"secretName": "a"}},
                {"name": "d", "emptyDir": {}},
            ],
            "containers": [
                {
                    "name": container,
                    "env": [{"name": "A", "value": "b"}],
                    "resources": {"requests": {}, "limits": {}},
                    "volumeMounts": [{"name": "a", "mountPath": "/a"}],
                }
            ],
        },
    }


def whole(scaled: bool) -> dict[str, Any]:
    """Every part, so that every field is read; of those that exclude each other, one."""
    pool: dict[str, Any] = {
        "accelerator": {"count": 1},
        "engine": {"speculation": {}, "retention": {}},
        "template": template("engine"),
    }
    if scaled:
        pool["scaling"] = {"maxReplicas": 2}
    target = {"target": "1s"}
    client = {"name": "a", "class": "a", "limits": {"burst": "1s"}, "weight": 2}
    keys = {"secret": "a", "clients": [client]}
    return {
        "slo": {"ttft": target, "tpot": target},
        "router": {
            "template": template("router"),
            "routing": {"hedge": {}},
            "admission": {"classes": [{"name": "a", "ttft": "1s", "share": 0.5}], "limits": {}},
        },
        "security": {"apiKeys": keys},
        "rollout": {},
        "tracing": {"endpoint": "http://a:4318"},
        "budget": {"gpus": 100, "ratio": {"min": 0.1, "max": 10}},
        **({"prefill": pool, "decode": pool} if scaled else {"colocated": pool}),
    }


_SOURCES: tuple[dict[str, Any], ...] = (
    {"huggingFace": {"repo": "a/b"}},
    {"persistentVolumeClaim": {"claimName": "a"}},
    {"image": "a"},
    {"hostPath": "/a"},
)


def _documents() -> Iterator[dict[str, Any]]:
    base = document(**{"spec.prefill": ..., "spec.decode": ...})
    for scaled in (True, False):
        body = json.loads(json.dumps(base))
        body["spec"] |= whole(scaled)
        yield body
    for source in _SOURCES:
        yield document(
            **{"spec.model.source": source, "spec.kvTransfer.colocate": {"topologyKey": "a"}}
        )
    for source in (*_SOURCES, {"builtin": "smollm2-135m-instruct"}):
        draft = {"method": "draft", "draftModel": {"source": source}}
        body = document(**{"spec.prefill": ..., "spec.decode": ..., "spec.colocated": {}})
        body["spec"]["colocated"]["engine"] = {"speculation": draft}
        yield body
        yield document(
            **{f"spec.{name}.engine": {"speculation": draft} for name in ("prefill", "decode")}
        )
    pool: dict[str, Any] = {"scaling": {"maxReplicas": 2, "mode": "External"}}
    yield document(**{"spec.prefill": ..., "spec.decode": ..., "spec.colocated": pool})


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = Watched(monkeypatch)
    for body in _documents():
        with contextlib.suppress(api.InvalidCluster):  # it is read to its end all the same
            api.parse(body)
    return made


def test_both_know_the_same_fields(watched: Watched) -> None:
    read = {path for path in watched.asked if path.startswith("spec.")}
    assert read - watched.refused - set(FIELDS) == set(), "only api knows these"
    assert set(FIELDS) - read == set(), "only the CRD knows these"
    assert watched.refused & set(FIELDS) == set()


_WITH_DEFAULTS = ("integer", "number", "share", "duration", "choice", "flag")
# (field, why its default isn't the schema's)
_OWN_DEFAULTS = {
    "replicas": "only without scaling",
    "kvCacheTokens": "only without an accelerator",
    "kvCacheFraction": "only with an accelerator",
    "maxModelLen": "0, which can't be written",
    "gpus": "none",
    "min": "required",
    "max": "required",
    "maxReplicas": "required",
    "target": "required",
    "builtin": "required",
    "ttft": "no promise",
    "tpot": "no promise",
    "share": "none",
    "after": "what prefills take of late",
    "ttl": "as long as there is room",
    "maxShare": "all that nobody needs",
    "requestsPerMinute": "no limit",
    "tokensPerMinute": "no limit",
}


def test_defaults_are_the_same(watched: Watched) -> None:
    for path, asked in watched.asked.items():
        node, name = FIELDS.get(path), path.rpartition(".")[2]
        if node is None or asked.how not in _WITH_DEFAULTS:
            continue
        default, said = asked.arguments[0], node.get("default")
        if name in _OWN_DEFAULTS and path != "spec.router.replicas":
            assert said is None, path
        elif asked.how == "duration":
            assert parse_duration(said) == default, path
        elif asked.how == "choice" and not default:
            assert said is None, path
        elif path.endswith("scaling.mode"):
            assert said == "SLO"
        else:
            assert said == default, path


def test_bounds_and_words_are_the_same(watched: Watched) -> None:
    compared = 0
    for path, asked in watched.asked.items():
        node = FIELDS.get(path)
        if node is None:
            continue
        match asked.how, asked.arguments:
            case "integer", (_, low, high):
                assert (node["type"], node["minimum"], node["maximum"]) == ("integer", low, high)
            case "number", (_, above, below):
                assert (node["type"], node["minimum"], node["maximum"]) == ("number", above, below)
                assert node["exclusiveMinimum"] is node["exclusiveMaximum"] is True
                _same_remedy(path, node, f"write a number above {above:g} and below {below:g}")
            case "share", _:
                assert (node["type"], node["minimum"], node["maximum"]) == ("number", 0, 1)
                assert (node["exclusiveMinimum"], "exclusiveMaximum" in node) == (True, False)
                _same_remedy(path, node, "write a number above 0 and at most 1")
            case "duration", (_, low_s, high_s):
                [rule] = node["x-kubernetes-validations"]
                found = _BOUNDS.match(rule["message"])
                assert found is not None, path
                assert [parse_duration(text) for text in found.groups()] == [low_s, high_s], path
                for text in found.groups():
                    assert f"duration('{text}')" in rule["rule"], path
            case "choice", (_, options):
                _same_words(path, node["enum"], options)
            case "flag", _:
                assert node["type"] == "boolean", path
            case _:
                continue
        compared += 1
    assert compared > 80


def _same_remedy(path: str, node: Mapping[str, Any], remedy: str) -> None:
    """Where the server says what to write instead, and not its own words alone."""
    for rule in node.get("x-kubernetes-validations", ()):
        assert rule["message"] == remedy, path


def _same_words(path: str, said: Sequence[str], options: Sequence[str]) -> None:
    assert said == [str(one) for one in options], path


def test_texts_have_the_same_lengths(watched: Watched) -> None:
    for path, asked in watched.asked.items():
        node = FIELDS.get(path)
        if node is None or asked.how != "text" or "enum" in node:
            continue
        longest = asked.arguments[2] if len(asked.arguments) > 2 else 253
        assert node["maxLength"] == longest, path


def required(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    yield from ((path, name) for name in node.get("required", ()))
    for name, child in node.get("properties", {}).items():
        yield from required(child, f"{path}.{name}")
        yield from required(child.get("items", {}), f"{path}.{name}[]")


@pytest.mark.parametrize("plural", ["pdclusters", "pdpools"])
def test_every_field_is_described_and_bounded(plural: str) -> None:
    top = schema(plural)
    for path, node in walk(top, ""):
        if path != ".metadata":
            assert node.get("description", "").endswith((".", "default.")), path
        assert "type" in node or "x-kubernetes-int-or-string" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
            assert "x-kubernetes-list-type" in node, path
        if node.get("type") == "string" and path.startswith(".spec"):
            assert "maxLength" in node or "enum" in node, path


def test_every_rule_says_what_to_write_instead() -> None:
    nodes = [SPEC, *FIELDS.values(), *(node.get("items", {}) for node in FIELDS.values())]
    rules = [rule for node in nodes for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) > 60
    for rule in rules:
        words = ("write", "leave it out", "raise it", "widen it", "make another PDCluster")
        assert any(word in rule["message"] for word in words), rule["message"]


@pytest.mark.parametrize("plural", ["pdclusters", "pdpools"])
def test_clients_can_apply_it(plural: str) -> None:
    body = yaml.safe_load((CRDS / f"pdcluster.dev_{plural}.yaml").read_text())
    assert len(json.dumps(body)) < APPLY_LIMIT_BYTES // 2


@pytest.mark.parametrize("own", [OWN_VOLUMES, OWN_PATHS])
def test_names_that_are_the_operators_are_the_same(own: tuple[str, ...]) -> None:
    said = ", ".join(f"'{name}'" for name in own)
    rules = [
        rule["rule"]
        for node in FIELDS.values()
        for rule in node.get("x-kubernetes-validations", ())
        if f"'{own[1]}', " in rule["rule"] or f"['{own[0]}', " in rule["rule"]
    ]
    assert rules, own
    assert {rule for rule in rules if f"[{said}]" not in rule} == set()
