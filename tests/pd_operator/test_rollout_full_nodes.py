"""Rollouts on nodes that are full: pods of a surge find none, time passes, and each edit still
ends in what it asks for, with a usable pair all the way and no pod beyond the budget.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator import rollout
from pd_operator.api import Role
from pd_operator.desired import Desired
from pd_operator.observed import Observed, observe
from tests.pd_operator.objects import cluster, pod, rendered
from tests.pd_operator.world import State, World

_GPU = {"resource": "nvidia.com/gpu"}
_STEP = timedelta(seconds=60)
_TIMEOUT_S = 300
_UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "Insufficient nvidia.com/gpu",
}


@dataclass
class FullNodes(World):
    """A world with so many devices; whoever comes later waits for one."""

    devices: int = 0
    now: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    born: dict[tuple[str, int], datetime] = field(default_factory=dict)
    homed: set[tuple[str, int]] = field(default_factory=set)

    def schedule(self) -> None:
        self.homed &= set(self.pods)
        self.born = {key: self.born.get(key, self.now) for key in self.pods}
        for key in sorted(self.pods, key=lambda key: (self.born[key], key)):
            if self.pods[key] is not State.ENDING and len(self.homed) < self.devices:
                self.homed.add(key)

    def observed(self) -> Observed:
        found = list(self.objects.values())
        for (name, ordinal), state in self.pods.items():
            made = pod(
                self.owners[name],
                ordinal,
                ready=state is State.READY,
                terminating=state is State.ENDING,
            )
            key = (name, ordinal)
            born = self.born.get(key, self.now)
            made["metadata"]["creationTimestamp"] = born.strftime("%Y-%m-%dT%H:%M:%SZ")
            if key not in self.homed:
                made["status"]["conditions"].append(_UNSCHEDULABLE)
            found.append(made)
        return observe(found)

    def step(self, desired: Desired) -> rollout.Plan:
        self.schedule()
        plan = rollout.plan(desired, self.observed(), self.now)
        for operation in plan.operations:
            self._perform(operation)
            self._control()
        self.now += _STEP
        return plan

    def move(self, keys: list[tuple[str, int]] | None = None) -> None:
        """A pod without a device can end, but not start."""
        self.schedule()
        wanted = list(self.pods) if keys is None else keys
        super().move([key for key in wanted if key in self.homed or self._ends(key)])
        self.schedule()

    def _ends(self, key: tuple[str, int]) -> bool:
        return self.pods.get(key) is State.ENDING


def version(prefill: int, decode: int, mark: int, surge: int = 1) -> Desired:
    return rendered(
        cluster(
            **{
                "spec.prefill": {"replicas": prefill, "accelerator": _GPU},
                "spec.decode": {"replicas": decode, "accelerator": _GPU},
                "spec.model.maxModelLen": mark,
                "spec.rollout": {"maxSurge": surge, "pendingTimeout": f"{_TIMEOUT_S}s"},
            }
        )
    )


@pytest.mark.slow
@given(
    prefill=st.integers(2, 3),
    decode=st.integers(2, 4),
    spare=st.integers(0, 2),
    surge=st.integers(1, 3),
    data=st.data(),
)
def test_full_nodes_slow_a_rollout_but_do_not_stop_it(
    prefill: int, decode: int, spare: int, surge: int, data: st.DataObject
) -> None:
    world = FullNodes(devices=prefill + decode + spare)
    before, after = version(prefill, decode, 100), version(prefill, decode, 200, surge)
    for _ in range(3):
        world.step(before)
        world.move()
    assert world.is_settled_as(before)
    for _ in range(150):
        world.step(after)
        assert world.pairs()
        for role in (Role.PREFILL, Role.DECODE):
            assert len(world.revisions(role)) <= 2
        keys = sorted(world.pods)
        world.move(data.draw(st.lists(st.sampled_from(keys), unique=True)) if keys else [])
        if world.is_settled_as(after):
            return
        world.move()
    raise AssertionError(f"doesn't end: {world.pods}")


def test_a_pool_of_one_on_full_nodes_is_held() -> None:
    world = FullNodes(devices=2)
    before, after = version(1, 1, 100), version(1, 1, 200)
    for _ in range(3):
        world.step(before)
        world.move()
    for _ in range(20):
        plan = world.step(after)
        world.move()
        assert world.serving(Role.PREFILL) == world.serving(Role.DECODE) == 1
    assert "no node took" in plan.blocked
    world.devices = 3  # somebody makes room
    for _ in range(20):
        world.step(after)
        world.move()
        assert world.pairs()
    assert world.serving(Role.PREFILL) >= 1
