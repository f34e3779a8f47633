"""The commands without a cluster: help, validate with every kind of bad file, the examples."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pd_cli.main import _COMMANDS, main
from pd_operator import api
from pd_operator.local import support
from tests.pd_operator.objects import document

EXAMPLES = sorted(
    path
    for path in (Path(__file__).parents[2] / "examples").glob("*.yaml")
    if path.name != "simulate.yaml"  # two documents: test_simulate reads it
)


def cli(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    return result.exit_code, result.output


@pytest.mark.parametrize("command", _COMMANDS)
def test_help(command: str) -> None:
    code, said = cli(command, "--help")
    assert code == 0
    assert f"Usage: main {command}" in said
    assert f"  {command} " in cli("--help")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    code, said = cli("completion", shell)
    assert code == 0
    assert "_PDCLUSTER_COMPLETE" in said


def test_a_word_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PDCLUSTER_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "pdcluster simulate --tr")
    monkeypatch.setenv("COMP_CWORD", "2")
    result = CliRunner().invoke(main, prog_name="pdcluster", complete_var="_PDCLUSTER_COMPLETE")
    assert "plain,--trace" in result.output


def test_an_unknown_command() -> None:
    code, said = cli("upp")
    assert code == 2
    assert "No such command" in said


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_and_run_here(example: Path) -> None:
    assert cli("validate", "-f", str(example))[0] == 0
    if example.stem != "kubernetes":  # says in its first line where it runs
        support.check(api.parse(yaml.safe_load(example.read_text())))


def test_a_valid_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(document()))
    assert cli("validate", "-f", str(file)) == (0, f"{file}: PDCluster chat is valid\n")


def test_a_valid_file_for_programs(tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    changes = {"spec.model.source": {"image": "a:b"}, "spec.model.maxModelLen": 20000}
    file.write_text(yaml.safe_dump(document(**changes)))
    code, said = cli("validate", "-f", str(file), "-o", "json")
    found = json.loads(said)
    assert (code, found["name"], found["valid"], found["errors"]) == (0, "chat", True, [])
    noted = {one["path"] for one in found["notes"]}
    assert noted == {f"spec.{role}.engine.kvCacheTokens" for role in ("prefill", "decode")}
    assert [one["path"] for one in found["lackingHere"]] == ["spec.model.source.image"]


def test_mistakes_for_programs(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(document(**{"spec.prefill.replicas": -1})))
    code, said = cli("validate", "-f", str(file), "-o", "json")
    found = json.loads(said)
    assert (code, found["valid"]) == (2, False)
    assert found["errors"] == [
        {
            "path": "spec.prefill.replicas",
            "problem": "is -1",
            "remedy": "write a whole number from 0 to 1000",
        }
    ]
    file.write_text("")
    code, said = cli("validate", "-f", str(file), "-o", "json")
    assert (code, json.loads(said)["valid"]) == (2, False)
    assert "is empty" in json.loads(said)["errors"][0]["problem"]


@pytest.mark.parametrize(("longest", "noted"), [(16385, False), (16386, True)])
def test_a_pool_too_small_for_the_longest_request_is_noted(
    tmp_path: Path, longest: int, noted: bool
) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(document(**{"spec.model.maxModelLen": longest})))
    code, said = cli("validate", "-f", str(file))
    assert code == 0
    for role in ("prefill", "decode"):
        note = (
            f"note: spec.{role}.engine.kvCacheTokens: is 16384, fewer than"
            f" spec.model.maxModelLen ({longest}) has; longer prompts are refused,"
            " answers end there; write as many, or a smaller maxModelLen"
        )
        assert (note in said) is noted


BAD_FILES = {
    "empty": (b"", ": is empty; write a PDCluster (see examples/quickstart.yaml)"),
    "comment": (b"# nothing\n---\n", ": is empty; write a PDCluster"),
    "text": (b"just text", ": holds no mapping; write a PDCluster"),
    "list": (b"- 1\n- 2\n", ": holds no mapping; write a PDCluster"),
    "two documents": (
        b"kind: A\n---\nkind: B\n",
        ": holds 2 documents; write one PDCluster a file",
    ),
    "broken": (b"spec:\n  a: [1, 2\n", ":3:1: expected ',' or ']', but got '<stream end>'"),
    "tab": (b"spec:\n\ta: 1\n", ":2:1: found character '\\t' that cannot start any token"),
    "key twice": (
        b"spec:\n  decode: {}\n  decode: {replicas: 2}\n",
        ':3:3: "decode" stands there twice; keep one',
    ),
    "object": (b"a: !!python/object:os.system {}\n", ":1:4: could not determine a constructor"),
    "latin-1": (b"a: \xe9\n", ": byte 3 is not UTF-8; save it as UTF-8"),
    "binary": (b"\0\1\2", ": is no YAML: "),
    "large": (b"#" * ((1 << 20) + 1), ": is larger than 1 MiB"),
    "nested": (b"[" * 1000, ": is no YAML: "),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_no_document(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    code, said = cli("validate", "-f", str(file))
    assert code == 2
    assert said.startswith(f"{file}{message}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    code, said = cli("validate", "-f", str(tmp_path / "none.yaml"))
    assert code == 2
    assert "none.yaml: No such file or directory; name a PDCluster file" in said


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "odd.yaml")
    code, said = cli("validate", "-f", str(tmp_path / "odd.yaml"))
    assert code == 2
    assert "odd.yaml: isn't a file; name a PDCluster file" in said


def test_each_mistake_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    changes = {"spec.prefill.replicas": -1, "spec.decode.replica": 2}
    file.write_text(yaml.safe_dump(document(**changes)))
    code, said = cli("validate", "-f", str(file))
    assert code == 2
    assert said.splitlines() == [
        f"{file}: spec.prefill.replicas: is -1; write a whole number from 0 to 1000",
        f"{file}: spec.decode.replica: is not a known field; did you mean replicas?",
    ]


def test_anchors_and_merges_are_yaml_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(
        "apiVersion: pdcluster.dev/v1alpha1\nkind: PDCluster\nmetadata: {name: chat}\n"
        "spec:\n"
        "  model: {name: a, source: {builtin: smollm2-135m-instruct}}\n"
        "  prefill: &pool {replicas: 1}\n"
        "  decode: {<<: *pool, replicas: 2}\n"
    )
    assert cli("validate", "-f", str(file))[0] == 0


def test_what_only_kubernetes_has_is_valid_and_refused_by_up(tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(document(**{"spec.model.source": {"image": "a:b"}})))
    assert cli("validate", "-f", str(file))[0] == 0
    code, said = cli("up", "-f", str(file))
    assert code == 2
    assert "spec.model.source.image: is for Kubernetes" in said
