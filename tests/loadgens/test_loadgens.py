"""Load generators that others use, with a PDCluster of real processes: AIPerf and GuideLLM run to
their end, streaming chats and completions, and count no error. `make loadgens-test` brings both.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, serving, spec
from tests.tiny_model import tiny_model_dir

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = 24
_RUN_S = 300
pytestmark = pytest.mark.timeout(_RUN_S + 60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pool = {"replicas": 1, "engine": {"threads": 1}}
    made = spec(tiny_model_dir(), prefill=pool, decode=pool)
    with serving(made, tmp_path_factory.mktemp("cluster")) as running:
        yield running


def run(tool: str, folder: Path, *arguments: str) -> None:
    """In a process of its own: each tool's packages are its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "build" / "packages" / tool),
    }
    done = subprocess.run(
        [sys.executable, "-m", tool, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"


def read(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    run(
        "aiperf", tmp_path, "profile",
        "--model", "tiny",
        "--url", f"http://127.0.0.1:{cluster.port}",
        "--endpoint-type", kind,
        "--streaming",
        "--tokenizer", str(tiny_model_dir()),
        "--isl", "64", "--osl", "16",
        "--concurrency", "4",
        "--request-count", str(REQUESTS),
        "--extra-inputs", "ignore_eos:true",
        "--ui-type", "none",
        "--artifact-dir", str(tmp_path / "out"),
    )  # fmt: skip
    found = read(tmp_path / "out" / "profile_export_aiperf.json")
    assert found["request_count"]["avg"] == REQUESTS
    assert not found.get("error_request_count")
    assert found["usage_completion_tokens"]["avg"] == 16


@pytest.mark.parametrize("kind", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    target = f"target=http://127.0.0.1:{cluster.port}"
    run(
        "guidellm", tmp_path, "run",
        "--backend", f"kind=openai_http,{target},request_format={kind}",
        "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--tokenizer", f"kind=huggingface_auto,model={tiny_model_dir()}",
        "--output", f"kind=json,path={tmp_path / 'out.json'}",
        "--disable-console-interactive",
    )  # fmt: skip
    (benchmark,) = read(tmp_path / "out.json")["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
