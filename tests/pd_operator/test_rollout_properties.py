"""Rollouts under random edits, starts, ends and crashes: never without a serving pod or pair
that was there, at most two revisions, and always on to what is desired.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.api import Role
from pd_operator.desired import Desired
from tests.pd_operator.objects import cluster, rendered
from tests.pd_operator.world import State, World

ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True)
class Edit:
    """A version of the object: replicas, one setting a pool, one of both."""

    prefill: int
    decode: int
    chunk: int
    running: int
    dtype: str
    surge: int
    unavailable: int

    def desired(self) -> Desired:
        fields: dict[str, Any] = {
            "spec.prefill.replicas": self.prefill,
            "spec.decode.replicas": self.decode,
            "spec.prefill.engine.chunkTokens": self.chunk,
            "spec.decode.engine.maxRunning": self.running,
            "spec.model.dtype": self.dtype,
            "spec.rollout.maxSurge": self.surge,
            "spec.rollout.maxUnavailable": self.unavailable,
        }
        return rendered(cluster(**fields))


def edits(unavailable: st.SearchStrategy[int]) -> st.SearchStrategy[Edit]:
    return st.builds(
        Edit,
        prefill=st.integers(1, 3),
        decode=st.integers(1, 4),
        chunk=st.sampled_from([64, 128]),
        running=st.sampled_from([8, 16]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        surge=st.integers(1, 2),
        unavailable=unavailable,
    )


def advance(world: World, data: st.DataObject) -> None:
    """Some of the pods that could start or end do so."""
    keys = sorted(world.pods)
    if keys:
        world.move(data.draw(st.lists(st.sampled_from(keys), unique=True)))


@pytest.mark.slow
@given(edits(st.just(0)), edits(st.just(0)), st.data())
def test_one_edit_keeps_every_replica_serving(first: Edit, second: Edit, data: st.DataObject):
    world = World()
    world.settle(first.desired())
    desired = second.desired()
    floors = {
        role: min(world.serving(role), pool.replicas)
        for role in ROLES
        if (pool := desired.pool(role)) is not None
    }
    for _ in range(data.draw(st.integers(0, 25))):
        world.step(desired)
        for role in ROLES:
            assert world.serving(role) >= floors[role]
            assert len(world.revisions(role)) <= 2
        assert world.pairs()
        advance(world, data)
    world.settle(desired)
    assert world.is_settled_as(desired)


@pytest.mark.slow
@given(st.lists(edits(st.integers(0, 2)), min_size=2, max_size=5), st.data())
def test_any_edits_end_in_the_last_one(many: list[Edit], data: st.DataObject):
    world = World()
    world.settle(many[0].desired())
    for edit in many[1:]:
        desired = edit.desired()
        for _ in range(data.draw(st.integers(0, 8))):
            before = {role: world.serving(role) for role in ROLES}
            world.step(desired)
            for role in ROLES:
                assert world.serving(role) >= min(1, before[role])
            advance(world, data)
    world.settle(desired)
    assert world.is_settled_as(desired)


@pytest.mark.slow
@given(edits(st.just(0)), edits(st.just(0)), st.data())
def test_a_broken_revision_leaves_what_serves(first: Edit, second: Edit, data: st.DataObject):
    """And crashes of old pods meanwhile change nothing about that."""
    world = World()
    good, bad = first.desired(), second.desired()
    world.settle(good)
    old = {pool.role: pool for pool in good.pools}
    changed = [pool for pool in bad.pools if pool.revision != old[pool.role].revision]
    world.broken |= {pool.revision for pool in changed}
    for _ in range(data.draw(st.integers(1, 20))):
        crashed = data.draw(st.sampled_from(sorted(world.pods)))
        if world.pods[crashed] is State.READY and data.draw(st.booleans()):
            world.pods[crashed] = State.STARTING
        before = {role: world.serving(role) for role in ROLES}
        world.step(bad)
        for pool in changed:
            floor = min(before[pool.role], old[pool.role].replicas, pool.replicas)
            assert world.serving(pool.role) >= floor
        advance(world, data)
