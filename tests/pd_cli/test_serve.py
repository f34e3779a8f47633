"""`pdcluster serve`: the PDCluster that it makes of a model's name, folder or file, and what it
says where that is none. That it serves: tests/e2e/test_serve.py."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pd_cli import session
from pd_cli.main import main
from pd_operator import api
from pd_operator.api import Builtin, HostPath, Role
from pd_operator.local import support
from pd_operator.local.cluster import Options


def made(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[api.Cluster, Options]:
    found: list[tuple[api.Cluster, Options]] = []

    def keep(body: dict[str, Any], options: Options) -> int:
        found.append((session.check(body), options))
        return 0

    monkeypatch.setattr(session, "run_document", keep)
    result = CliRunner().invoke(main, ["serve", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_a_builtin_model(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, options = made(monkeypatch, "smollm2-135m-instruct")
    assert cluster.model.source == Builtin("smollm2-135m-instruct")
    assert (cluster.name, cluster.model.name) == ("smollm2-135m-instruct",) * 2
    [pool] = cluster.pools
    assert (pool.role, pool.replicas) == (Role.COLOCATED, 1)
    assert (pool.engine.kv_cache_tokens, pool.engine.threads) == (16384, 0)
    assert (options.port, options.file) == (8000, "")
    support.check(cluster)


def test_a_folder_and_what_may_be_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "My model_2"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    arguments = "--port 0 --dtype float32 --max-model-len 99 --kv-cache-tokens 640 --threads 2"
    cluster, options = made(monkeypatch, "./My model_2", *arguments.split())
    assert cluster.model.source == HostPath(str(folder))
    assert (cluster.model.name, cluster.name) == ("My-model_2", "my-model-2")
    assert (cluster.model.dtype, cluster.model.max_model_tokens) == ("float32", 99)
    [pool] = cluster.pools
    assert (pool.engine.kv_cache_tokens, pool.engine.threads) == (640, 2)
    assert options.port == 0
    named, _ = made(monkeypatch, "./My model_2", "--name", "org/model:it")
    assert (named.model.name, named.name) == ("org/model:it", "org-model-it")


@pytest.mark.parametrize(
    ("file", "served", "name"),
    [
        ("Qwen3-0.6B.Q4_K_M.gguf", "Qwen3-0.6B.Q4_K_M", "qwen3-0-6b-q4-k-m"),
        ("7b.gguf", "7b", "model-7b"),
        ("模型.gguf", "model", "model"),
        (f"{'long-' * 12}x.gguf", "long-" * 12 + "x", ("long-" * 8).strip("-")),
    ],
)
def test_a_gguf_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, served: str, name: str
) -> None:
    (tmp_path / file).write_bytes(b"GGUF")
    cluster, _ = made(monkeypatch, str(tmp_path / file))
    assert cluster.model.source == HostPath(str(tmp_path / file))
    assert (cluster.model.name, cluster.name) == (served, name)


def test_no_model_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "no")
    result = CliRunner().invoke(main, ["serve", missing])
    assert result.exit_code == 2
    assert f"{missing} is no folder and no file" in result.output
    assert "smollm2-135m-instruct" in result.output


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "empty.gguf"
    for content in (b"", b"GG", b"PK\3\4"):
        file.write_bytes(content)
        result = CliRunner().invoke(main, ["serve", str(file)])
        assert result.exit_code == 2
        assert f"{file} is no GGUF file" in result.output


def test_a_draft_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    small.write_bytes(b"GGUF")
    cluster, _ = made(monkeypatch, "smollm2-135m-instruct", "--draft-model", str(small))
    [pool] = cluster.pools
    assert pool.engine.draft_model == HostPath(str(small))
    result = CliRunner().invoke(
        main, ["serve", "smollm2-135m-instruct", "--draft-model", str(tmp_path / "no")]
    )
    assert result.exit_code == 2
    assert "--draft-model" in result.output
    monkeypatch.undo()
    result = CliRunner().invoke(
        main, ["serve", "smollm2-135m-instruct", "--draft-model", str(tmp_path)]
    )
    assert result.exit_code == 2
    assert f"{tmp_path} has no config.json" in result.output


def test_what_is_wrong_with_it_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["serve", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path} has no config.json" in result.output
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(main, ["serve", str(tmp_path), "--name", "a b"])
    assert result.exit_code == 2
    assert 'the model: spec.model.name: is "a b"' in result.output
