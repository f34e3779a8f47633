"""What a container's process is started with: `$(NAME)`, fieldRefs, paths under mounts."""

import pytest

from pd_operator.local import environment
from pd_operator.local.environment import ConfigError, Mount

POD = {
    "metadata": {
        "name": "chat-d-1-0",
        "namespace": "apps",
        "labels": {"pdcluster.dev/role": "decode"},
    },
    "spec": {"nodeName": "localhost"},
    "status": {"podIP": "127.64.0.1"},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("--x=$(A):$(B)", "--x=1:two"),
        ("$(NOBODY)", "$(NOBODY)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A", "$(A"),
    ],
)
def test_expansion(text: str, expected: str) -> None:
    assert environment.expand(text, {"A": "1", "B": "two"}) == expected


def field(path: str) -> dict[str, object]:
    return {"name": "X", "valueFrom": {"fieldRef": {"fieldPath": path}}}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "chat-d-1-0"),
        ("metadata.namespace", "apps"),
        ("status.podIP", "127.64.0.1"),
        ("spec.nodeName", "localhost"),
        ("metadata.labels['pdcluster.dev/role']", "decode"),
        ("metadata.annotations['none']", ""),
    ],
)
def test_field_refs(path: str, value: str) -> None:
    assert environment.container_env({"env": [field(path)]}, POD) == {"X": value}


def test_variables_refer_to_those_before_them() -> None:
    env = [
        field("status.podIP"),
        {"name": "BIND", "value": "$(X):8000"},
        {"name": "EARLY", "value": "$(LATE)"},
        {"name": "LATE", "value": "1"},
        {"name": "EMPTY"},
    ]
    assert environment.container_env({"env": env}, POD) == {
        "X": "127.64.0.1",
        "BIND": "127.64.0.1:8000",
        "EARLY": "$(LATE)",
        "LATE": "1",
        "EMPTY": "",
    }


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (field("status.phase"), "fieldRef status.phase: the pod has no such field"),
        (
            {"name": "T", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
            "env T: secretKeyRef can't be resolved on this machine",
        ),
    ],
)
def test_what_cannot_be_resolved(item: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment.container_env({"env": [item]}, POD)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/models", "/cache/models"),
        ("/models/a b", "/cache/models/a b"),
        ("--out=/models/a", "--out=/cache/models/a"),
        ("/models/special/x", "/elsewhere/x"),
        ("/modelsandmore", "/modelsandmore"),
        ("--source=builtin:/models", "--source=builtin:/models"),
        ("x=/models", "x=/models"),
        ("see /models", "see /models"),
    ],
)
def test_paths_under_mounts(text: str, expected: str) -> None:
    mounts = [Mount("/models", "/cache/models"), Mount("/models/special", "/elsewhere")]
    assert environment.map_paths(text, mounts) == expected


def test_commands() -> None:
    spec = {"name": "e", "command": ["python", "-m", "x"], "args": ["--dir=/m", "--ip=$(IP)"]}
    mounts = [Mount("/m", "/real")]
    argv = environment.command(spec, {"IP": "1.2.3.4"}, mounts, "/venv/python")
    assert argv == ["/venv/python", "-m", "x", "--dir=/real", "--ip=1.2.3.4"]
    with pytest.raises(ConfigError, match="container e has no command"):
        environment.command({"name": "e"}, {}, [], "python")


def test_the_program_is_where_it_is_even_below_a_mount() -> None:
    container = {"name": "c", "command": ["/tmp/bin/engine"], "args": ["/tmp/file"]}
    mounts = [Mount("/tmp", "/pods/a/tmp")]
    argv = environment.command(container, {}, mounts, "python")
    assert argv == ["/tmp/bin/engine", "/pods/a/tmp/file"]
