"""Rollouts where room is scarce: GPU budgets, nodes that are full, pools that take each
other's place; what blocks is said. And what nobody wants any more goes.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pd_operator import rollout
from pd_operator.api import Role
from pd_operator.desired import Desired
from pd_operator.observed import Ref, observe
from pd_operator.podparts import Settings
from pd_operator.reconcile import describe
from tests.pd_operator.objects import cluster, pod, pool_set, rendered, running
from tests.pd_operator.world import State, World

_GPU = {"resource": "nvidia.com/gpu"}
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def apart(prefill: int = 1, decode: int = 1, **changes: Any) -> Desired:
    fields = {
        "spec.prefill": {"replicas": prefill, "accelerator": _GPU},
        "spec.decode": {"replicas": decode, "accelerator": _GPU},
    }
    return rendered(cluster(**fields, **changes))


def together(replicas: int, **changes: Any) -> Desired:
    fields = {
        "spec.prefill": ...,
        "spec.decode": ...,
        "spec.colocated": {"replicas": replicas, "accelerator": _GPU},
    }
    return rendered(cluster(**fields, **changes))


def up(desired: Desired) -> World:
    world = World()
    world.settle(desired)
    assert world.is_settled_as(desired)
    return world


def texts(plan: rollout.Plan) -> list[str]:
    return [describe(operation) for operation in plan.operations]


def homeless(desired: Desired, role: Role, waited_s: float) -> dict[str, Any]:
    """A pod that no node takes."""
    made = pod(pool_set(desired, role), 0, ready=False)
    created = NOW - timedelta(seconds=waited_s)
    made["metadata"]["creationTimestamp"] = created.strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: none.",
    }
    made["status"]["conditions"].append(condition)
    made["status"].pop("containerStatuses")
    return made


def rolling(decode: int, waited_s: float, **changes: Any) -> tuple[Desired, list[Any]]:
    """A rollout of decode whose first new pod has found no node for so long."""
    old = apart(decode=decode, **changes)
    wanted = apart(decode=decode, **{"spec.model.maxModelLen": 100}, **changes)
    found = running(old)
    new = wanted.pool(Role.DECODE)
    assert new is not None
    first = {**new.stateful_set, "spec": {**new.stateful_set["spec"], "replicas": 1}}
    # Prefill has rolled already.
    prefill = old.pool(Role.PREFILL)
    assert prefill is not None
    found = [one for one in found if not one["metadata"]["name"].startswith(prefill.name)]
    found += [one for one in running(wanted) if one["metadata"]["name"].startswith("chat-p-")]
    return wanted, [*found, new.service, first, homeless(wanted, Role.DECODE, waited_s)]


def test_a_new_pod_without_a_node_is_waited_for() -> None:
    wanted, found = rolling(decode=2, waited_s=299)
    plan = rollout.plan(wanted, observe(found), NOW)
    assert (texts(plan), plan.blocked, plan.again_s) == ([], "", 1.0)


def test_then_an_old_one_makes_room() -> None:
    wanted, found = rolling(decode=2, waited_s=300)
    plan = rollout.plan(wanted, observe(found), NOW)
    old = pool_set(apart(decode=2), Role.DECODE)["metadata"]["name"]
    assert texts(plan) == [f"scale StatefulSet {old} to 1"]
    assert plan.blocked == ""


def test_the_last_old_one_is_kept_and_that_is_said() -> None:
    wanted, found = rolling(decode=1, waited_s=3600)
    plan = rollout.plan(wanted, observe(found), NOW)
    new = pool_set(wanted, Role.DECODE)["metadata"]["name"]
    assert texts(plan) == []
    assert plan.blocked == (
        f"decode can't roll: no node took {new}-0 within 5m (0/1 nodes are available: 1 "
        "Insufficient nvidia.com/gpu.), and no old worker can be spared; make room on a node"
    )


def test_how_long_is_the_users_choice() -> None:
    patient = {"spec.rollout.pendingTimeout": "2h"}
    wanted, found = rolling(decode=2, waited_s=3600, **patient)
    assert texts(rollout.plan(wanted, observe(found), NOW)) == []


def test_without_the_time_nothing_takes_too_long() -> None:
    wanted, found = rolling(decode=2, waited_s=3600)
    plan = rollout.plan(wanted, observe(found))
    assert (texts(plan), plan.again_s) == ([], None)


def test_a_pod_that_waits_outside_of_a_rollout_asks_for_nothing() -> None:
    wanted = apart()
    found = [one for one in running(wanted) if "chat-d-" not in one["metadata"]["name"]]
    decode = wanted.pool(Role.DECODE)
    assert decode is not None
    found += [decode.service, decode.stateful_set, homeless(wanted, Role.DECODE, 3600)]
    plan = rollout.plan(wanted, observe(found), NOW)
    assert (texts(plan), plan.again_s, plan.blocked) == ([], None, "")


@pytest.mark.parametrize(("budget", "most"), [(4, 4), (5, 5), (8, 6), (None, 6)])
def test_a_switch_stays_within_the_budget(budget: int | None, most: int) -> None:
    changes: dict[str, Any] = {"spec.rollout.maxUnavailable": 1}
    if budget:
        changes["spec.budget.gpus"] = budget
    world = up(apart(2, 2, **changes))
    wanted = together(2, **changes)
    highest = 0
    for _ in range(40):
        before = {role: world.serving(role) for role in Role}
        world.step(wanted)
        highest = max(highest, len(world.pods))
        served = world.serving(Role.COLOCATED) or min(
            world.serving(Role.PREFILL), world.serving(Role.DECODE)
        )
        assert served >= 1, before
        world.move()
    assert world.is_settled_as(wanted)
    assert highest == most


def test_a_switch_without_room_says_what_would_help() -> None:
    world = up(apart(**{"spec.budget.gpus": 2}))
    plan = world.step(together(1, **{"spec.budget.gpus": 2}))
    assert len(world.pods) == 2
    assert plan.leaving == {Role.PREFILL, Role.DECODE}
    assert plan.blocked == (
        "colocated can't start: there is no room beside decode and prefill, which serve until "
        "it does, within budget.gpus (2); raise it, or write maxUnavailable: 1"
    )
    changes = {"spec.budget.gpus": 2, "spec.rollout.maxUnavailable": 1}
    plan = world.step(together(1, **changes))
    assert len(world.pods) == 2  # the last of each role stays
    assert plan.blocked.endswith("within budget.gpus (2); raise it")


def test_a_switch_to_nothing() -> None:
    world = up(apart(2, 2))
    wanted = together(0)
    world.settle(wanted)
    assert world.is_settled_as(wanted)


def test_what_a_pool_had_goes_with_it() -> None:
    world = up(apart())
    wanted = together(1)
    plan = world.step(wanted)
    assert not [one for one in texts(plan) if one.startswith("delete")]
    world.settle(wanted)
    names = {ref for ref in world.objects if ref.kind in ("PDPool", "PodDisruptionBudget")}
    assert names == {
        Ref("PDPool", "chat-colocated"),
        Ref("PodDisruptionBudget", "chat-colocated"),
        Ref("PodDisruptionBudget", "chat-router"),
    }
    assert {ref.name for ref in world.objects if ref.kind == "Service"} == {
        "chat-router",
        "chat-control",
        wanted.pools[0].name,
    }


def test_a_service_whose_set_is_gone_goes() -> None:
    """An operator was killed between the two deletions."""
    old = apart()
    world = up(old)
    wanted = apart(**{"spec.model.maxModelLen": 100})
    world.settle(wanted)
    left = old.pools[0].service
    world.objects[Ref("Service", old.pools[0].name)] = left
    assert texts(world.step(wanted)) == [f"delete Service {old.pools[0].name}"]


def test_what_is_not_ours_stays() -> None:
    """Labels are copied, by Kubernetes and by people."""
    wanted = apart()
    world = up(wanted)
    labels = wanted.surroundings[0]["metadata"]["labels"]
    for kind in ("Service", "ConfigMap", "NetworkPolicy"):
        metadata = {"name": "theirs", "labels": dict(labels)}
        world.objects[Ref(kind, "theirs")] = {"kind": kind, "metadata": metadata}
    assert texts(world.step(wanted)) == []


def test_policies_that_are_no_longer_wanted_go() -> None:
    world = up(rendered(cluster()))
    wanted = rendered(cluster(), Settings(network_policies=False, monitors=False))
    assert texts(world.step(wanted)) == [
        "delete NetworkPolicy chat-router",
        "delete NetworkPolicy chat-workers",
        "delete PodMonitor chat",
        "delete PrometheusRule chat",
    ]


def test_a_scale_in_that_would_take_a_serving_pod_is_told() -> None:
    world = up(apart(decode=3))
    wanted = apart(decode=2)
    world.pods[pool_set(wanted, Role.DECODE)["metadata"]["name"], 0] = State.STARTING
    plan = world.step(wanted)
    assert not plan.operations
    assert plan.held.startswith("decode keeps 3 replicas instead of 2")
