"""Which namespaces a cluster-wide operator leaves to namespaced ones.

A namespaced operator has its Lease, with a label, in its own namespace. The cluster-wide one
lists these often, and writes nothing when its list is too old to go by; a namespaced one that
is new in its namespace waits until that has taken effect (HANDOVER_S). A Lease that has
expired still counts: to give a namespace back, delete it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from pd_operator import apierrors
from pd_operator.kube import Kube, Request
from pd_operator.lease import NAMESPACED, SCOPE_LABEL
from pd_operator.resources import LEASE

log = logging.getLogger("pd_operator.territory")

PERIOD_S = 5.0
TIMEOUT_S = 4.0
VALID_S = 12.0
HANDOVER_S = 15.0
"""Longer than VALID_S: by then every write has been decided by a newer list."""


class NotOurs(apierrors.ApiError):
    """The namespace is a namespaced operator's."""


class Territory:
    """The cluster-wide operator's view."""

    def __init__(self, kube: Kube, changed: Callable[[Iterable[str]], None]) -> None:
        self._kube = kube
        self._changed = changed
        self._others: frozenset[str] = frozenset()
        self._listed_at = float("-inf")

    def is_ours(self, namespace: str) -> bool:
        return namespace not in self._others

    def check(self, request: Request) -> None:
        """The guard of writes."""
        if time.monotonic() - self._listed_at > VALID_S:
            raise apierrors.Unavailable("can't tell which namespaces have operators of their own")
        if not self.is_ours(request.namespace):
            raise NotOurs(f"namespace {request.namespace} has an operator of its own")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(PERIOD_S)

    async def refresh(self) -> None:
        began = time.monotonic()
        selector = f"{SCOPE_LABEL}={NAMESPACED}"
        try:
            listed = await self._kube.list(LEASE, selector=selector, timeout_s=TIMEOUT_S)
        except apierrors.ApiError as error:
            log.warning("leases of namespaced operators: %s", error)
            return
        others = frozenset(item["metadata"]["namespace"] for item in listed.items)
        self._listed_at = began
        different = others ^ self._others
        if different:
            log.info("namespaces with operators of their own: %s", ", ".join(sorted(others)) or "-")
            self._others = others
            self._changed(different)
