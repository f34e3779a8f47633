"""What was rendered stays: over another operator's images, templates and defaults, until the
user edits what makes pods differ, or asks for it; an edit back finds the old revision.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator import desired, pins, podspec, rollout
from pd_operator.api import Cluster, Role
from pd_operator.desired import Desired
from pd_operator.observed import observe
from pd_operator.podparts import Settings
from tests.pd_operator.objects import SETTINGS, cluster, pool_set, rendered, running
from tests.pd_operator.world import World

NEWER = Settings(version="0.2.0", engine_image="pdcluster-engine:0.2.0")
_GPU = {"resource": "nvidia.com/gpu"}


def kept(of: Cluster, there: Desired, settings: Settings = NEWER) -> Desired:
    """What another operator wants where this is there."""
    anew = desired.render(of, desired.fixed_replicas(of), settings)
    return pins.keep(anew, of, observe(running(there)))


def names(wanted: Desired) -> dict[Role, str]:
    return {pool.role: pool.name for pool in wanted.pools}


def test_another_operator_wants_the_same_pools() -> None:
    there = rendered(cluster())
    found = kept(cluster(), there)
    assert found.pools == there.pools
    assert rollout.plan(found, observe(running(there))).rolling == frozenset()


def test_the_same_operator_takes_no_record() -> None:
    there = rendered(cluster())
    assert kept(cluster(), there, SETTINGS).pools == there.pools


# Every field that makes no pod differ, and each that does with the pools that it changes.
EDITS: list[tuple[dict[str, Any], set[Role]]] = [
    ({"spec.decode.replicas": 7}, set()),
    ({"spec.router.replicas": 2}, set()),
    ({"spec.rollout.maxSurge": 2}, set()),
    ({"spec.rollout.pendingTimeout": "1m"}, set()),
    ({"spec.slo.ttft": {"target": "1s"}}, set()),
    ({"spec.budget.gpus": 9}, set()),
    ({"spec.decode": {"scaling": {"mode": "External", "maxReplicas": 3}}}, set()),
    ({"spec.decode.engine": {}}, set()),
    ({"spec.decode.engine.maxRunning": 64}, set()),  # the default, spelled out
    ({"spec.decode.engine.speculation": {"method": "none"}}, {Role.DECODE}),
    ({"spec.kvTransfer": {"transport": "auto"}}, set()),
    ({"spec.security": {"tls": {"mode": "Disabled"}}}, set()),
    ({"spec.security": {"tls": {"mode": "Auto"}}}, {Role.PREFILL, Role.DECODE}),
    ({"metadata.annotations": {"other": "1"}}, set()),
    ({"spec.decode.engine.maxRunning": 8}, {Role.DECODE}),
    ({"spec.decode.engine.blockTokens": 32}, {Role.DECODE}),
    ({"spec.decode.engine.dtype": "bfloat16"}, {Role.DECODE}),
    ({"spec.decode.startTimeout": "1h"}, {Role.DECODE}),
    ({"spec.decode.accelerator": _GPU}, {Role.DECODE}),
    ({"spec.decode.template.metadata.labels": {"a": "b"}}, {Role.DECODE}),
    ({"spec.model.dtype": "float32"}, {Role.PREFILL, Role.DECODE}),
    ({"spec.kvTransfer.colocate": {"topologyKey": "rack"}}, {Role.PREFILL, Role.DECODE}),
    ({"spec.rollout.drainTimeout": "5s"}, {Role.PREFILL, Role.DECODE}),
    ({"metadata.annotations": {"pdcluster.dev/upgrade": "1"}}, {Role.PREFILL, Role.DECODE}),
]


@pytest.mark.parametrize(("changes", "changed"), EDITS)
def test_what_is_rendered_anew(changes: dict[str, Any], changed: set[Role]) -> None:
    there = rendered(cluster())
    edited = cluster(**changes)
    found = kept(edited, there)
    anew = desired.render(edited, desired.fixed_replicas(edited), NEWER)
    for role in (Role.PREFILL, Role.DECODE):
        assert names(found)[role] == names(anew if role in changed else there)[role]


@given(st.sampled_from(EDITS), st.sampled_from(EDITS))
def test_an_edit_is_one_exactly_where_pods_differ(first: Any, second: Any) -> None:
    """For one operator, inputs and templates agree: nothing else gets into a template."""
    one, other = cluster(**first[0]), cluster(**second[0])
    for role in (Role.PREFILL, Role.DECODE):
        same = replace(pins.inputs_of(one, role), upgrade="") == replace(
            pins.inputs_of(other, role), upgrade=""
        )
        templates = [
            podspec.worker_template(pins.inputs_of(each, role), role, SETTINGS)
            for each in (one, other)
        ]
        assert same == (templates[0] == templates[1])


def test_an_edit_of_one_pool_leaves_the_other_pinned() -> None:
    there = rendered(cluster())
    found = kept(cluster(**{"spec.decode.engine.maxRunning": 8}), there)
    assert found.pool(Role.PREFILL) == there.pool(Role.PREFILL)
    [container] = pool_set(found, Role.DECODE)["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "pdcluster-engine:0.2.0"


def test_an_edit_back_finds_what_still_runs() -> None:
    """In the middle of a rollout by a newer operator, back to what an older one rendered."""
    world = World()
    old = rendered(cluster())
    world.settle(old)
    edited = cluster(**{"spec.decode.engine.maxRunning": 8})
    anew = desired.render(edited, desired.fixed_replicas(edited), NEWER)
    world.step(pins.keep(anew, edited, world.observed()))

    again = desired.render(cluster(), desired.fixed_replicas(cluster()), NEWER)
    back = pins.keep(again, cluster(), world.observed())

    assert names(back) == names(old)
    world.settle(back)
    assert world.is_settled_as(old)


def test_replicas_are_those_of_now() -> None:
    found = kept(cluster(**{"spec.decode.replicas": 5}), rendered(cluster()))
    assert pool_set(found, Role.DECODE)["spec"]["replicas"] == 5


@pytest.mark.parametrize("text", ["", "garbage", "eJw=", "e30=", "eJyrrgUAAXUA+Q=="])
def test_a_record_that_cannot_be_read_is_none(text: str) -> None:
    there = rendered(cluster())
    objects = running(there)
    for item in objects:
        if item["kind"] == "StatefulSet":
            item["metadata"]["annotations"][pins.RECORD_ANNOTATION] = text
    anew = desired.render(cluster(), desired.fixed_replicas(cluster()), NEWER)
    assert pins.keep(anew, cluster(), observe(objects)) == anew


def test_anothers_record_is_none() -> None:
    """A PDCluster of the same name that was deleted: its sets are not ours."""
    there = rendered(cluster(**{"metadata.uid": "old"}))
    mine = cluster(**{"metadata.uid": "new"})
    anew = desired.render(mine, desired.fixed_replicas(mine), NEWER)
    assert pins.keep(anew, mine, observe(running(there))) == anew


def test_a_record_is_small() -> None:
    made = pool_set(rendered(cluster()), Role.DECODE)
    assert len(made["metadata"]["annotations"][pins.RECORD_ANNOTATION]) < 4096
