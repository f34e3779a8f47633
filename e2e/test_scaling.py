"""Story: pools with `scaling: {mode: SLO}` on the real cluster, with engines of known speed. Chats
grow and decode goes from one worker to two and back, also when the operator is killed meanwhile;
prompts get long and prefill alone grows. Nobody's request fails, and columns, status, events
and `pdcluster explain` tell why.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.api import wait_for
from e2e.cluster.envtest import kubectl
from e2e.cluster.errors import ClusterError
from e2e.load import Load, Question
from e2e.site import CLAIMED_MODEL, Site, document, is_ready, pool
from tests.reference import Reference

NAME = "scaled"
PACE = "0.040,0.024,0.004"
"""A step 40 ms, each sequence 24 ms more: 5 sequences are within 160 ms. Prompts: 250 tokens/s.
So slow that what else the machine does is little beside it."""
PACED = Path(__file__).parents[1] / "tests" / "e2e" / "paced" / "sitecustomize.py"
FOLDER = "/opt/paced"
MOVED_S = 240.0
MORE = ("MoreDemand", "Burst")
"""Why a pool grows."""

pytestmark = pytest.mark.timeout(1800)


def paced() -> dict[str, Any]:
    """A pool of one or two workers that are as fast as `PACE` says, whatever the machine does."""
    windows = {"window": "10s", "panicWindow": "5s", "scaleDownWindow": "20s"}
    made = pool(1, engine={"speculation": {"method": "none"}})
    del made["replicas"]
    spec = made["template"]["spec"]
    spec["volumes"].append({"name": "paced", "configMap": {"name": "paced"}})
    [engine] = spec["containers"]
    engine["volumeMounts"].append({"name": "paced", "mountPath": FOLDER, "readOnly": True})
    path = f"{FOLDER}:/opt/pdcluster/lib:/opt/pdcluster/packages"
    engine["env"] = [
        {"name": "PYTHONPATH", "value": path}, {"name": "PD_TEST_PACE", "value": PACE},
    ]  # fmt: skip
    return made | {"scaling": {"mode": "SLO", "minReplicas": 1, "maxReplicas": 2, **windows}}


@pytest.fixture(scope="module")
def namespace(site: Site, model: Path) -> Iterator[str]:
    slo = {"ttft": {"target": "6s"}, "tpot": {"target": "160ms"}}
    prefill, decode = paced(), paced()
    del prefill["engine"]["speculation"]
    made = document(NAME, CLAIMED_MODEL, prefill=prefill, decode=decode, slo=slo)
    made["spec"]["router"]["routing"] = {"disaggregate": "always"}
    with site.namespace(model) as name:
        config = {
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "paced", "namespace": name},
            "data": {PACED.name: PACED.read_text()},
        }  # fmt: skip
        site.kubectl("apply", "-f", "-", input=yaml.safe_dump(config))
        site.kubectl("apply", "-n", name, "-f", "-", input=yaml.safe_dump(made))
        site.wait_ready(name, NAME)
        yield name


def asked(model: Path, count: int, characters: int, answer_tokens: int) -> list[Question]:
    """Prompts of this length, none of which begins like another, and what is right."""
    reference = Reference(model, threads=2)
    found = []
    for number in range(count):
        words = "".join(f"{number * 100 + i} boats go out to the sea, " for i in range(400))
        body = {
            "model": "tiny", "prompt": words[:characters], "max_tokens": answer_tokens,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        new = reference.generate(words[:characters], answer_tokens, ignore_eos=True)
        found.append(Question(body, reference.decode(new)))
    return found


def sizes(site: Site, namespace: str) -> tuple[int, int]:
    """Workers that serve: prefill, decode."""
    prefill, decode = (
        sum(map(is_ready, site.pods(namespace, role))) for role in ("prefill", "decode")
    )
    return prefill, decode


def decided(site: Site, namespace: str) -> dict[str, tuple[int, str]]:
    """The size that each pool was last given, and why, as the object's status says."""
    status = site.pdcluster(namespace, NAME)["status"]
    last = {pool: status[pool].get("decision") for pool in ("prefill", "decode")}
    return {pool: (one["replicas"], one["reason"]) for pool, one in last.items() if one}


def reach(site: Site, namespace: str, wanted: tuple[int, int]) -> None:
    try:
        wait_for(f"{wanted} workers", lambda: sizes(site, namespace) == wanted, MOVED_S)
    except TimeoutError as error:
        raise ClusterError(f"{error}\n{explained(site)}") from None


@contextmanager
def loaded(
    site: Site, namespace: str, questions: Sequence[Question], streams: int
) -> Iterator[None]:
    address = site.address(namespace, NAME)
    with Load(site.layout.namespace_file, address, questions, streams=streams) as load:
        yield
    load.assert_flawless()


def explained(site: Site) -> str:
    """What `pdcluster explain` makes of the operator's log."""
    logged = site.kubectl("logs", "-n", "pdcluster-system", "deployment/pdcluster", "--tail=-1")
    return subprocess.run(
        [sys.executable, "-m", "pd_cli.main", "explain", NAME, "-f", "-", "--last", "1000"],
        input=logged, capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip


@contextmanager
def watched(site: Site, namespace: str, file: Path) -> Iterator[None]:
    """What `kubectl get pdc -w` shows meanwhile."""
    command = [kubectl(), "--kubeconfig", str(site.kube.kubeconfig)]
    with file.open("w") as out:
        process = subprocess.Popen([*command, "get", "pdc", "-n", namespace, "-w"], stdout=out)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def test_each_pool_follows_its_own_load(
    site: Site, namespace: str, model: Path, tmp_path: Path
) -> None:
    chats = asked(model, 20, characters=60, answer_tokens=80)
    prompts = asked(model, 12, characters=1050, answer_tokens=2)
    move = partial(reach, site, namespace)
    with watched(site, namespace, tmp_path / "shown"):
        move((1, 1))
        with loaded(site, namespace, chats, streams=10):
            site.kill_operator()
            move((1, 2))
        grown = decided(site, namespace)
        move((1, 1))
        with loaded(site, namespace, prompts, streams=6):
            move((2, 1))
            later = decided(site, namespace)
        move((1, 1))
    assert grown["decode"][0] == 2
    assert grown["decode"][1] in MORE
    assert later["decode"] == (1, "LessDemand")
    assert later["prefill"][0] == 2
    assert later["prefill"][1] in MORE
    assert decided(site, namespace)["prefill"] == (1, "LessDemand")
    shown = (tmp_path / "shown").read_text()
    columns = [tuple(line.split()[2:4]) for line in shown.splitlines()]
    assert {("1/1", "2/2"), ("2/2", "1/1")} <= set(columns), shown + explained(site)
    together = [pair for pair in columns if all(one.endswith("/2") for one in pair)]
    assert not together, shown + explained(site)


def test_events_and_explain_tell_why(site: Site, namespace: str) -> None:
    found = json.loads(site.kubectl("get", "events", "-n", namespace, "-o", "json"))["items"]
    events = [(one["reason"], one["message"]) for one in found]
    ups = [text for reason, text in events if reason == "ScaledUp"]
    downs = [text for reason, text in events if reason == "ScaledDown"]
    moves = [text.split(" workers: ")[0] for text in ups]
    assert sorted(moves) == ["decode from 1 to 2", "prefill from 1 to 2"], events
    for text in ups:
        assert text.split(": ")[1] in MORE
        assert text.endswith(" needed"), text  # with the numbers that asked for it
    assert {text.split(" workers: ")[0] for text in downs} == {
        "decode from 2 to 1", "prefill from 2 to 1",
    }  # fmt: skip
    assert all(": LessDemand: " in text for text in downs), downs
    told = explained(site)  # since the operator's restart
    for move in ("decode from 2 to 1", "prefill from 1 to 2"):
        assert move in told
