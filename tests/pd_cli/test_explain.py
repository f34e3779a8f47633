"""`pdcluster explain`: from what `up` keeps, from an operator's log, and from a recording."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pd_cli.main import main
from pd_operator.scaling import explaining, recording
from pd_operator.scaling.types import Hold, Scale, Spec
from tests.pd_operator.scaling.test_explaining import SAMPLES
from tests.pd_operator.scaling.world import decode, prefill


def lines(cluster: str = "team/chat") -> list[str]:
    decisions = [Scale(3, "MoreDemand"), Hold(3, "AtTarget"), Scale(2, "LessDemand")]
    return [
        "INFO "
        + explaining.line(explaining.told(cluster, "decode", before, one, f"2026-01-0{number}"))
        for number, (before, one) in enumerate(zip((2, 3, 3), decisions, strict=True), 1)
    ]


def explain(*arguments: str, stdin: str = "") -> tuple[int, str]:
    found = CliRunner().invoke(main, ["explain", *arguments], stdin, catch_exceptions=False)
    return found.exit_code, found.output


def test_an_operators_log() -> None:
    log = "\n".join(["listed objects=3", *lines(), *lines("other/chat2")])
    code, said = explain("chat", "-f", "-", stdin=log)
    assert code == 0
    assert said.splitlines()[0] == "team/chat: decode, 2"
    assert "decode from 2 to 3: more demand" in said
    assert "decode from 3 to 2: nothing has asked for so many" in said
    assert "chat2" not in said
    assert explain("team/chat", "--last", "1", "-f", "-", stdin=log)[1].count("2026") == 1


def test_what_up_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "pdcluster" / "chat" / "logs"
    folder.mkdir(parents=True)
    (folder / "scaling.jsonl").write_text("\n".join(lines()))
    code, said = explain("chat", "-o", "json")
    assert code == 0
    assert [json.loads(line)["scaling"]["to"] for line in said.splitlines()] == [3, 3, 2]
    code, said = explain("nobody")
    assert code == 1
    assert "no decision about nobody" in said


def test_a_recording_is_decided_again() -> None:
    spec = Spec((prefill(9, maximum=4), decode(1)))
    look = recording.Look("team/chat/1", 3.0, spec, SAMPLES)
    data = recording.to_json(look, {})
    code, said = explain("--replay", "-", stdin=json.dumps(data))
    assert code == 1
    assert "prefill from 9 to 4: OutOfBounds" in said
    assert "1 looks, 1 of them decided otherwise" in said
    code, said = explain("--replay", "-", "-o", "json", stdin=json.dumps(data))
    found = json.loads(said)
    assert (code, found["looks"], found["different"]) == (1, 1, 1)
    [change] = [one for one in found["changes"] if one["pool"] == "prefill"]
    assert (change["before"], change["after"], change["reason"]) == (9, 4, "OutOfBounds")
    data["decided"] = {"prefill": [4, "OutOfBounds"], "decode": [1, "NoData"]}
    assert explain("--replay", "-", stdin=json.dumps(data))[0] == 0


@pytest.mark.parametrize("text", ["nonsense", "{}"])
def test_no_recording(text: str) -> None:
    code, said = explain("--replay", "-", stdin=text)
    assert code == 2
    assert "<stdin>" in said


def test_a_name_is_needed() -> None:
    assert explain()[0] == 2
