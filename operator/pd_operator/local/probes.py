"""httpGet probes: when to ask, and what so many answers in a row mean."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from pd_operator import httpget
from pd_operator.local.network import listens
from pd_operator.podparts import Manifest

EAGER_S = 0.2
"""How often a container is asked that isn't up yet, whatever the probe's period: on one
machine asking is cheap, and somebody waits."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe of a container. Numbers as in Kubernetes, in seconds."""

    host: str
    port: int
    path: str
    period_s: float
    timeout_s: float
    initial_delay_s: float
    failures: int
    successes: int
    grace_s: float | None
    shared: bool
    """Other processes may answer at the same address."""

    async def ask(self, pid: int) -> str | None:
        """None for success, else what went wrong with the process."""
        if self.shared and not listens(pid, (self.host, self.port)):
            return "not listening"
        try:
            response = await httpget.get(
                self.host, self.port, self.path, timeout_s=self.timeout_s, max_bytes=1 << 16
            )
        except httpget.GetFailed as error:
            return str(error)
        if response.ok:
            return None
        text = response.body[:200].decode(errors="replace").strip()
        return f"status {response.status}" + (f", {text}" if text else "")

    async def answers(self, pid: int) -> AsyncGenerator[str | None, None]:
        """One answer each period."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.initial_delay_s)
        while True:
            began = loop.time()
            yield await self.ask(pid)
            await asyncio.sleep(max(0.01, began + self.period_s - loop.time()))


def parse(
    container: Manifest, kind: str, host: str, published: Mapping[str, tuple[str, int]]
) -> Probe | None:
    """The container's probe of that kind. `published` gives ports that are elsewhere."""
    spec = container.get(kind)
    if spec is None:
        return None
    port = spec["httpGet"]["port"]
    shared = published.get(port)
    address = shared or (host, _port_number(container, port))
    return Probe(
        host=address[0],
        port=address[1],
        path=spec["httpGet"].get("path", "/"),
        period_s=spec.get("periodSeconds", 10),
        timeout_s=spec.get("timeoutSeconds", 1),
        initial_delay_s=spec.get("initialDelaySeconds", 0),
        failures=spec.get("failureThreshold", 3),
        successes=spec.get("successThreshold", 1),
        grace_s=spec.get("terminationGracePeriodSeconds"),
        shared=shared is not None,
    )


def _port_number(container: Manifest, port: str | int) -> int:
    if isinstance(port, int):
        return port
    numbers = {item["name"]: item["containerPort"] for item in container.get("ports", [])}
    return int(numbers[port])


class Streak:
    """Turns single answers into a verdict that changes only after enough in a row."""

    def __init__(self, failures: int, successes: int, good: bool) -> None:
        self._needed = {False: failures, True: successes}
        self._good = good
        self._against = 0

    def record(self, success: bool) -> bool:
        """The verdict after one more answer."""
        if success is self._good:
            self._against = 0
            return self._good
        self._against += 1
        if self._against >= self._needed[success]:
            self._good, self._against = success, 0
        return self._good
