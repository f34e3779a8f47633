"""One writer: who waits, who takes over and when, what a paused operator does when it goes on,
and how a namespaced and a cluster-wide one share a cluster. The audit log says who wrote.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import pd_operator
from e2e.cluster.audit import Audit, Request
from e2e.cluster.envtest import EnvTest, Kube
from pd_operator.leadership import Terms
from pd_operator.lease import LeaseLost
from pd_operator.podparts import Manifest
from pd_operator.resources import LEASE
from tests.envtest.access import rules
from tests.envtest.operating import Watching, looking_on, operating
from tests.envtest.podstub import running
from tests.envtest.test_operator import of_kind
from tests.pd_operator.objects import document

pytestmark = pytest.mark.usefixtures("crds")
DEADLINE_S = 110.0
SHORT = Terms(duration_s=6, deadline_s=4, period_s=0.5, timeout_s=0.4)
CODE = Path(pd_operator.__file__).parents[1]


def lease(namespace: str) -> Manifest:
    """A free one, so that a namespaced operator doesn't wait for a cluster-wide one first."""
    return {
        "apiVersion": LEASE.api_version,
        "kind": LEASE.kind,
        "metadata": {"name": "pdcluster-operator", "namespace": namespace},
        "spec": {},
    }


@contextmanager
def process(kubeconfig: Path, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m pd_operator`, gone afterwards."""
    paths = os.pathsep.join((str(CODE), str(CODE.parent / "runtime")))
    with log.open("wb") as out:
        started = subprocess.Popen(
            [
                sys.executable, "-m", "pd_operator", *arguments,
                f"--kubeconfig={kubeconfig}", "--host=127.0.0.1",
                "--metrics-port=0", "--health-port=0",
                f"--lease-duration-s={SHORT.duration_s}", f"--lease-deadline-s={SHORT.deadline_s}",
            ],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=out,
            stderr=out,
        )  # fmt: skip
    try:
        yield started
    finally:
        started.kill()
        started.wait(timeout=10)


async def ended(what: subprocess.Popen[bytes], deadline_s: float = 30.0) -> int:
    async with asyncio.timeout(deadline_s):
        while what.poll() is None:
            await asyncio.sleep(0.05)
    return int(what.returncode)


async def until_holder(there: Watching, name: str, holder: str) -> None:
    async def held() -> bool:
        found = await there.find("Lease", name)
        return found is not None and found["spec"].get("holderIdentity") == holder

    await there.until(f"{holder} has the lease", held)


def effective(writes: list[Request]) -> list[Request]:
    """Writes that changed what the operator manages."""
    return [one for one in writes if one.resource not in ("leases", "events") and one.code < 400]


def test_a_second_operator_waits_until_the_first_has_ended(kube: Kube, namespace: str, run):
    async def scenario() -> None:
        same = {"lease_name": "shared", "terms": SHORT}
        async with (
            looking_on(kube.kubeconfig, namespace) as there,
            running(kube.kubeconfig, namespace),
        ):
            async with operating(kube.kubeconfig, namespace, identity="one", **same) as (_, one):
                await until_holder(there, "shared", "one")
                async with operating(kube.kubeconfig, namespace, identity="two", **same) as (
                    operator,
                    two,
                ):
                    await there.create(document())
                    await there.until_ready("chat")
                    assert operator.unready() == ""
                    assert two.writes == []
                assert one.writes
            one.writes.clear()
            # The lease was given back: nobody has to wait for it.
            async with operating(kube.kubeconfig, namespace, identity="three", **same) as (
                _,
                three,
            ):
                await until_holder(there, "shared", "three")
                await there.edit("chat", {"decode": {"replicas": 2}})
                await there.until_ready("chat")
                assert three.writes
            assert one.writes == []

    run(scenario(), DEADLINE_S)


def test_a_lease_that_somebody_else_took_ends_the_operator(kube: Kube, namespace: str, run):
    async def until_lost() -> None:
        async with (
            looking_on(kube.kubeconfig, namespace) as there,
            operating(
                kube.kubeconfig, namespace, identity="mine", lease_name="mine", terms=SHORT
            ) as (operator, _),
        ):
            await until_holder(there, "mine", "mine")
            taken = {"spec": {"holderIdentity": "intruder", "leaseDurationSeconds": 600}}
            await there.api.patch(LEASE, namespace, "mine", taken)

            async def lost() -> bool:
                return not operator.lease.holds()

            await there.until("the lease isn't held any more", lost)

    async def scenario() -> None:
        with pytest.raises(LeaseLost, match="intruder has it"):
            await until_lost()

    run(scenario(), DEADLINE_S)


def test_an_operator_that_was_paused_writes_nothing_after_another_took_over(
    own_kube: EnvTest, namespace: str, audit: Audit, run, tmp_path: Path
):
    """SIGSTOP in the middle of work, beyond the lease; then SIGCONT."""
    given = rules("namespaced", "certificates", "lease")
    one = own_kube.service_account(namespace, "one", rules=given)
    two = own_kube.service_account(namespace, "two", rules=given)
    names = [f"chat-{n}" for n in range(8)]

    async def scenario() -> None:
        scope = f"--namespace={namespace}"
        async with (
            looking_on(own_kube.kubeconfig, namespace) as there,
            running(own_kube.kubeconfig, namespace),
        ):
            await there.api.create(LEASE, lease(namespace))
            with ExitStack() as later:
                first = later.enter_context(
                    process(one, tmp_path / "one.log", scope, "--identity=one")
                )
                await until_holder(there, "pdcluster-operator", "one")
                for name in names:
                    await there.create(document(**{"metadata.name": name}))

                async def begun() -> bool:
                    return len(effective(audit.writes(user=f"{namespace}:one"))) >= 20

                await there.until("the first one is at work", begun)
                first.send_signal(signal.SIGSTOP)
                second = later.enter_context(
                    process(two, tmp_path / "two.log", scope, "--identity=two")
                )
                for name in names:
                    await there.until_ready(name, 60)
                await until_holder(there, "pdcluster-operator", "two")
                before = len(effective(audit.writes(user=f"{namespace}:one")))
                assert effective(audit.writes(user=f"{namespace}:two"))
                first.send_signal(signal.SIGCONT)
                assert await ended(first) == 1
                assert len(effective(audit.writes(user=f"{namespace}:one"))) == before
                order = [w.user.rpartition(":")[2] for w in effective(audit.writes())
                         if w.user.startswith(f"system:serviceaccount:{namespace}")]  # fmt: skip
                assert order == sorted(order)  # all of one's, then all of two's
                second.send_signal(signal.SIGTERM)
                assert await ended(second) == 0
                found = await there.get("Lease", "pdcluster-operator")
                assert not found["spec"].get("holderIdentity")
        assert b"is lost: two has it" in (tmp_path / "one.log").read_bytes()

    run(scenario(), DEADLINE_S)


def test_killed_for_real_and_started_again(
    own_kube: EnvTest, namespace: str, audit: Audit, run, tmp_path: Path
):
    """SIGKILL of the process in a creation and in a rollout. Its successor waits out the lease,
    and goes on."""
    account = own_kube.service_account(
        namespace, "killed", rules=rules("namespaced", "certificates", "lease")
    )

    async def scenario() -> None:
        scope = f"--namespace={namespace}"

        async def written(least: int) -> None:
            async def enough() -> bool:
                return len(effective(audit.writes(user=f"{namespace}:killed"))) >= least

            await there.until(f"{least} writes", enough)

        async with (
            looking_on(own_kube.kubeconfig, namespace) as there,
            running(own_kube.kubeconfig, namespace),
        ):
            await there.api.create(LEASE, lease(namespace))
            with process(account, tmp_path / "1.log", scope) as first:
                await there.create(document())
                await written(5)
                first.kill()
            with process(account, tmp_path / "2.log", scope) as second:
                await there.until_ready("chat")
                audit.forget()
                await there.edit("chat", {"decode": {"engine": {"maxRunning": 8}}})
                await written(2)
                second.kill()
            with process(account, tmp_path / "3.log", scope) as third:
                await there.until_ready("chat")
                assert len(of_kind(await there.objects(), "StatefulSet")) == 2
                audit.forget()
                await asyncio.sleep(2)
                assert effective(audit.writes(user=f"{namespace}:killed")) == []
                third.send_signal(signal.SIGTERM)
                assert await ended(third) == 0

    run(scenario(), DEADLINE_S)


def test_a_cluster_wide_operator_leaves_namespaces_to_their_own(kube: Kube, namespace: str, run):
    """Also while the namespaced one is away; until its Lease is deleted."""
    home = f"{namespace}-home"
    kube.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": home}})

    async def scenario() -> None:
        async with (
            looking_on(kube.kubeconfig, namespace) as there,
            running(kube.kubeconfig, namespace),
        ):
            async with operating(kube.kubeconfig, namespace, lease_name="own"):
                await until_there(there, "own")
            async with operating(kube.kubeconfig, "", lease_namespace=home) as (_, wide):
                await there.create(document())
                await asyncio.sleep(3)
                assert not [one for one in wide.writes if one.namespace == namespace]
                async with operating(kube.kubeconfig, namespace, lease_name="own") as (_, own):
                    await there.until_ready("chat")
                    assert own.writes
                assert not [one for one in wide.writes if one.namespace == namespace]
                await there.delete("Lease", "own")
                await there.edit("chat", {"decode": {"replicas": 2}})
                await there.until_ready("chat")
                assert [one for one in wide.writes if one.namespace == namespace]

    run(scenario(), DEADLINE_S)


async def until_there(there: Watching, name: str) -> None:
    async def is_there() -> bool:
        return await there.find("Lease", name) is not None

    await there.until(f"the lease {name} is there", is_there)
