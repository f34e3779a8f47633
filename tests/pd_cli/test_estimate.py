"""`pdcluster estimate`: names, files, links, what it says when it can't."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pd_cli.main import main

CONFIG = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def estimate(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["estimate", *arguments], catch_exceptions=False)
    return found.exit_code, found.output


def test_a_known_model_over_one_link() -> None:
    code, said = estimate("--model", "llama-2-70b", "--prompt", "32768", "--link", "rdma-100g")
    assert code == 0
    assert "327,680 B a token" in said
    assert "10 GiB" in said
    assert "859 ms" in said
    assert "nvlink4" not in said


def test_all_links_as_json() -> None:
    code, said = estimate(
        "--model", "llama-2-7b", "--prompt", "2048", "--json", "--quantization", "int8"
    )
    made = json.loads(said)
    assert code == 0
    assert made["kv_bytes"] == (1 << 30) * 132 // 256
    assert set(made["links"]) >= {"nvlink4", "pcie5", "rdma-100g", "tcp-10g"}


@pytest.mark.parametrize("named", ["config.json", "."])
def test_a_config_of_ones_own(tmp_path: Path, named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ("--model", str(tmp_path / named), "--prompt", "1000", "--link", "3GB/s")
    code, said = estimate(*arguments)
    assert code == 0
    assert "131,072 B a token" in said
    assert "say --prefill-rate" in said
    code, said = estimate(*arguments, "--prefill-rate", "5000")
    assert "200 ms (5,000 tokens/s)" in said
    assert "%" in said
    code, said = estimate(*arguments, "--dtype", "float32")
    assert "262,144 B a token" in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a config.json"),
        ("[" * 200_000, "not a config.json"),
        ("[]", "no object"),
        ('{"model_type": "mamba"}', "recurrent"),
    ],
)
def test_files_that_say_nothing(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "config.json").write_text(content)
    code, said = estimate("--model", str(tmp_path), "--prompt", "10")
    assert code == 2
    assert says in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "llama-99", "--prompt", "10"), "llama-2-70b"),
        (("--model", "llama-2-7b", "--prompt", "0"), "--prompt"),
        (("--model", "llama-2-7b", "--prompt", "1", "--link", "string"), "rdma-100g"),
        (("--model", "llama-2-7b", "--prompt", "1", "--dtype", "int3"), "bfloat16"),
        (("--model", "llama-2-7b", "--prompt", "1", "--prefill-rate", "0"), "--prefill-rate"),
        (("--model", "llama-2-7b", "--prompt", "1", "--prefill-rate", "nan"), "--prefill-rate"),
        (("--model", "llama-2-7b", "--prompt", "9" * 400), "--prompt"),
    ],
)
def test_what_it_says_when_it_cant(arguments: tuple[str, ...], says: str) -> None:
    code, said = estimate(*arguments)
    assert code == 2
    assert says in said
