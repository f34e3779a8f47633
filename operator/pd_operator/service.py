"""The operator put together: one lease, the informer, the queue, reconciles, events, metrics.

It knows nothing of kopf: `handlers` starts and stops it. Tests run it as it is.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pd_operator import apierrors, kept, rollout, store, tlsplan
from pd_operator.api import Role
from pd_operator.certificates import Certifier
from pd_operator.events import Recorder
from pd_operator.informer import Informer
from pd_operator.journal import Journal
from pd_operator.keys import Key
from pd_operator.kube import Kube, Request, Transport
from pd_operator.kubebackend import KubeBackend
from pd_operator.leadership import Terms
from pd_operator.lease import CLUSTER_WIDE, NAMESPACED, Lease, LeaseLost, NotHeld
from pd_operator.metrics import Metrics
from pd_operator.notices import Notice
from pd_operator.peertokens import TokenTerms
from pd_operator.podparts import Manifest, Settings
from pd_operator.queue import Again, Queue
from pd_operator.reconcile import RESYNC_S, Listener, Pace, Reconciler
from pd_operator.resources import PDCLUSTER, SECRET, WATCHED, Resource
from pd_operator.scaler import Scaler
from pd_operator.scaling.types import Decision
from pd_operator.scraper import Scraper
from pd_operator.teller import Teller
from pd_operator.territory import HANDOVER_S, Territory

log = logging.getLogger("pd_operator.service")

RUNNERS = 8
"""Reconciles at once: they wait for the API server most of the time."""
GATHER_S = 0.1
"""Changes of children come in bursts; the object's own are acted on at once."""
CONFLICT_S = 0.2
RECORDING_BYTES = 256 << 20
JITTER = (0.8, 1.2)


@dataclass(frozen=True, slots=True)
class Options:
    """How one operator runs. No namespace: all of them."""

    identity: str
    namespace: str = ""
    lease_namespace: str = "default"
    lease_name: str = "pdcluster-operator"
    terms: Terms = field(default_factory=Terms)
    resync_s: float = RESYNC_S
    runners: int = RUNNERS
    settings: Settings = field(default_factory=Settings)
    pace: Pace = field(default_factory=Pace)
    handover_s: float = HANDOVER_S
    certificate_terms: tlsplan.Terms = field(default_factory=tlsplan.Terms)
    token_terms: TokenTerms = field(default_factory=TokenTerms)
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    record_scaling: str = ""  # a file, for `pdcluster explain --replay`


def _scaler(options: Options) -> Scaler[Key]:
    """One that keeps what it decides from, where that was asked for."""
    if not options.record_scaling:
        return Scaler()
    journal = Journal(Path(options.record_scaling), RECORDING_BYTES)
    return Scaler(record=lambda look: journal.add(json.dumps(look)))


class Operator(Listener):
    """`lead`, then `run`, then `close`."""

    def __init__(self, transport: Transport, options: Options, metrics: Metrics) -> None:
        self._options = options
        self._metrics = metrics
        self._transport = transport
        # What isn't about PDClusters goes by no guard: the lease itself, and reads for it.
        own = Kube(transport, observer=metrics.called)
        self._kube = Kube(transport, guard=self._guard, observer=metrics.called)
        namespaced = bool(options.namespace)
        self.lease = Lease(
            own,
            options.lease_namespace,
            options.lease_name,
            options.identity,
            scope=NAMESPACED if namespaced else CLUSTER_WIDE,
            terms=options.terms,
        )
        self._territory = None if namespaced else Territory(own, self._territory_changed)
        secrets = options.settings.certificates
        self._informer = Informer(
            self._kube,
            options.namespace,
            self._touched,
            metrics.watch_restarted,
            resources=[one for one in WATCHED if secrets or one is not SECRET],
        )
        self._scraper = Scraper()
        self._teller = Teller()
        self._recorder = Recorder(self._kube, options.identity)
        self._certifier = Certifier(options.certificate_terms)
        self._reconciler = Reconciler(
            KubeBackend(self._kube, self._informer),
            options.settings,
            listener=self,
            pace=options.pace,
            read_samples=self._scraper.read,
            scaler=_scaler(options),
            certifier=self._certifier,
            token_terms=options.token_terms,
            teller=self._teller,
            clock=options.clock,
        )
        self._queue = Queue(self._work)
        self._looked_at: dict[Key, float] = {}
        self._uids: dict[Key, str] = {}
        self._working = False
        self._show()

    # ---- life -------------------------------------------------------------------

    async def lead(self) -> None:
        """Until this operator is the one that acts."""
        await self.lease.acquire()
        if self._options.namespace and self.lease.created:
            await self._hand_over()

    async def _hand_over(self) -> None:
        """A cluster-wide operator may be at work here until it has seen our lease."""
        log.info("first time in this namespace: waiting %g s", self._options.handover_s)
        try:
            async with asyncio.timeout(self._options.handover_s):
                await self.lease.hold()
        except TimeoutError:
            return

    async def run(self) -> None:
        """Works until cancelled. Raises LeaseLost when somebody else may act."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.lease.hold(lambda: self._touched(PDCLUSTER, None)))
                if self._territory is not None:
                    await self._territory.refresh()
                    group.create_task(self._territory.run())
                group.create_task(self._informer.run())
                group.create_task(self._recorder.run())
                await self._informer.settled()
                log.info("listed objects=%d clusters=%d", len(self._informer), len(self.known()))
                self._working = True
                self._touched(PDCLUSTER, None)
                group.create_task(self._queue.run(self._options.runners))
        except ExceptionGroup as failed:
            # Not `except*`: what that raises is wrapped in a group by some versions of Python.
            lost = failed.subgroup(LeaseLost)
            if lost is None:
                raise
            raise lost.exceptions[0] from failed
        finally:
            self._working = False

    async def close(self) -> None:
        """Gives the lease back and closes every connection. `run` must have ended."""
        await self._scraper.close()
        await self._teller.close()
        await self.lease.release()
        await self._transport.close()

    # ---- triggers -----------------------------------------------------------------

    def heard(self, item: Manifest) -> None:
        """Somebody else than our informer tells of an object. What that knows is queued."""
        key = kept.owner_of(item)
        if key is None or not self._working:
            return
        held = self._informer.get(item["kind"], *store.name_of(item))
        if held is None or store.version_of(held) < store.version_of(item):
            self._queue.add_after(key, GATHER_S)

    def _touched(self, resource: Resource, keys: Iterable[Key] | None) -> None:
        if not self._working:
            return  # all keys are queued once everything has been listed
        for key in self.known() if keys is None else keys:
            if resource is PDCLUSTER:
                self._queue.add(key)
            else:
                self._queue.add_after(key, GATHER_S)

    def _territory_changed(self, namespaces: Iterable[str]) -> None:
        changed = set(namespaces)
        self._touched(PDCLUSTER, [key for key in self.known() if key.namespace in changed])

    def known(self) -> list[Key]:
        """The PDClusters that exist."""
        return self._informer.keys()

    # ---- work ---------------------------------------------------------------------

    async def _work(self, key: Key) -> float | None:
        began = time.monotonic()
        result = "error"
        after_s: float | None = 0.0
        try:
            after_s = await self._reconcile(key)
            result = "ok"
        except Again as error:
            result = str(error).partition(":")[0]
            raise
        finally:
            self._metrics.reconciled(result, time.monotonic() - began)
            self._looked(key, comes_back=after_s is not None)
        if after_s is None:
            return None
        return min(after_s, self._options.resync_s) * random.uniform(*JITTER)

    async def _reconcile(self, key: Key) -> float | None:
        if self._territory is not None and not self._territory.is_ours(key.namespace):
            return None
        try:
            return await self._reconciler.reconcile(key)
        except (apierrors.Conflict, apierrors.NotFound) as error:
            # The watch is about to tell what has changed.
            raise Again(f"conflict: {error}", CONFLICT_S * random.uniform(*JITTER)) from None
        except apierrors.Throttled as error:
            raise Again(f"throttled: {error}", max(1.0, error.retry_after_s)) from None
        except apierrors.ApiError as error:
            kind = type(error).__name__.lower()
            log.warning("cluster=%s/%s %s: %s", *key, kind, error)
            raise Again(f"{kind}: {error}") from None
        except NotHeld as error:
            raise Again(f"notheld: {error}") from None

    def _looked(self, key: Key, *, comes_back: bool) -> None:
        """What is remembered of a PDCluster ends with it, or with our part in it."""
        if comes_back:
            self._looked_at[key] = time.monotonic()
        else:
            self._looked_at.pop(key, None)
            self._metrics.forget(key)
        document = self._informer.get(PDCLUSTER.kind, *key)
        if document is not None:
            self._uids[key] = document["metadata"]["uid"]
        elif not comes_back:
            self._reconciler.forget(key)
            self._recorder.forget(self._uids.pop(key, ""))

    def _guard(self, request: Request) -> None:
        """Before every write to what we manage."""
        self.lease.check()
        if self._territory is not None:
            self._territory.check(request)

    # ---- what the reconciler tells -----------------------------------------------------

    def operation(self, key: Key, operation: rollout.Operation) -> None:
        self._metrics.operated(key, operation)

    def decided(self, key: Key, decisions: Mapping[Role, Decision]) -> None:
        self._metrics.decided(key, decisions)

    def pools(self, key: Key, counts: Mapping[Role, Mapping[str, int]]) -> None:
        self._metrics.pools(key, counts)

    def notices(self, document: Manifest, found: Sequence[Notice]) -> None:
        self._recorder.add(document, found)

    # ---- health -----------------------------------------------------------------------

    def unready(self) -> str:
        """Why it isn't ready; empty when it is. One that waits for the lease is."""
        if not self._working:
            if time.monotonic() - self.lease.heard_at > 2 * self._options.terms.duration_s:
                return "the API server doesn't answer"
            return "" if not self.lease.holds() else "objects are being listed"
        stale = self._informer.stale()
        if stale:
            return f"nothing heard for too long about {', '.join(stale)}"
        limit_s = 2 * self._options.resync_s + 60
        now = time.monotonic()
        late = sum(now - at > limit_s for at in self._looked_at.values())
        return f"{late} PDClusters haven't been looked at for {limit_s:g} s" if late else ""

    def _show(self) -> None:
        show = self._metrics.show
        show("queue_depth", "PDClusters that wait for a look.", self._queue.depth)
        show("lease_held", "Whether this operator is the one that acts.", self.lease.holds)
        show("clusters", "PDClusters that exist.", lambda: len(self.known()))
        show("objects", "Objects kept in memory.", lambda: len(self._informer))
        show("ready", "Whether /readyz says so.", lambda: not self.unready())
        show(
            "certificate_age_share",
            "The largest share of its life that a certificate of a PDCluster's own authority has"
            " behind it. 0: there is none.",
            lambda: self._certifier.age_share(self._options.clock()),
        )
