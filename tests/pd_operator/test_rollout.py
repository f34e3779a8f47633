"""Rollouts step by step: creation, replicas in place, a changed engine setting, both pools
in step, broken revisions, rollback, an edit in the middle, budgets, colocated and back.
"""

from typing import Any

import pytest

from pd_operator import rollout
from pd_operator.api import Role
from pd_operator.desired import Desired
from pd_operator.observed import Ref, observe
from pd_operator.reconcile import describe
from tests.pd_operator.objects import cluster, rendered, running
from tests.pd_operator.world import State, World

_GPU = {"resource": "nvidia.com/gpu"}


def wanted(prefill: int = 1, decode: int = 1, **changes: Any) -> Desired:
    fields = {"spec.prefill.replicas": prefill, "spec.decode.replicas": decode}
    return rendered(cluster(**fields, **changes))


def up(desired: Desired) -> World:
    world = World()
    world.settle(desired)
    assert world.is_settled_as(desired)
    return world


def texts(plan: rollout.Plan) -> list[str]:
    return [describe(operation) for operation in plan.operations]


def name(desired: Desired, role: Role) -> str:
    found = desired.pool(role)
    assert found is not None
    return found.name


def test_creation_in_order() -> None:
    desired = wanted()
    plan = World().step(desired)
    prefill, decode = name(desired, Role.PREFILL), name(desired, Role.DECODE)
    assert texts(plan) == [
        "apply ServiceAccount chat-router",
        "apply ServiceAccount chat-workers",
        "apply NetworkPolicy chat-router",
        "apply NetworkPolicy chat-workers",
        "apply Service chat-router",
        "apply Service chat-control",
        "apply Deployment chat-router",
        "apply PDPool chat-prefill",
        "apply PDPool chat-decode",
        "apply PodDisruptionBudget chat-router",
        "apply PodDisruptionBudget chat-prefill",
        "apply PodDisruptionBudget chat-decode",
        "apply PodMonitor chat",
        "apply PrometheusRule chat",
        f"apply Service {prefill}",
        f"apply StatefulSet {prefill}",
        f"apply Service {decode}",
        f"apply StatefulSet {decode}",
    ]


def test_what_exists_needs_nothing() -> None:
    desired = wanted(2, 3)
    assert rollout.plan(desired, observe(running(desired))) == rollout.Plan(())


def test_foreign_fields_are_left_and_ours_come_back() -> None:
    desired = wanted()
    world = up(desired)
    service = world.objects[Ref("Service", "chat-router")]
    service["metadata"]["labels"]["theirs"] = "1"
    service["spec"]["clusterIP"] = "10.1.2.3"
    assert not world.step(desired).operations

    for field, value in (("ports", []), ("type", "NodePort")):
        world.objects[Ref("Service", "chat-router")]["spec"][field] = value
        assert texts(world.step(desired)) == ["apply Service chat-router"]


def test_a_deleted_child_is_made_again() -> None:
    desired = wanted()
    world = up(desired)
    del world.objects[Ref("Service", name(desired, Role.DECODE))]
    assert texts(world.step(desired)) == [f"apply Service {name(desired, Role.DECODE)}"]


def test_a_field_that_we_no_longer_say_is_applied_away() -> None:
    before = wanted(**{"spec.router.template": {"metadata": {"annotations": {"a": "b"}}}})
    world = up(before)
    assert texts(world.step(wanted())) == ["apply Deployment chat-router"]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 0), (0, 2)])
def test_replicas_change_in_place(before: int, after: int) -> None:
    world = up(wanted(decode=before))
    desired = wanted(decode=after)
    plan = world.step(desired)
    assert texts(plan) == [f"scale StatefulSet {name(desired, Role.DECODE)} to {after}"]
    assert not plan.rolling
    world.settle(desired)
    assert world.is_settled_as(desired)


def test_no_serving_pod_goes_while_a_lower_one_does_not_serve() -> None:
    world = up(wanted(decode=3))
    desired = wanted(decode=2)
    decode = name(desired, Role.DECODE)
    world.pods[decode, 0] = State.STARTING
    assert not world.step(desired).operations  # 2 of 3 serve, and 2 are wanted

    world.start((decode, 0))
    assert texts(world.step(desired)) == [f"scale StatefulSet {decode} to 2"]


def test_a_changed_setting_rolls_its_pool_alone() -> None:
    old = wanted()
    world = up(old)
    desired = wanted(**{"spec.decode.engine.maxRunning": 8})
    before, after = name(old, Role.DECODE), name(desired, Role.DECODE)

    plan = world.step(desired)
    assert texts(plan) == [f"apply Service {after}", f"apply StatefulSet {after}"]
    assert plan.rolling == {Role.DECODE}
    assert not world.step(desired).operations  # the old one serves until the new one does

    world.move()
    assert texts(world.step(desired)) == [f"scale StatefulSet {before} to 0"]
    assert not world.step(desired).operations  # it drains
    world.move()
    assert texts(world.step(desired)) == [
        f"delete StatefulSet {before}",
        f"delete Service {before}",
    ]
    assert not world.step(desired).rolling
    assert world.is_settled_as(desired)


def test_surge_bounds_how_many_are_there_at_once() -> None:
    world = up(wanted(decode=4))
    desired = wanted(decode=4, **{"spec.decode.engine.maxRunning": 8, "spec.rollout.maxSurge": 2})
    most = 0
    for _ in range(40):
        world.step(desired)
        decode = [key for key in world.pods if key[0].startswith("chat-d-")]
        most = max(most, len(decode))
        assert world.serving(Role.DECODE) >= 4
        world.move()
    assert world.is_settled_as(desired)
    assert most == 6


def test_without_surge_one_goes_before_one_comes() -> None:
    world = up(wanted(decode=2))
    rules = {"spec.rollout": {"maxSurge": 0, "maxUnavailable": 1}}
    desired = wanted(decode=2, **{"spec.decode.engine.maxRunning": 8}, **rules)
    for _ in range(20):
        world.step(desired)
        assert len([key for key in world.pods if key[0].startswith("chat-d-")]) <= 2
        assert world.serving(Role.DECODE) >= 1
        world.move()
    assert world.is_settled_as(desired)


def test_both_pools_roll_in_step() -> None:
    world = up(wanted(2, 4))
    desired = wanted(2, 4, **{"spec.model.dtype": "float32"})
    for _ in range(60):
        world.step(desired)
        assert world.pairs()
        world.move()
    assert world.is_settled_as(desired)


def test_one_pools_slow_start_holds_the_other_ones_old_workers() -> None:
    old = wanted()
    world = up(old)
    desired = wanted(**{"spec.model.dtype": "float32"})
    world.step(desired)
    world.start((name(desired, Role.PREFILL), 0))  # decode's new worker still loads
    assert not world.step(desired).operations
    assert world.serving(Role.PREFILL) == 2


def test_a_broken_revision_never_takes_the_old_one_down() -> None:
    old = wanted(decode=2)
    world = up(old)
    desired = wanted(decode=2, **{"spec.decode.engine.maxRunning": 8})
    found = desired.pool(Role.DECODE)
    assert found is not None
    world.broken.add(found.revision)
    world.settle(desired)
    assert world.serving(Role.DECODE) == 2
    assert len(world.revisions(Role.DECODE)) == 2

    fixed = wanted(decode=2, **{"spec.decode.engine.maxRunning": 9})
    world.settle(fixed)
    assert world.is_settled_as(fixed)


def test_an_edit_back_is_a_rollback() -> None:
    old = wanted(decode=3)
    world = up(old)
    desired = wanted(decode=3, **{"spec.decode.engine.maxRunning": 8})
    for _ in range(2):
        world.step(desired)
        world.move()
    world.settle(old)
    assert world.is_settled_as(old)


def test_fifty_edits_end_in_the_last_one() -> None:
    world = up(wanted(decode=2))
    for count in range(50):
        desired = wanted(decode=2, **{"spec.decode.engine.maxRunning": 100 + count})
        world.step(desired)
        assert world.serving(Role.DECODE) >= 2
        assert len(world.revisions(Role.DECODE)) <= 3  # one of them without replicas, ending
        if count % 7 == 0:
            world.move()
    world.settle(desired)
    assert world.is_settled_as(desired)


def test_broken_pods_of_the_old_revision_do_not_block_the_fix() -> None:
    old = wanted(decode=3)
    world = up(old)
    decode = name(old, Role.DECODE)
    world.pods[decode, 0] = State.BROKEN
    world.pods[decode, 1] = State.BROKEN
    desired = wanted(decode=3, **{"spec.decode.engine.maxRunning": 8})
    for _ in range(30):
        world.step(desired)
        assert world.serving(Role.DECODE) >= 1
        world.move()
    assert world.is_settled_as(desired)


def test_fewer_replicas_in_the_middle_of_a_rollout() -> None:
    """The new revision's only serving pod is its top one: it must not go as the surplus."""
    old = wanted(prefill=1)
    world = up(old)
    world.step(wanted(prefill=2, **{"spec.prefill.engine.chunkTokens": 64}))
    desired = wanted(prefill=1, **{"spec.prefill.engine.chunkTokens": 64})
    world.start((name(desired, Role.PREFILL), 1))
    world.step(desired)
    assert world.serving(Role.PREFILL) >= 1
    world.settle(desired)
    assert world.is_settled_as(desired)


def gpus(budget: int, unavailable: int = 0, **changes: Any) -> Desired:
    return wanted(
        **{
            "spec.budget.gpus": budget,
            "spec.prefill.accelerator": _GPU,
            "spec.decode.accelerator": _GPU,
            "spec.rollout.maxUnavailable": unavailable,
        },
        **changes,
    )


def test_a_budget_without_room_blocks_and_says_so() -> None:
    world = up(gpus(2))
    plan = world.step(gpus(2, **{"spec.decode.engine.maxRunning": 8}))
    assert len(world.pods) == 2
    assert plan.blocked == (
        "decode can't roll: there is no room for a worker of the new revision within "
        "budget.gpus (2); raise it"
    )


def test_pools_share_the_room_of_the_budget() -> None:
    world = up(gpus(3))
    desired = gpus(3, **{"spec.model.dtype": "float32"})
    for _ in range(20):
        world.step(desired)
        assert len(world.pods) <= 3
        world.move()
    assert world.serving(Role.PREFILL) >= 1
    assert world.serving(Role.DECODE) >= 1


def test_from_pools_to_colocated_and_back() -> None:
    apart = wanted()
    together = rendered(
        cluster(**{"spec.prefill": ..., "spec.decode": ..., "spec.colocated": {"replicas": 1}})
    )
    world = up(apart)
    world.step(together)
    assert world.serving(Role.PREFILL) == world.serving(Role.DECODE) == 1
    world.settle(together)
    assert world.is_settled_as(together)
    world.settle(apart)
    assert world.is_settled_as(apart)
