"""`pdcluster profile` of a running pair, and of one worker that does both; `pdcluster simulate`
takes what it writes."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import Cluster, pdcluster, serving, spec


def profiled(cluster: Cluster, folder: Path) -> dict[str, Any]:
    file = folder / "profile.json"
    done = pdcluster("profile", "--quick", "-o", str(file), env=cluster.env, timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def check(found: dict[str, Any]) -> None:
    tokens = [one["tokens"] for one in found["prompts"]]
    assert tokens == sorted(set(tokens))
    assert [one["batch"] for one in found["steps"]] == [1, 2, 4, 1]
    assert all(0 < one["seconds"] < 10 for one in found["prompts"] + found["steps"])
    assert found["steps"][3]["kv_tokens"] > 4 * found["steps"][0]["kv_tokens"]


def test_a_pair(cluster: Cluster, tmp_path: Path) -> None:
    found = profiled(cluster, tmp_path)
    check(found)
    assert all(one["exposed_s"] is not None for one in found["prompts"])
    cluster.until_settled()
    documents = [
        yaml.safe_load(cluster.file.read_text()),
        {"kind": "Simulation", "spec": {"profile": "profile.json"}},
    ]
    file = tmp_path / "simulated.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    trace = Path(__file__).parents[1] / "pd_sim" / "data" / "azure_excerpt.csv"
    done = pdcluster(
        "simulate", "--trace", str(trace), "--cluster", str(file), "--policy", "fixed",
        env=cluster.env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "as measured" in done.stdout


def test_one_worker_that_does_both(model: Path, tmp_path: Path) -> None:
    with serving(spec(model, colocated={"replicas": 1}), tmp_path) as cluster:
        found = profiled(cluster, tmp_path)
    check(found)
    assert all(one["exposed_s"] is None for one in found["prompts"])


def test_several_workers_would_share_what_is_asked(model: Path, tmp_path: Path) -> None:
    with serving(spec(model, colocated={"replicas": 2}), tmp_path) as cluster:
        cluster.until(cluster.all_ready, "both are ready")
        done = pdcluster("profile", "-o", str(tmp_path / "p.json"), env=cluster.env)
    assert done.returncode == 1
    assert "one prefill and one decode worker" in done.stderr
