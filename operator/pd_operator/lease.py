"""One writer: a Lease of our own, renewed while the operator works, given back at its end.

kopf's peering is no leader election, and that of the `kubernetes` package has two leaders
for seconds after a pause.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

from pd_operator import apierrors
from pd_operator.kube import Kube
from pd_operator.leadership import Leadership, Record, Terms
from pd_operator.podparts import Manifest
from pd_operator.resources import LEASE

log = logging.getLogger("pd_operator.lease")

SCOPE_LABEL = "pdcluster.dev/operator-scope"
NAMESPACED = "namespaced"
CLUSTER_WIDE = "cluster"


class LeaseLost(Exception):
    """Somebody else may act now. The process has to end."""


class NotHeld(Exception):
    """We may not write now, and don't know yet whether anybody else may."""


def boot_clock() -> float:
    """Goes on while the machine sleeps, unlike time.monotonic."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """The Lease `name` in `namespace`. `check` is to be called before every other write."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        *,
        scope: str = CLUSTER_WIDE,
        terms: Terms | None = None,
    ) -> None:
        self.created = False
        self.heard_at = float("-inf")
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._scope = scope
        self._leadership = Leadership(identity, terms or Terms())
        self._document: Manifest = {}
        self._over = False

    @property
    def holder(self) -> str:
        record = self._leadership.record
        return record.holder if record else ""

    def holds(self) -> bool:
        return not self._over and self._leadership.holds(boot_clock())

    def check(self) -> None:
        """Raises NotHeld unless a write that begins now is ours to make."""
        if not self.holds():
            raise NotHeld(f"the lease {self._namespace}/{self._name} isn't held now")

    async def acquire(self) -> None:
        """Until it is ours. Says once who has it."""
        told = ""
        while not await self._try_take():
            if self.holder and self.holder != told:
                told = self.holder
                log.warning(
                    "lease %s/%s is held by %s: this operator doesn't act until that one is gone",
                    self._namespace, self._name, told,
                )  # fmt: skip
            await asyncio.sleep(self._leadership.terms.period_s * random.uniform(0.8, 1.2))
        log.info("lease taken %s/%s", self._namespace, self._name)

    async def hold(self, regained: Callable[[], None] = lambda: None) -> None:
        """Renews until cancelled; raises LeaseLost when somebody else has it.

        While the API server is away nobody else can take it either. We stop writing in
        time, and go on when it turns out to be still ours.
        """
        while True:
            await asyncio.sleep(self._leadership.terms.period_s)
            held = self.holds()
            if await self._try_take():
                if not held:
                    log.warning("lease %s/%s is ours again", self._namespace, self._name)
                    regained()
            elif self.holder not in ("", self._leadership.identity):
                self._over = True
                self._leadership.lost()
                raise LeaseLost(
                    f"the lease {self._namespace}/{self._name} is lost: {self.holder} has it"
                )

    async def release(self) -> None:
        """Gives it up at once, so that the next one needn't wait. Best effort: `helm uninstall`
        takes our rights away before it ends us."""
        if not self.holds():
            return
        self._over = True
        try:
            try:
                await self._give_back()
            except apierrors.Conflict:  # by a renewal of ours that was cut off
                await self._look()
                if self.holder != self._leadership.identity:
                    return
                await self._give_back()
            log.info("lease given back %s/%s", self._namespace, self._name)
        except apierrors.ApiError as error:
            log.warning("lease not given back: %s", error)

    async def _give_back(self) -> None:
        body = self._body(holder="", duration_s=1)
        await self._kube.replace(LEASE, body, timeout_s=self._leadership.terms.timeout_s)

    async def _try_take(self) -> bool:
        """One round: write where we may, else look. False: it isn't ours, or nobody knows."""
        try:
            if self._document and self._leadership.holds(boot_clock()):
                return await self._write()
            await self._look()
            return self._leadership.may_take(boot_clock()) and await self._write()
        except apierrors.Conflict:
            return await self._after_conflict()
        except apierrors.NotFound:
            self._leadership.lost()  # deleted: whoever makes it anew has it
            return False
        except apierrors.ApiError as error:
            log.warning("lease %s/%s: %s", self._namespace, self._name, error)
            return False

    async def _after_conflict(self) -> bool:
        """Somebody wrote: another candidate, or an earlier write of ours whose answer was lost."""
        try:
            await self._look()
            return self.holder == self._leadership.identity and await self._write()
        except apierrors.ApiError as error:
            log.warning("lease %s/%s: %s", self._namespace, self._name, error)
            return False

    async def _look(self) -> None:
        timeout_s = self._leadership.terms.timeout_s
        try:
            found = await self._kube.get(LEASE, self._namespace, self._name, timeout_s=timeout_s)
        except apierrors.NotFound:
            self._document = {}
            self._leadership.saw(None, boot_clock())
        else:
            self._document = found
            self._leadership.saw(_record(found), boot_clock())
        self.heard_at = time.monotonic()

    async def _write(self) -> bool:
        began_s = boot_clock()
        timeout_s = self._leadership.terms.timeout_s
        body = self._body(self._leadership.identity, self._leadership.terms.duration_s)
        if self._document:
            written = await self._kube.replace(LEASE, body, timeout_s=timeout_s)
        else:
            written = await self._kube.create(LEASE, body, timeout_s=timeout_s)
            self.created = True
        self._document = written
        self._leadership.took(_record(written), began_s)
        self.heard_at = time.monotonic()
        return self._leadership.holds(boot_clock())

    def _body(self, holder: str, duration_s: float) -> Manifest:
        now = _micro_time()
        spec = dict(self._document.get("spec") or {})
        if spec.get("holderIdentity") != holder:
            spec["acquireTime"] = now
        spec |= {
            "holderIdentity": holder,
            "leaseDurationSeconds": int(duration_s),
            "leaseTransitions": self._leadership.next_transitions(),
            "renewTime": now,
        }
        metadata = {
            "name": self._name,
            "namespace": self._namespace,
            "labels": {
                "app.kubernetes.io/name": "pdcluster-operator",
                SCOPE_LABEL: self._scope,
            },
        }
        if self._document:
            metadata["resourceVersion"] = self._document["metadata"]["resourceVersion"]
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": metadata,
            "spec": spec,
        }


def _record(document: Manifest) -> Record:
    spec = document.get("spec") or {}
    return Record(
        str(spec.get("holderIdentity") or ""),
        float(spec.get("leaseDurationSeconds") or 0),
        int(spec.get("leaseTransitions") or 0),
        str(document["metadata"].get("resourceVersion", "")),
    )


def _micro_time() -> str:
    """Kubernetes' MicroTime, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
