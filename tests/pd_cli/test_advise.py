"""`pdcluster advise`: an answer with its evidence, and bad input."""

import json

import pytest
from click.testing import CliRunner

from pd_cli.main import main

ARGUMENTS = ("--model", "llama-3-8b", "--requests", "60")


def advise(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["advise", *arguments], catch_exceptions=False)
    return found.exit_code, found.output


def test_an_answer_with_its_evidence() -> None:
    code, said = advise(*ARGUMENTS, "--gpus", "4", "--prompt-tokens", "100-200")
    assert code == 0
    assert said.startswith(("Yes:", "No:"))
    assert "GPUs for 99%" in said
    code, said = advise(*ARGUMENTS, "--gpus", "2", "--output", "json")
    made = json.loads(said)
    assert made["answer"] in ("no", "chunks")
    assert set(made["ways"]) == {"apart", "chunks", "whole"}


def test_bursts_are_beside_the_others() -> None:
    code, said = advise(*ARGUMENTS, "--gpus", "2", "--bursts", "5x1000-2000/3")
    assert code == 0
    count = int(said.splitlines()[-1].split()[0])
    assert count > 60
    assert (count - 60) % 5 == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpus", "4", "--prompt-tokens", "9-1"), "'9-1'"),
        (("--gpus", "4", "--bursts", "many"), "like 10x16000-32000/60"),
        (("--gpus", "4", "--bursts", "0x1-2/3"), "like 10x16000-32000/60"),
        (("--gpus", "4", "--link", "string"), "link 'string'"),
        (("--gpus", "1", "--gpus-per-worker", "2"), "make no worker"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], says: str) -> None:
    code, said = advise(*ARGUMENTS, *arguments)
    assert code == 2
    assert says in said
