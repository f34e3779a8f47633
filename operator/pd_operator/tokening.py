"""PURE. What a look at a PDCluster has to do about its token (`peertokens`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from pd_operator import peertokens, rollout
from pd_operator.api import Cluster
from pd_operator.desired import Desired
from pd_operator.keys import Key
from pd_operator.observed import Observed, PodView
from pd_operator.peertokens import TokenTerms
from pd_operator.podparts import Manifest, Settings

PROVIDED_AGAIN = timedelta(seconds=60)
"""While pods wait for something, which may be a Secret that was deleted."""


@dataclass(frozen=True, slots=True)
class Tokened:
    """`secret`: what it is to be, where it can be read. `provide`: it may not be there, and
    can't be seen. `due`: when that may change by time alone."""

    secret: Manifest | None = field(default=None, repr=False)
    provide: rollout.Provide | None = field(default=None, repr=False)
    due: datetime | None = None

    def due_s(self, now: datetime) -> float:
        return float("inf") if self.due is None else (self.due - now).total_seconds()


class Tokener:
    """What is remembered only spares asking the API server the same again."""

    def __init__(
        self, settings: Settings, terms: TokenTerms, make_token: Callable[[], bytes]
    ) -> None:
        self._settings = settings
        self._terms = terms
        self._make_token = make_token
        self._provided: dict[Key, datetime] = {}

    def provided(self, key: Key, now: datetime) -> None:
        """It is there now, or was before."""
        self._provided[key] = now

    def forget(self, key: Key) -> None:
        self._provided.pop(key, None)

    def wants(self, wanted: Desired) -> bool:
        """Whether routers are to have it: where all workers have. What a pool was rendered to
        before its operator was another one may say otherwise than the settings."""
        return peertokens.all_have_token(pool.stateful_set for pool in wanted.pools)

    def look(
        self, key: Key, cluster: Cluster, wanted: Desired, seen: Observed, now: datetime
    ) -> Tokened:
        sets = [pool.stateful_set for pool in wanted.pools]
        if not any(peertokens.has_token(one["spec"]["template"]) for one in sets):
            return Tokened()
        if self._settings.certificates:
            token = peertokens.keep(cluster, seen.objects, self._terms, now, self._make_token())
            return Tokened(secret=token.manifest, due=token.due)
        before = self._provided.get(key)
        if before is not None and (_all_ready(seen) or now - before < PROVIDED_AGAIN):
            return Tokened()
        if before is None and _any_ready(seen):
            self.provided(key, now)
            return Tokened()  # it has started, so the Secret is there
        kept = peertokens.plan(None, self._terms, now, self._make_token())
        return Tokened(provide=rollout.Provide(peertokens.secret(cluster, kept)))


def _all_ready(seen: Observed) -> bool:
    return all(pod.ready for pod in _pods(seen))


def _any_ready(seen: Observed) -> bool:
    return any(pod.ready for pod in _pods(seen))


def _pods(seen: Observed) -> list[PodView]:
    return [*seen.routers, *(pod for one in seen.sets for pod in one.pods)]
