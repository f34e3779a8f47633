"""Events of PDClusters: posted beside the work, best effort, bounded in number and memory."""

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime

from pd_operator import apierrors
from pd_operator.kube import Kube
from pd_operator.lease import NotHeld
from pd_operator.notices import Budget, Notice
from pd_operator.podparts import Manifest
from pd_operator.resources import EVENT

log = logging.getLogger("pd_operator.events")

MAX_WAITING = 1000
MAX_OBJECTS = 5000
MAX_REASONS = 50  # of one object
CONTROLLER = "pdcluster.dev/operator"


class Recorder:
    """`add` never waits; `run` posts."""

    def __init__(self, kube: Kube, instance: str) -> None:
        self._kube = kube
        self._instance = instance
        self._waiting: deque[Manifest] = deque(maxlen=MAX_WAITING)
        self._wake = asyncio.Event()
        self._budgets: dict[str, dict[str, Budget]] = {}  # by uid and reason

    def add(self, document: Manifest, notices: Iterable[Notice]) -> None:
        """Events about an object; what exceeds its budget is only logged. Each reason has
        its own: conditions that go to and fro take nothing from a warning."""
        uid, now_s = document["metadata"].get("uid", ""), time.monotonic()
        for notice in notices:
            budgets = self._budgets.setdefault(uid, {})
            known = notice.reason in budgets or len(budgets) < MAX_REASONS
            reason = notice.reason if known else ""  # all others share one
            if budgets.setdefault(reason, Budget(at_s=now_s)).take(now_s):
                self._waiting.append(self._event(document, notice))
                self._wake.set()
            else:
                log.info("event left out uid=%s reason=%s", uid, notice.reason)
        while len(self._budgets) > MAX_OBJECTS:
            del self._budgets[next(iter(self._budgets))]

    def forget(self, uid: str) -> None:
        """The object is gone."""
        self._budgets.pop(uid, None)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            event = self._waiting.popleft()
            try:
                await self._kube.create(EVENT, event)
            except apierrors.AlreadyExists:
                continue  # told before a restart
            except NotHeld:
                continue  # whoever acts now will tell
            except apierrors.ApiError as error:
                log.warning("event %s not posted: %s", event["reason"], error)
                await asyncio.sleep(min(5.0, error.retry_after_s))

    def _event(self, document: Manifest, notice: Notice) -> Manifest:
        metadata = document["metadata"]
        uid = metadata.get("uid", "")
        parts = (uid, notice.reason, notice.text, notice.since)
        mark = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {
                "name": f"{metadata['name']}.{mark}",
                "namespace": metadata.get("namespace", ""),
            },
            "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance[:128],
            "action": "Reconcile",
            "reason": notice.reason,
            "note": notice.text,
            "type": "Warning" if notice.warning else "Normal",
            "regarding": {
                "apiVersion": document["apiVersion"],
                "kind": document["kind"],
                "namespace": metadata.get("namespace", ""),
                "name": metadata["name"],
                "uid": uid,
            },
        }
