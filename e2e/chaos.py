"""Trouble without end on the real cluster: `python -m e2e.chaos [--minutes 30] [--seed N]`.

Eight strict streams run all the time. One kind of trouble after the other, chosen at random:
pods are deleted, killed, stopped for a while, cut off from the others; clocks are set, disks are
slow or full (`trouble`); the operator is killed; the API server and etcd are killed and started
again, or stand still most of the time, as behind a slow disk. Between two of them the PDCluster
gets ready. No token may be wrong, and no request fail, but where its own router was the victim;
and alerts about what was promised have to be true (`truth`; their times are shorter here).
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from bench.common import table
from e2e import trouble
from e2e.cluster import claims, cluster
from e2e.cluster.api import ApiError, Manifest, wait_for
from e2e.load import Load, Outcome, questions
from e2e.site import CLAIMED_MODEL, Site, document, is_ready, running
from e2e.trouble import Troubled, with_trouble
from e2e.watch import Watch, rules, shown, watching
from tests.foreign import MONITORING
from tests.tiny_model import tiny_model_dir

NAME = "chaos"
TTFT_S, TPOT_S, PERCENTILE = 5.0, 1.0, 95
READY_S = 420.0
"""Also for a container that was killed often: the kubelet waits up to five minutes."""
ROLES = ("prefill", "decode", "decode", "router")
_FEW = 3  # answers behind each trouble, before the next
_MANY = 16  # answers while something is wrong


@dataclass
class Trouble:
    """One kind: what it does to a pod, and to which. `excused`: requests may fail meanwhile."""

    name: str
    do: Callable[["Scene", Manifest], None]
    roles: Sequence[str] = ROLES
    excused: Sequence[str] = ()


@dataclass
class Scene:
    site: Site
    namespace: str
    load: Load
    chance: random.Random
    troubled: Troubled
    watch: Watch
    done: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)

    def settled(self) -> bool:
        try:
            made = self.site.pdcluster(self.namespace, NAME)
            ready = self.site.condition(self.namespace, NAME, "Ready")
            pods = self.site.pods(self.namespace)
        except (ApiError, OSError):
            return False  # the API server comes back
        return (
            ready.get("status") == "True"
            and ready.get("observedGeneration") == made["metadata"]["generation"]
            and len(pods) == 7
            and all(is_ready(pod) for pod in pods)
        )


# ---- troubles -----------------------------------------------------------------------


def delete(scene: Scene, pod: Manifest) -> None:
    name = pod["metadata"]["name"]
    scene.site.kubectl("delete", "pod", name, "-n", scene.namespace, "--wait=false")
    wait_for("the pod's end", partial(_gone, scene, pod), READY_S)


def _gone(scene: Scene, pod: Manifest) -> bool:
    uids = {one["metadata"]["uid"] for one in scene.site.pods(scene.namespace)}
    return pod["metadata"]["uid"] not in uids


def kill(scene: Scene, pod: Manifest) -> None:
    scene.site.signal(pod, signal.SIGKILL)
    wait_for("the kubelet's notice", partial(_restarted, scene, pod), READY_S)


def _restarted(scene: Scene, before: Manifest) -> bool:
    """Its container runs anew, or the pod has gone."""
    for pod in scene.site.pods(scene.namespace):
        if pod["metadata"]["uid"] == before["metadata"]["uid"]:
            return _restarts(pod) > _restarts(before)
    return True


def _restarts(pod: Manifest) -> int:
    return sum(one["restartCount"] for one in pod["status"].get("containerStatuses", ()))


def pause(scene: Scene, pod: Manifest) -> None:
    scene.site.signal(pod, signal.SIGSTOP)
    time.sleep(scene.chance.uniform(0.2, 4))
    scene.site.signal(pod, signal.SIGCONT)


def cut_off(scene: Scene, pod: Manifest) -> None:
    """From other pods: the node, and so its probes, still reach it."""
    rules = [("FORWARD", way, pod["status"]["podIP"], "-j", "DROP") for way in ("-s", "-d")]
    for rule in rules:
        scene.site.enter("iptables", "-I", *rule)
    time.sleep(scene.chance.uniform(1, 8))
    for rule in rules:
        scene.site.enter("iptables", "-D", *rule)


def set_clocks(scene: Scene, pod: Manifest) -> None:
    """Of all pods of its role, and back again."""
    by_s = scene.chance.choice((-86400 * 40, -3600, -61, 61, 3600, 86400 * 40))
    with scene.troubled.wrong(_role(pod), clock_s=by_s):
        scene.load.until_more(_FEW)


def slow_disks(scene: Scene, pod: Manifest) -> None:
    with scene.troubled.wrong(_role(pod), delay_s=scene.chance.uniform(0.02, 0.5)):
        scene.load.until_more(_MANY)


def full_disks(scene: Scene, pod: Manifest) -> None:
    with scene.troubled.wrong(_role(pod), full=True):
        scene.load.until_more(_MANY)


def _role(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"]["pdcluster.dev/role"])


def slow_etcd(scene: Scene, _: Manifest) -> None:
    """It runs a quarter of the time, as who waits for a disk."""
    until = time.monotonic() + scene.chance.uniform(5, 15)
    pid = cluster.pid_of(scene.site.layout, "etcd")
    try:
        while time.monotonic() < until:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)
    finally:
        os.kill(pid, signal.SIGCONT)


def kill_operator(scene: Scene, _: Manifest) -> None:
    before = scene.site.operators()
    scene.site.kill_operator()

    def another() -> bool:
        new = [pod for uid, pod in scene.site.operators().items() if uid not in before]
        return bool(new) and all(is_ready(pod) for pod in new)

    wait_for("another operator", another, READY_S)


def restart_control_plane(scene: Scene, _: Manifest) -> None:
    for name in scene.chance.choice((("etcd",), ("kube-apiserver",), ("etcd", "kube-apiserver"))):
        cluster.restart(scene.site.layout, name)


TROUBLES = (
    Trouble("a pod is deleted", delete),
    Trouble("a pod is killed", kill, excused=("router",)),
    Trouble("a pod stands still", pause, excused=("router",)),
    Trouble("a pod is cut off", cut_off, excused=("router",)),
    Trouble("clocks are set", set_clocks),
    Trouble("disks are slow", slow_disks),
    Trouble("disks are full", full_disks),
    Trouble("etcd is slow", slow_etcd, roles=("decode",)),
    Trouble("the operator is killed", kill_operator, roles=("decode",)),
    Trouble("etcd or API server are killed", restart_control_plane, roles=("decode",)),
)


def stir(scene: Scene) -> None:
    """One trouble, and the calm after it."""
    trouble = scene.chance.choice(TROUBLES)
    role = scene.chance.choice(trouble.roles)
    pod = scene.chance.choice(scene.site.pods(scene.namespace, role))
    name = f"{trouble.name} ({role})" if len(trouble.roles) > 1 else trouble.name
    failed = len(scene.load.outcome.failed)
    began = time.monotonic()
    trouble.do(scene, pod)
    wait_for(f"calm after: {name}", scene.settled, READY_S)
    scene.load.until_more(_FEW)
    scene.watch.follow()
    scene.done[name] += 1
    if role in trouble.excused:
        new = scene.load.outcome.failed[failed:]
        scene.excused[name] += len(new)
        del scene.load.outcome.failed[failed:]
    print(f"{name}: calm after {time.monotonic() - began:.0f} s", flush=True)


# ---- the whole ----------------------------------------------------------------------


@contextmanager
def scene(site: Site, model: Path, seed: int) -> Iterator[Scene]:
    asked = questions(model)
    troubled = Troubled(site.layout.folder / "trouble")
    for kind in MONITORING:
        site.api.apply(kind)
    with site.namespace(model) as namespace, tempfile.TemporaryDirectory() as folder:
        volume = claims.claim(site.api, namespace, trouble.CLAIM, troubled.folder)
        made = yaml.safe_dump(troubled_document())
        site.kubectl("apply", "-n", namespace, "-f", "-", input=made)
        site.wait_ready(namespace, NAME)
        address = site.address(namespace, NAME)
        with (
            watching(site, namespace, Path(folder)) as watch,
            Load(site.layout.namespace_file, address, asked) as load,
        ):
            yield Scene(site, namespace, load, random.Random(seed), troubled, watch)
    site.api.delete("v1", "PersistentVolume", volume)


def troubled_document() -> Manifest:
    """With KV on disk, so that disks matter."""
    made = document(NAME, CLAIMED_MODEL)
    spec = made["spec"]
    for role in ("prefill", "decode"):
        one = spec[role]
        one["engine"]["retention"] = {"hostMemory": "8Mi", "disk": "64Mi"}
        one["template"] = with_trouble(one["template"], "engine", role)
    spec["router"]["template"] = with_trouble(spec["router"]["template"], "router", "router")
    spec["slo"] = {
        "ttft": {"percentile": PERCENTILE, "target": f"{TTFT_S:g}s"},
        "tpot": {"percentile": PERCENTILE, "target": f"{TPOT_S:g}s"},
    }
    return made


def told(of: Scene, outcome: Outcome) -> str:
    rows = [(name, count, of.excused[name]) for name, count in sorted(of.done.items())]
    return (
        table(("trouble", "times", "excused failures"), rows)
        + f"\n{outcome.right} answers right, {len(outcome.wrong)} wrong, "
        + f"{len(outcome.failed)} requests failed that nothing excuses"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    name = os.environ.get("PDCLUSTER_E2E_CLUSTER", "chaos")
    with running(name) as site, scene(site, tiny_model_dir(), given.seed) as made:
        began = time.monotonic()
        while not made.done or time.monotonic() - began < 60 * given.minutes:
            stir(made)
        print(f"{(time.monotonic() - began) / 60:.1f} minutes of trouble", flush=True)
    outcome = made.load.outcome
    print(told(made, outcome), flush=True)
    alerts = made.watch.told(rules(TTFT_S, TPOT_S, 1 - PERCENTILE / 100), outcome.seen)
    print(shown(alerts), flush=True)
    for name, (_, false, missing) in alerts.items():
        for at in (*false[:3], *missing[:3]):
            print(f"{name}: {'false' if at in false else 'missing'} at {at:.0f} s", file=sys.stderr)
    for line in (*outcome.wrong, *outcome.failed):
        print(line, file=sys.stderr)
    lies = any(false or missing for _, false, missing in alerts.values())
    return 1 if outcome.wrong or outcome.failed or lies else 0


if __name__ == "__main__":
    sys.exit(main())
