"""kopf: the operator's life, and triggers. It writes nothing.

Only `on.event` handlers: change handlers would write annotations, timers and daemons would
write finalizers, and indexes make a start quadratic. What exists is known by our own
informer; kopf is one more pair of ears for what users write. PDPools, which are twice as
many, would cost it more at a start than all the rest, so these the informer hears alone.
"""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import kopf

from pd_operator.resources import PDCLUSTER
from pd_operator.service import Operator

log = logging.getLogger("pd_operator.handlers")

AGAIN_S = 1.0
CONNECT_S = 5.0
REQUEST_S = 30.0


class Nowhere(kopf.DiffBaseStorage, kopf.ProgressStorage):
    """kopf's memory of objects: none. Looking for it would cost 40% of its time an event."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        pass

    def purge(self, **_: Any) -> None:
        pass

    def touch(self, **_: Any) -> None:
        pass

    def clear(self, *, essence: Any) -> Any:
        return essence


class Backoffs:
    """Endless: after the last of a finite list kopf ends the operator."""

    def __iter__(self) -> Iterator[float]:
        delay_s = 0.5
        while True:
            yield delay_s
            delay_s = min(5.0, delay_s * 2)


class Life:
    """Runs an operator within kopf, until `stop` is set, a signal comes, or it fails."""

    def __init__(self, operator: Operator, stop: asyncio.Event) -> None:
        self._operator = operator
        self._stop = stop
        self._flag = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def run(self, namespace: str) -> None:
        """Raises what ended the operator, if it didn't end by being told to."""
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)
        relay = asyncio.create_task(self._relay())
        try:
            while not await self._run_once(namespace):
                if self._failure is not None:
                    raise self._failure
                await asyncio.sleep(AGAIN_S)
        finally:
            relay.cancel()

    async def _run_once(self, namespace: str) -> bool:
        """Whether it ended by being told to. kopf's own errors end it, too."""
        scope: dict[str, Any] = {"namespaces": [namespace]} if namespace else {"clusterwide": True}
        self._flag = asyncio.Event()
        if self._stop.is_set():
            return True
        try:
            await kopf.operator(
                registry=self._registry(), settings=settings(), stop_flag=self._flag, **scope
            )
        except Exception:
            log.exception("kopf has ended by an error")
            return False
        return self._failure is None

    async def _relay(self) -> None:
        await self._stop.wait()
        self._flag.set()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(login)
        kopf.on.startup(registry=registry)(self._start)
        kopf.on.cleanup(registry=registry)(self._end)
        where = (PDCLUSTER.group, PDCLUSTER.version, PDCLUSTER.plural)
        kopf.on.event(*where, registry=registry)(self._heard)
        return registry

    async def _start(self, **_: Any) -> None:
        self._task = asyncio.create_task(self._operator.run())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._failure = task.exception() or RuntimeError("the operator ended by itself")
            self._flag.set()

    async def _end(self, **_: Any) -> None:
        self._flag.set()  # kopf would wait five seconds for its own waiter for it
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _heard(self, event: kopf.RawEvent, **_: Any) -> None:
        item = dict(event["object"])
        if "kind" in item:
            self._operator.heard(item)


def login(**arguments: Any) -> kopf.ConnectionInfo | None:
    """The kubeconfig where there is one, else the pod's service account."""
    found = kopf.login_with_kubeconfig(**arguments)
    return found or kopf.login_with_service_account(**arguments)


def settings() -> kopf.OperatorSettings:
    """kopf without peering, events, scanning, annotations."""
    made = kopf.OperatorSettings()
    made.peering.standalone = True
    made.posting.enabled = False
    made.scanning.disabled = True
    made.queueing.idle_timeout = 1.0
    made.watching.connect_timeout = CONNECT_S
    made.watching.server_timeout = 600  # an integer, or the API server refuses it
    made.watching.reconnect_backoff = 1.0
    made.networking.request_timeout = REQUEST_S
    made.networking.error_backoffs = Backoffs()
    nowhere = Nowhere()
    made.persistence.diffbase_storage = nowhere
    made.persistence.progress_storage = nowhere
    return made
