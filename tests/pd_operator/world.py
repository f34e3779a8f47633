"""A cluster of one PDCluster in a few dicts: carries plans out, lets pods start, end and break."""

import copy
from dataclasses import dataclass, field
from enum import StrEnum

from pd_operator import rollout
from pd_operator.api import Role
from pd_operator.desired import Desired
from pd_operator.observed import Observed, Ref, observe
from pd_operator.podparts import Manifest
from pd_operator.podspec import REVISION_LABEL
from tests.pd_operator.objects import flags, pod


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    BROKEN = "broken"
    ENDING = "ending"


_CRASHED = {"reason": "CrashLoopBackOff"}


@dataclass
class World:
    """`broken` holds the revisions whose pods never get ready."""

    broken: set[str] = field(default_factory=set)
    objects: dict[Ref, Manifest] = field(default_factory=dict)
    pods: dict[tuple[str, int], State] = field(default_factory=dict)
    clock: int = 0

    def observed(self) -> Observed:
        found = list(self.objects.values())
        for (name, ordinal), state in self.pods.items():
            made = pod(
                self.owners[name],
                ordinal,
                ready=state is State.READY,
                terminating=state is State.ENDING,
                waiting=_CRASHED if state is State.BROKEN else None,
            )
            found.append(made)
        return observe(found)

    owners: dict[str, Manifest] = field(default_factory=dict)

    def step(self, desired: Desired) -> rollout.Plan:
        """Plans and carries the plan out."""
        plan = rollout.plan(desired, self.observed())
        for operation in plan.operations:
            self._perform(operation)
            self._control()
        return plan

    def _perform(self, operation: rollout.Operation) -> None:
        match operation:
            case rollout.Apply(manifest):
                self.clock += 1
                stored = copy.deepcopy(manifest)
                before = self.objects.get(operation.ref, {}).get("metadata", {})
                created = before.get("creationTimestamp", f"{self.clock:09}")
                stored["metadata"]["creationTimestamp"] = created
                self.objects[operation.ref] = stored
                if manifest["kind"] == "StatefulSet":
                    self.owners[manifest["metadata"]["name"]] = stored
            case rollout.Scale(ref, replicas):
                self.objects[ref]["spec"]["replicas"] = replicas
            case rollout.Delete(ref):
                del self.objects[ref]

    def _control(self) -> None:
        """What the StatefulSet controller does: missing pods start, surplus ones end."""
        wanted = set()
        for ref, item in self.objects.items():
            if ref.kind == "StatefulSet":
                wanted |= {(ref.name, n) for n in range(item["spec"]["replicas"])}
        for key in wanted - set(self.pods):
            self.pods[key] = State.STARTING
        for key in set(self.pods) - wanted:
            self.pods[key] = State.ENDING

    def revision(self, name: str) -> str:
        return str(self.owners[name]["metadata"]["labels"][REVISION_LABEL])

    def start(self, key: tuple[str, int]) -> None:
        """A starting pod gets ready, or breaks when its revision is broken."""
        if self.pods.get(key) is State.STARTING:
            bad = self.revision(key[0]) in self.broken
            self.pods[key] = State.BROKEN if bad else State.READY

    def end(self, key: tuple[str, int]) -> None:
        """A pod that was told to end has ended."""
        if self.pods.get(key) is State.ENDING:
            del self.pods[key]
            self._control()

    def move(self, keys: list[tuple[str, int]] | None = None) -> None:
        for key in list(self.pods) if keys is None else keys:
            self.end(key)
            self.start(key)

    def settle(self, desired: Desired, steps: int = 200) -> None:
        """Steps until a plan has nothing to do and nothing moves any more."""
        for _ in range(steps):
            before = dict(self.pods)
            plan = self.step(desired)
            self.move()
            if not plan.operations and before == self.pods:
                return
        raise AssertionError(f"doesn't settle: {self.pods}")

    def serving(self, role: Role) -> int:
        return sum(item.serving for item in self.observed().pool_sets(role))

    def pairs(self) -> set[str]:
        """The pair revisions of which both a prefill and a decode worker serve."""
        found: dict[Role, set[str]] = {Role.PREFILL: set(), Role.DECODE: set()}
        for item in self.observed().sets:
            if item.serving and item.role in found:
                found[item.role].add(flags(self.owners[item.name])["revision"])
        return found[Role.PREFILL] & found[Role.DECODE]

    def revisions(self, role: Role) -> list[str]:
        """The sets of a pool that have, or are to have, pods."""
        sets = self.observed().pool_sets(role)
        return [item.revision for item in sets if item.replicas or item.pods]

    def is_settled_as(self, desired: Desired) -> bool:
        """Exactly what is desired exists, all of it serving."""
        sets = {item.name: item for item in self.observed().sets}
        return set(sets) == {pool.name for pool in desired.pools} and all(
            sets[pool.name].replicas == pool.replicas == sets[pool.name].serving
            and len(sets[pool.name].pods) == pool.replicas
            for pool in desired.pools
        )
