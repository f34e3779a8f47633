"""One operator with a thousand PDClusters on a real API server: how long until a new one is
ready and an edit is applied, what it costs at rest, how soon it is calm after a restart.

Pods are a stub's, which marks them ready at once. All of it shares this machine: etcd, the
API server, the operator, the stub and this bench. On two cores the API server's garbage
collector takes most of both for a second or two out of five with Go's own setting (changes'
p99 was 0.47 to 0.58 s, their median 0.06); it gets more memory, as a real one has.
"""

import asyncio
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import ROOT, Goal, arguments, percentile, report, table
from e2e.cluster import envtest, ports
from e2e.cluster.api import install_crds
from e2e.cluster.audit import Audit
from e2e.cluster.envtest import EnvTest
from e2e.cluster.errors import ClusterError
from pd_operator import httpget, kube
from pd_operator.informer import Watcher
from pd_operator.keys import Key
from pd_operator.kube import Kube
from pd_operator.resources import PDCLUSTER, STATEFUL_SET
from tests.envtest import podstub
from tests.envtest.access import rules
from tests.envtest.operating import is_settled
from tests.pd_operator.objects import document

GOALS = {
    "objects": Goal(">=", 1000),
    "change_applied_p99_s": Goal("<=", 0.5),
    "idle_writes": Goal("<=", 0),
    "idle_cpu_share": Goal("<=", 0.01),
    "restart_calm_s": Goal("<=", 10),
    "restart_writes": Goal("<=", 0),
    "rss_mib": Goal("<=", 250),
}
AT_ONCE = 8
"""PDClusters that are being created at any time."""
CHANGES_PER_S = 10.0
GARBAGE_PERCENT = 400
WAIT_S = 120.0
QUIET_S = 3.0
NAMESPACE = "bench"
_TICKS = os.sysconf("SC_CLK_TCK")


_MOST_BYTES = 64 << 20  # of metrics: each object has series of its own


@dataclass(frozen=True, slots=True)
class Size:
    objects: int
    change_s: float
    rest_s: float


WHOLE = Size(objects=1000, change_s=60.0, rest_s=120.0)
QUICK = Size(objects=20, change_s=4.0, rest_s=5.0)


# ---- the operator as a process ----------------------------------------------------------


@dataclass
class Process:
    """The operator, seen from outside."""

    popen: subprocess.Popen[bytes]
    metrics_port: int
    began: float = field(default_factory=time.monotonic)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory_mib(self, what: str) -> float:
        """`VmRSS` now, or `VmHWM`, the most so far."""
        for line in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines():
            if line.startswith(f"{what}:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError(f"no {what}")

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 while there is none."""
        try:
            page = await httpget.get(
                "127.0.0.1", self.metrics_port, "/metrics", timeout_s=5, max_bytes=_MOST_BYTES
            )
        except httpget.GetFailed:
            return 0.0
        lines = page.body.decode().splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    async def looks(self) -> float:
        return await self.metric("pdcluster_operator_reconcile_seconds_count")

    async def calm(self, objects: int) -> float:
        """Seconds from the start until every object has been looked at and none waits."""
        async with asyncio.timeout(WAIT_S):
            while not (
                await self.looks() >= objects
                and await self.metric("pdcluster_operator_queue_depth") == 0
            ):
                await asyncio.sleep(0.25)  # each time it writes series of all objects
        return time.monotonic() - self.began


@contextmanager
def operator(kubeconfig: Path, log: Path) -> Iterator[Process]:
    """Started; told to end afterwards."""
    [port] = ports.free(1)
    paths = os.pathsep.join((str(ROOT / "operator"), str(ROOT / "runtime")))
    with log.open("ab") as out:
        popen = subprocess.Popen(
            [
                sys.executable, "-m", "pd_operator", "--cluster-wide",
                f"--lease-namespace={NAMESPACE}", f"--kubeconfig={kubeconfig}",
                "--host=127.0.0.1", f"--metrics-port={port}", f"--health-port={port}",
                "--log-level=warning",
            ],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=out,
            stderr=out,
        )  # fmt: skip
    try:
        yield Process(popen, port)
    finally:
        popen.send_signal(signal.SIGTERM)
        try:
            popen.wait(timeout=30)
        except subprocess.TimeoutExpired:
            popen.kill()


# ---- what is waited for -------------------------------------------------------------------


class Eyes:
    """Sees PDClusters and StatefulSets change, and lets others wait for that."""

    def __init__(self, api: Kube) -> None:
        self.api = api
        self.clusters = Watcher(api, PDCLUSTER, NAMESPACE, self._changed)
        self.sets = Watcher(api, STATEFUL_SET, NAMESPACE, self._changed)
        self._waiting: dict[str, list[tuple[Callable[[], bool], asyncio.Future[None]]]] = {}

    def _changed(self, _resource: object, keys: Any) -> None:
        for key in keys or ():
            for true, future in self._waiting.get(key.name, ()):
                if not future.done() and true():
                    future.set_result(None)

    async def until(self, name: str, true: Callable[[], bool]) -> None:
        """Until it is true, as of the change of the PDCluster or its sets that made it so."""
        if true():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (true, future)
        self._waiting.setdefault(name, []).append(entry)
        try:
            async with asyncio.timeout(WAIT_S):
                await future
        finally:
            self._waiting[name].remove(entry)

    def is_ready(self, name: str) -> bool:
        found = self.clusters.store.get(NAMESPACE, name)
        return found is not None and is_settled(found)

    def decode_replicas(self, name: str) -> int:
        sets = self.sets.store.group(Key(NAMESPACE, name))
        decode = [one for one in sets if one["metadata"]["name"].startswith(f"{name}-d-")]
        return sum(int(one["spec"]["replicas"]) for one in decode)


@asynccontextmanager
async def eyes(kubeconfig: Path) -> AsyncIterator[Eyes]:
    api = Kube(await kube.connect(str(kubeconfig)))
    made = Eyes(api)
    tasks = [asyncio.create_task(one.run()) for one in (made.clusters, made.sets)]
    await made.clusters.settled.wait()
    await made.sets.settled.wait()
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await api.close()


# ---- the parts ------------------------------------------------------------------------------


def name_of(number: int) -> str:
    return f"chat-{number:04}"


async def create_all(seen: Eyes, objects: int) -> list[float]:
    """Seconds from creation to Ready, AT_ONCE of them at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> float:
        name = name_of(number)
        body = document(**{"metadata.name": name, "metadata.namespace": NAMESPACE})
        async with slots:
            began = time.monotonic()
            await seen.api.create(PDCLUSTER, body)
            await seen.until(name, lambda: seen.is_ready(name))
            return time.monotonic() - began

    return list(await asyncio.gather(*(one(number) for number in range(objects))))


async def change(seen: Eyes, size: Size) -> list[float]:
    """Seconds from an edit of the replicas until the StatefulSet says so, at a fixed rate."""
    chance = random.Random(7)
    numbers = list(range(size.objects))
    took: list[float] = []

    async def one(name: str) -> None:
        wanted = 3 - seen.decode_replicas(name)
        began = time.monotonic()
        edit = {"spec": {"decode": {"replicas": wanted}}}
        await seen.api.patch(PDCLUSTER, NAMESPACE, name, edit)
        await seen.until(name, lambda: seen.decode_replicas(name) == wanted)
        took.append(time.monotonic() - began)
        await seen.until(name, lambda: seen.is_ready(name))

    async with asyncio.TaskGroup() as group:
        loop = asyncio.get_running_loop()
        began, count = loop.time(), int(size.change_s * CHANGES_PER_S)
        chance.shuffle(numbers)
        for turn in range(count):
            await asyncio.sleep(max(0.0, began + turn / CHANGES_PER_S - loop.time()))
            group.create_task(one(name_of(numbers[turn % len(numbers)])))
    return took


async def quiet(own: EnvTest) -> None:
    """Until what was under way has ended: no write for a while."""
    async with asyncio.timeout(WAIT_S):
        while True:
            audit = own.audit()
            await asyncio.sleep(QUIET_S)
            if not written(audit):
                return


async def measure(own: EnvTest, account: Path, folder: Path, size: Size) -> dict[str, float]:
    audit = own.audit()
    log = folder / "operator.log"
    found: dict[str, float] = {"objects": size.objects}
    async with eyes(own.kubeconfig) as seen, podstub.running(own.kubeconfig, NAMESPACE):
        with operator(account, log) as process:
            took = await create_all(seen, size.objects)
            found["create_ready_p50_s"] = percentile(took, 50)
            found["create_ready_p99_s"] = percentile(took, 99)
            found["create_cpu_ms"] = process.cpu_s() / size.objects * 1000
            found["create_writes"] = len(written(audit)) / size.objects
            await quiet(own)
            audit.forget()
            cpu_s, began = process.cpu_s(), time.monotonic()
            await asyncio.sleep(size.rest_s)
            found["idle_cpu_share"] = (process.cpu_s() - cpu_s) / (time.monotonic() - began)
            found["idle_writes"] = len(written(audit))
            cpu_s, looks = process.cpu_s(), await process.looks()
            took = await change(seen, size)
            found["change_applied_p50_s"] = percentile(took, 50)
            found["change_applied_p99_s"] = percentile(took, 99)
            await quiet(own)
            found["change_cpu_ms"] = (process.cpu_s() - cpu_s) / len(took) * 1000
            found["change_writes"] = len(written(audit)) / len(took)
            found["change_looks"] = (await process.looks() - looks) / len(took)
            found["rss_mib"] = process.memory_mib("VmRSS")
            found["rss_peak_mib"] = process.memory_mib("VmHWM")
        audit.forget()
        with operator(account, log) as process:
            found["restart_calm_s"] = await process.calm(size.objects)
            found["restart_cpu_s"] = process.cpu_s()
            await quiet(own)
            found["restart_writes"] = len(written(audit))
            found["rss_mib"] = max(found["rss_mib"], process.memory_mib("VmRSS"))
            found["rss_peak_mib"] = max(found["rss_peak_mib"], process.memory_mib("VmHWM"))
    return found


def written(audit: Audit) -> list[str]:
    """The operator's writes, the renewals of its lease apart."""
    writes = audit.writes(user=f"{NAMESPACE}:operator")
    return [f"{one.verb} {one.path}" for one in writes if one.resource != "leases"]


def main(quick: bool) -> None:
    try:
        envtest.need()
    except ClusterError as error:
        print(f"not run: {error}")
        report("operator", dict.fromkeys(GOALS), GOALS, quick)
        return
    metrics = whole(QUICK if quick else WHOLE)
    print(
        table(
            ("an operator and", "looks", "writes", "CPU ms", "p50 s", "p99 s"),
            [
                ("a creation", None, metrics["create_writes"], metrics["create_cpu_ms"],
                 metrics["create_ready_p50_s"], metrics["create_ready_p99_s"]),
                ("a change", metrics["change_looks"], metrics["change_writes"],
                 metrics["change_cpu_ms"], metrics["change_applied_p50_s"],
                 metrics["change_applied_p99_s"]),
            ],
        )
    )  # fmt: skip
    report("operator", metrics, GOALS, quick)


def whole(size: Size) -> dict[str, float]:
    """All parts, on an API server of their own."""
    with envtest.running(GARBAGE_PERCENT) as own:
        install_crds(own.api, sorted((ROOT / "crds").glob("*.yaml")))
        for kind, metadata in (
            ("Namespace", {"name": NAMESPACE}),
            ("ServiceAccount", {"name": "default", "namespace": NAMESPACE}),
        ):
            own.api.create({"apiVersion": "v1", "kind": kind, "metadata": metadata})
        account = own.service_account(
            NAMESPACE,
            "operator",
            rules=rules("lease"),
            cluster_rules=rules("namespaced", "clusterWide"),
        )
        folder = own.folder / f"bench-{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            return asyncio.run(measure(own, account, folder, size))
        except BaseException:
            print((folder / "operator.log").read_text()[-4000:], file=sys.stderr)
            raise


if __name__ == "__main__":
    main(arguments(__doc__))
