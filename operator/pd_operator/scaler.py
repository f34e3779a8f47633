"""What scaling remembers of each PDCluster between two looks: readings, and what was learned.

All of it is in memory: a restarted operator learns anew, and shrinks nothing before it has
looked for a whole window.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pd_operator.api import Cluster, Role
from pd_operator.measured import Samples
from pd_operator.replicas import Standing
from pd_operator.scaling import recording
from pd_operator.scaling.decide import State, decide
from pd_operator.scaling.rates import History, extend, observe
from pd_operator.scaling.spec import is_scaled, longest_window_s, spec_of
from pd_operator.scaling.types import Decision

Key = TypeVar("Key")


@dataclass(slots=True)
class _Memory:
    uid: str
    history: History = field(default_factory=History)
    state: State = field(default_factory=State)


class Scaler(Generic[Key]):
    """`look` for each reconcile; `forget` when the object is gone."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        record: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """`clock` is the one that dates the samples. `record` hears of each look at a pool
        that is scaled (`scaling.recording`)."""
        self._clock = clock
        self._record = record
        self._memories: dict[Key, _Memory] = {}

    def look(
        self, key: Key, cluster: Cluster, standings: Mapping[Role, Standing], samples: Samples
    ) -> dict[Role, Decision]:
        """A decision for each pool, after what routers have just told."""
        spec = spec_of(cluster, {role: one.replicas for role, one in standings.items()})
        if not is_scaled(cluster):  # nothing is to be remembered
            self.forget(key)
            return decide(spec, observe(History(), spec), State(), self._clock())[1]
        memory = self._memories.get(key)
        if memory is None or memory.uid != cluster.uid:
            memory = self._memories[key] = _Memory(cluster.uid)
        memory.history = extend(memory.history, samples, longest_window_s(spec))
        seen = observe(memory.history, spec)
        now = self._clock()
        memory.state, decisions = decide(spec, seen, memory.state, now)
        if self._record is not None:
            name = f"{cluster.namespace}/{cluster.name}/{cluster.uid}"
            self._record(recording.to_json(recording.Look(name, now, spec, samples), decisions))
        return decisions

    def forget(self, key: Key) -> None:
        self._memories.pop(key, None)
