"""Faults of workers, one at a time: killed, stopped for a while, told to end."""

import asyncio
import contextlib
import itertools
import signal
from collections import Counter

from tests.cluster import Cluster, Pod

STOPPED_S = 4.0
"""Longer than a router takes to find a worker late."""
QUIET_S = 5.0
_RECOVERY_S = 300.0
"""On a machine with much else to do a worker takes minutes to start."""
_POLL_S = 0.25
FAULTS = ("kill", "stop", "term")
POOLS = ("decode", "prefill")


async def trouble(cluster: Cluster, over: asyncio.Event, done: Counter[str]) -> None:
    """Until it is over; then all workers are there and ready."""
    turns = itertools.cycle(itertools.product(FAULTS, POOLS, (0, 1)))
    for fault, pool, index in turns:
        if await _within(over, QUIET_S):
            return
        await _strike(cluster, fault, cluster.pod(pool, index))
        done[f"{fault} {pool}"] += 1


async def _strike(cluster: Cluster, fault: str, victim: Pod) -> None:
    if fault == "stop":
        cluster.kill(victim.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # its probes may have failed
                cluster.kill(victim.pid, signal.SIGCONT)
        await _recovered(cluster, None)
        return
    cluster.kill(victim.pid, signal.SIGKILL if fault == "kill" else signal.SIGTERM)
    await _recovered(cluster, victim)


async def _recovered(cluster: Cluster, victim: Pod | None) -> None:
    """All pods are ready; of the victim's name there is another process."""
    try:
        async with asyncio.timeout(_RECOVERY_S):
            while not _is_well(cluster, victim):
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        pods = cluster.pods()
        raise cluster.failure(
            f"not ready {_RECOVERY_S:g} s after a fault at {victim}: {pods}"
        ) from None


def _is_well(cluster: Cluster, victim: Pod | None) -> bool:
    pods = cluster.pods()
    if victim is not None and not any(
        pod.name == victim.name and pod.pid != victim.pid for pod in pods
    ):
        return False
    return all(pod.ready and not pod.terminating for pod in pods)


async def _within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
