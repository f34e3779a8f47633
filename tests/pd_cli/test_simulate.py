"""`pdcluster simulate`: its example, its output, what it says of bad files."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pd_cli import simulate_plot
from pd_cli.main import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "simulate.yaml"
DATA = ROOT / "tests" / "pd_sim" / "data"


def simulate(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["simulate", *arguments], catch_exceptions=False)
    return found.exit_code, found.output


@pytest.mark.parametrize("name", ["azure_excerpt.csv", "mooncake_excerpt.jsonl"])
@pytest.mark.parametrize("policy", ["slo", "fixed"])
def test_the_example_ends_with_one_line_of_figures(name: str, policy: str) -> None:
    code, said = simulate(
        "--trace", str(DATA / name), "--cluster", str(EXAMPLE),
        "--policy", policy, "--output", "json",
    )  # fmt: skip
    assert code == 0
    made = json.loads(said.splitlines()[-1])
    assert made["requests"] in (60, 200)
    assert 0 <= made["attainment"] <= 1
    assert made["gpu_hours"] > 0
    assert {"ttft_p99_s", "tpot_p99_s", "itl_p99_s"} <= set(made)


def test_text_for_people() -> None:
    code, said = simulate(
        "--trace", str(DATA / "azure_excerpt.csv"), "--cluster", str(EXAMPLE), "--requests", "50"
    )
    assert code == 0
    assert "50 requests" in said
    assert "GPU-hours" in said
    assert "from data sheets" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("kind: Simulation", "kind: Simulacrum"), "a PDCluster and a Simulation"),
        (("model: llama-2-70b  ", "model: llama-7  "), "model 'llama-7'"),
        (("gpu: h100", "gpu: h1"), "gpu 'h1'"),
        (("gpusPerWorker: 4", "gpusPerWorker: 1"), "no room for KV"),
        (("startSeconds: 120", "startSecond: 120"), "unknown startSecond"),
        (("startSeconds: 120", "startSeconds: soon"), "startSeconds is 'soon'"),
        (("link: rdma-400g", "link: string"), "link 'string'"),
        (("failures: []", "failures: [{}]"), "atSeconds, pool and ordinal"),
        (("minReplicas: 1", "minReplicas: -1"), "minReplicas"),
    ],
)
def test_bad_clusters(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(EXAMPLE.read_text().replace(*change, 1))
    code, said = simulate("--trace", str(DATA / "azure_excerpt.csv"), "--cluster", str(file))
    assert code == 2
    assert says in said


def test_a_bad_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("a,b\n")
    code, said = simulate("--trace", str(file), "--cluster", str(EXAMPLE))
    assert code == 2
    assert "neither Azure's CSV header" in said


@pytest.mark.parametrize("requests", [1, 50])
def test_a_picture_of_a_short_trace_has_something_in_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    """One that is over before anybody decides on a size, or within a minute."""
    drawn: list[Any] = []
    monkeypatch.setattr(simulate_plot.pyplot, "close", drawn.append)
    file = tmp_path / "picture.png"
    code, _ = simulate(
        "--trace", str(DATA / "azure_excerpt.csv"), "--cluster", str(EXAMPLE),
        "--requests", str(requests), "--plot", str(file),
    )  # fmt: skip
    [figure] = drawn
    load, late, sizes = figure.axes
    assert (code, file.read_bytes()[:4]) == (0, b"\x89PNG")
    for axes in (load, late):
        line = axes.lines[0]
        assert len(line.get_xdata()) > 1 or line.get_marker() == "."
    assert [text.get_text() for text in sizes.get_legend().get_texts()] == ["prefill", "decode"]
    assert all(line.get_xdata()[-1] > line.get_xdata()[0] for line in sizes.lines)
