"""Covers pd_cli.output: every command says what its exit statuses mean, and each status that is
documented is caused here or by a test that is named; what programs ask for has the same statuses.
"""

import json
import re
import socket
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pd_cli import kubectl, main, output
from scripts import reference
from tests.documents import ROOT
from tests.pd_cli.test_explain import lines
from tests.pd_operator.objects import document

_UP = "tests/pd_cli/test_up.py"
_KUBECTL = "tests/pd_cli/test_kubectl.py"
_TAKEN = "tests/pd_cli/test_exits.py::test_a_port_that_is_taken"
_QUICKSTART = "tests/e2e/test_quickstart.py::test_quickstart"

CAUSED = {
    "pdcluster serve": {2: ("no-such-model",)},
    "pdcluster up": {2: ("-f", "none.yaml")},
    "pdcluster status": {0: (), 1: ("nope",), 2: ("--nope",)},
    "pdcluster top": {1: ("nope",), 2: ("--nope",)},
    "pdcluster requests": {1: ("nope",), 2: ("--nope",)},
    "pdcluster validate": {0: ("-f", "good.yaml"), 2: ("-f", "bad.yaml")},
    "pdcluster estimate": {
        0: ("--model", "llama-2-7b", "--prompt", "9"),
        2: ("--model", "nope", "--prompt", "9"),
    },
    "pdcluster explain": {
        0: ("chat", "-f", "operator.log"),
        1: ("nope", "-f", "operator.log"),
        2: ("--replay", "bad.yaml"),
    },
    "pdcluster advise": {2: ("--model", "nope", "--gpus", "2")},
    "pdcluster simulate": {2: ("--trace", "bad.yaml", "--cluster", "bad.yaml")},
    "pdcluster profile": {1: ("nope", "-o", "json"), 2: ("nope",)},
    "pdcluster down": {0: (), 1: ("nope",), 2: ("--nope",)},
    "pdcluster logs": {1: ("nope",), 2: ()},
    "pdcluster completion": {0: ("bash",), 2: ("tcsh",)},
    "pdcluster quickstart": {2: ("-f", "none.yaml")},
    "kubectl pd status": {1: ("nope",), 2: ("--nope",)},
    "kubectl pd top": {1: ("nope",), 2: ()},
    "kubectl pd requests": {1: ("nope",), 2: ()},
    "kubectl pd open": {1: ("nope",), 2: ()},
    "kubectl pd explain": {1: ("nope",), 2: ()},
}
"""Command -> status -> what causes it where nothing runs and there is no kubectl."""

ELSEWHERE = {
    ("pdcluster serve", 0): "tests/test_documents.py::test_serve",
    ("pdcluster serve", 1): _TAKEN,
    ("pdcluster up", 0): f"{_UP}::test_ready_then_a_signal",
    ("pdcluster up", 1): _TAKEN,
    ("pdcluster top", 0): "tests/pd_cli/test_top.py::test_once_from_a_forwarded_port",
    ("pdcluster requests", 0): "tests/pd_cli/test_requests.py::test_the_last_one_is_shown",
    ("pdcluster advise", 0): "tests/pd_cli/test_advise.py::test_an_answer_with_its_evidence",
    ("pdcluster simulate", 0): "tests/pd_cli/test_simulate.py::test_text_for_people",
    ("pdcluster profile", 0): "tests/e2e/test_profile.py::test_a_pair",
    ("pdcluster logs", 0): f"{_UP}::test_status_logs_and_down",
    ("pdcluster quickstart", 0): _QUICKSTART,
    ("pdcluster quickstart", 1): _TAKEN,
    ("kubectl pd status", 0): f"{_KUBECTL}::test_status_of_one_says_what_is_wrong",
    ("kubectl pd top", 0): f"{_KUBECTL}::test_top_goes_through_forwarded_ports",
    ("kubectl pd requests", 0): f"{_KUBECTL}::test_requests_go_through_forwarded_ports",
    ("kubectl pd open", 0): f"{_KUBECTL}::test_open_tells_where",
    ("kubectl pd explain", 0): f"{_KUBECTL}::test_explain_reads_the_operators_logs",
}
"""What takes more than a call: the test that causes it."""

CASES = [
    pytest.param(name, status, arguments, id=f"{name} {status}")
    for name, statuses in CAUSED.items()
    for status, arguments in statuses.items()
]


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text(yaml.safe_dump(document()))
    Path("bad.yaml").write_text("nonsense")
    Path("operator.log").write_text("\n".join(lines()))


def call(name: str, *arguments: str) -> tuple[int, str]:
    program, _, verb = name.rpartition(" ")
    group = main.main if program == "pdcluster" else kubectl.main
    found = CliRunner().invoke(group, [verb, *arguments], catch_exceptions=False)
    return found.exit_code, found.stdout


def test_each_command_says_what_its_statuses_mean() -> None:
    assert set(output.EXITS) == set(reference.all_commands())
    known = {(name, status) for name, means in output.EXITS.items() for status in means}
    caused = {(name, status) for name, statuses in CAUSED.items() for status in statuses}
    assert caused | set(ELSEWHERE) == known
    assert not caused & set(ELSEWHERE)


@pytest.mark.parametrize(("name", "status", "arguments"), CASES)
def test_a_status_is_as_documented(name: str, status: int, arguments: tuple[str, ...]) -> None:
    assert call(name, *arguments)[0] == status


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_these_tests_are_there(test: str) -> None:
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text()
    assert re.search(rf"^ *(async )?def {name}\(", text, re.MULTILINE), test


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pdcluster up", ("-f", "good.yaml")),
        ("pdcluster quickstart", ("-f", "good.yaml")),
        ("pdcluster serve", ("smollm2-135m-instruct",)),
    ],
)
def test_a_port_that_is_taken(
    name: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert call(name, *arguments, "--port", str(other.getsockname()[1]))[0] == 1


_WITHOUT = {"pdcluster serve", "pdcluster up", "pdcluster quickstart", "pdcluster completion"}


def test_all_but_those_in_the_foreground_have_the_same_output_flag() -> None:
    for name, command in reference.all_commands().items():
        flags = {flag: one for one in command.params for flag in one.opts}
        assert ("--output" in flags) == (name not in _WITHOUT), name
        if name not in _WITHOUT:
            assert flags["-o"] is flags["--output"], name


@pytest.mark.parametrize(("name", "status", "arguments"), CASES)
def test_programs_get_the_same_status_and_nothing_but_json(
    name: str, status: int, arguments: tuple[str, ...]
) -> None:
    if name in _WITHOUT or status == 2 or "-o" in arguments:
        return
    found, said = call(name, *arguments, "-o", "json")
    assert found == status
    for one in said.splitlines() if name == "pdcluster explain" else [said]:
        assert not one or json.loads(one)


def test_old_spellings_go_on() -> None:
    assert call("pdcluster status", "-o", "table") == (0, "no PDCluster is running\n")
    asked = ("--model", "llama-2-7b", "--prompt", "9")
    code, said = call("pdcluster estimate", *asked, "--json")
    assert (code, said) == call("pdcluster estimate", *asked, "-o", "json")
    assert json.loads(said)["prompt_tokens"] == 9
