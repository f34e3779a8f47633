"""Status: conditions with stable reasons in the user's terms, counts, columns, and that
nothing changes when nothing has changed.
"""

from datetime import UTC, datetime
from typing import Any

import pytest

from pd_core.sketch import WindowSketch
from pd_operator import api, notices, rollout, status
from pd_operator.api import Cluster, Role
from pd_operator.measured import Counters, RouterReading, Samples
from pd_operator.observed import observe
from pd_operator.podparts import Manifest, Settings
from tests.pd_operator.objects import (
    SETTINGS,
    cluster,
    document,
    pod,
    pool_set,
    rendered,
    routers,
    running,
)

NOW = "2026-01-01T00:00:00Z"
LATER = "2026-01-01T00:01:00Z"


def status_of(
    of: Cluster,
    objects: list[Manifest],
    *,
    samples: Samples | None = None,
    previous: dict[str, Any] | None = None,
    now: str = NOW,
    settings: Settings = SETTINGS,
    lost: tuple[str, ...] = (),
) -> dict[str, Any]:
    wanted, seen = rendered(of, settings), observe(objects)
    plan = rollout.plan(wanted, seen)
    return status.status_of(of, wanted, seen, plan, samples or Samples(), previous or {}, now, lost)


def condition(made: dict[str, Any], kind: str) -> tuple[str, str, str]:
    [found] = [one for one in made["conditions"] if one["type"] == kind]
    return found["status"], found["reason"], found["message"]


def at(milliseconds: float) -> dict[int, int]:
    """A sketch with one sample."""
    sketch = WindowSketch()
    sketch.add(milliseconds / 1000, 0.0)
    return sketch.counts(0.0)


def without(objects: list[Manifest], component: str) -> list[Manifest]:
    """The objects without the pods of a component."""
    return [
        item
        for item in objects
        if item["kind"] != "Pod" or item["metadata"]["labels"]["pdcluster.dev/role"] != component
    ]


def test_all_is_well() -> None:
    made = status_of(cluster(**{"metadata.generation": 3}), running(rendered(cluster())))
    assert made["observedGeneration"] == 3
    assert {one["type"]: one["status"] for one in made["conditions"]} == {
        "Ready": "True",
        "Available": "True",
        "Progressing": "False",
        "Degraded": "False",
        "PrefillReady": "True",
        "DecodeReady": "True",
        "RouterReady": "True",
        "ScalingActive": "False",
        "SLOMet": "Unknown",
    }
    assert made["prefill"]["readiness"] == "1/1"
    assert made["router"] == {"desired": 1, "ready": 1}
    assert "ttft" not in made
    assert all(one["observedGeneration"] == 3 for one in made["conditions"])


def test_nothing_changes_when_nothing_has_changed() -> None:
    objects = running(rendered(cluster()))
    first = status_of(cluster(), objects)
    assert status_of(cluster(), objects, previous=first, now=LATER) == first


def test_a_transition_has_its_time() -> None:
    objects = running(rendered(cluster()))
    first = status_of(cluster(), objects)
    second = status_of(cluster(), without(objects, "decode"), previous=first, now=LATER)
    times = {one["type"]: one["lastTransitionTime"] for one in second["conditions"]}
    assert times["DecodeReady"] == times["Ready"] == LATER
    assert times["PrefillReady"] == NOW


def test_nothing_there_yet() -> None:
    made = status_of(cluster(), [])
    assert condition(made, "Ready") == ("False", "Starting", "PrefillReady: 0 of 1 ready")
    assert condition(made, "Available") == ("False", "NoRouter", "no router is ready")
    assert condition(made, "Progressing")[:2] == ("True", "Applying")


def test_intended_zero_is_ready() -> None:
    none = cluster(**{"spec.prefill.replicas": 0, "spec.decode.replicas": 0})
    made = status_of(none, running(rendered(none)))
    assert condition(made, "Ready") == ("True", "ScaledToZero", "")
    assert condition(made, "Available")[:2] == ("False", "NoWorkers")


def test_without_decode_it_is_not_ready() -> None:
    """Without prefill, decode computes prompts itself; without decode nothing answers."""
    none = cluster(**{"spec.decode.replicas": 0})
    made = status_of(none, running(rendered(none)))
    assert condition(made, "Ready")[:2] == ("False", "NoWorkers")
    assert condition(made, "DecodeReady")[:2] == ("True", "ScaledToZero")
    none = cluster(**{"spec.prefill.replicas": 0})
    assert condition(status_of(none, running(rendered(none))), "Ready")[0] == "True"


def test_it_is_available_as_long_as_requests_are_answered() -> None:
    objects = running(rendered(cluster()))
    made = status_of(cluster(), without(objects, "prefill"))
    assert condition(made, "Available") == (
        "True",
        "Serving",
        "no prefill worker is ready: decode computes prompts itself",
    )
    assert condition(made, "Ready")[:2] == ("False", "Starting")
    made = status_of(cluster(), without(objects, "decode"))
    assert condition(made, "Available")[1:] == ("NoWorkers", "no decode worker is ready")


def test_a_colocated_pool_stands_in_both_columns() -> None:
    of = cluster(
        **{
            "spec.prefill": ...,
            "spec.decode": ...,
            "spec.colocated": {"replicas": 2},
            "spec.slo.tpot": {"target": "50ms"},
        }
    )
    samples = Samples(ttft=at(123.4), tpot=at(8.5))
    made = status_of(of, running(rendered(of)), samples=samples)
    assert made["summary"] == {"prefill": "2/2", "decode": "2/2"}
    assert made["colocated"]["observed"] == "TTFT 120ms, TPOT 8.4ms"
    assert condition(made, "ColocatedReady")[:2] == ("True", "AllReady")


def test_each_pool_shows_what_it_answers_for() -> None:
    samples = Samples(ttft=at(123.4))
    made = status_of(cluster(), running(rendered(cluster())), samples=samples)
    assert made["prefill"]["observed"] == "120ms"
    assert "observed" not in made["decode"]  # no data is no number


def test_what_only_moves_a_number_can_wait() -> None:
    of = cluster(**{"spec.slo.ttft": {"target": "1s"}})
    objects = running(rendered(of))
    first = status_of(of, objects, samples=Samples(ttft=at(100)))
    second = status_of(of, objects, samples=Samples(ttft=at(2000)), previous=first, now=LATER)
    assert first != second
    assert status.only_numbers_differ(first, second)
    third = status_of(of, without(objects, "decode"), previous=second, now=LATER)
    assert not status.only_numbers_differ(second, third)


def test_pools_on_their_way_out_are_progress() -> None:
    together = cluster(**{"spec.prefill": ..., "spec.decode": ..., "spec.colocated": {}})
    made = status_of(together, running(rendered(cluster())))
    assert condition(made, "Progressing") == (
        "True",
        "RollingOut",
        "decode and prefill on the way out",
    )
    assert condition(made, "Ready")[0] == "False"


def test_a_rollout_that_is_blocked_says_so() -> None:
    gpu = {"resource": "nvidia.com/gpu"}
    fields: dict[str, Any] = {
        "spec.budget.gpus": 2,
        "spec.prefill": {"accelerator": gpu},
        "spec.decode": {"accelerator": gpu},
    }
    changed = {**fields, "spec.model.dtype": "float32"}
    made = status_of(cluster(**changed), running(rendered(cluster(**fields))))
    assert condition(made, "Progressing")[:2] == ("False", "RolloutBlocked")
    assert condition(made, "Available")[0] == "True"


@pytest.mark.parametrize("terminating", [False, True])
def test_routers_of_two_versions_are_a_rollout(terminating: bool) -> None:
    """As long as the old one isn't on its way out: then the new one has taken its place. As many
    as there are to be serve all the time, so it stays ready."""
    wanted = rendered(cluster())
    objects = running(wanted)
    for number, (version, gone) in enumerate((("old", terminating), ("new", False))):
        one = pod(routers(wanted), 7 + number, terminating=gone)
        one["metadata"]["labels"] = one["metadata"]["labels"] | {"pod-template-hash": version}
        objects = without(objects, "router") if not number else objects
        objects.append(one)
    made = status_of(cluster(), objects)
    expected = ("False", "UpToDate") if terminating else ("True", "RollingOut")
    assert condition(made, "Progressing")[:2] == expected
    assert condition(made, "Ready")[:2] == ("True", "AllReady")
    before = status_of(cluster(), running(wanted))
    told = [(one.reason, one.text, one.warning) for one in notices.of_change(before, made)]
    rolls = ("RollingOut", "Progressing: router on the way to a new revision", False)
    assert told == ([] if terminating else [rolls])


def test_an_evicted_router_that_has_been_replaced_is_no_problem() -> None:
    objects = running(rendered(cluster()))
    [router] = [
        one
        for one in objects
        if one["kind"] == "Pod" and one["metadata"]["labels"]["pdcluster.dev/role"] == "router"
    ]
    evicted = {
        **router,
        "metadata": {**router["metadata"], "name": "chat-router-evicted"},
        "status": {"phase": "Failed", "reason": "Evicted"},
    }
    made = status_of(cluster(), [*objects, evicted])
    assert made["router"] == {"desired": 1, "ready": 1}
    assert condition(made, "Ready")[0] == "True"


def test_messages_are_bounded() -> None:
    wanted = rendered(cluster())
    objects = without(running(wanted), "decode")
    endless = {"reason": "ImagePullBackOff", "message": "x" * 5000}
    objects.append(pod(pool_set(wanted, Role.DECODE), 0, ready=False, waiting=endless))
    made = status_of(cluster(), objects)
    assert max(len(one["message"]) for one in made["conditions"]) == status.MAX_MESSAGE


TROUBLES: dict[str, tuple[dict[str, Any], str, str]] = {
    "image": (
        {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
        "ImagePullBackOff",
        "image engine:1: not found",
    ),
    "image, as kubelet says it while it waits": (
        {
            "waiting": {
                "reason": "ImagePullBackOff",
                "message": 'Back-off pulling image "engine:1": ErrImagePull: not found',
            }
        },
        "ImagePullBackOff",
        "image engine:1: not found",
    ),
    "image, without a word from the registry": (
        {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "a"'}},
        "ImagePullBackOff",
        "image engine:1: can't be pulled",
    ),
    "crash": (
        {
            "waiting": {"reason": "CrashLoopBackOff"},
            "terminated": {"exitCode": 1, "message": "loading\nKeyError: 'rope'\n"},
        },
        "CrashLoopBackOff",
        "engine ended with exit code 1: KeyError: 'rope'",
    ),
    "running again": (
        {"terminated": {"exitCode": 1, "message": "ModelError: config.json is missing"}},
        "ContainerRestarting",
        "engine ended with exit code 1: ModelError: config.json is missing",
    ),
    "config": (
        {"waiting": {"reason": "CreateContainerConfigError", "message": "no secret hub"}},
        "CreateContainerConfigError",
        "engine: no secret hub",
    ),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_what_keeps_a_pod_from_being_ready(name: str) -> None:
    fields, reason, message = TROUBLES[name]
    wanted = rendered(cluster())
    objects = without(running(wanted), "decode")
    objects.append(pod(pool_set(wanted, Role.DECODE), 0, ready=False, **fields))
    made = status_of(cluster(), objects)
    where = f"{pool_set(wanted, Role.DECODE)['metadata']['name']}-0"
    assert condition(made, "Degraded") == ("True", reason, f"{where}: {message}")
    assert condition(made, "DecodeReady") == (
        "False",
        reason,
        f"0 of 1 ready; {where}: {message}",
    )
    assert condition(made, "Ready")[1] == reason


def test_a_pod_that_is_ready_again_has_no_problem() -> None:
    wanted = rendered(cluster())
    objects = without(running(wanted), "decode")
    objects.append(pod(pool_set(wanted, Role.DECODE), 0, terminated={"exitCode": 137}))
    made = status_of(cluster(), objects)
    assert condition(made, "Degraded")[0] == "False"
    assert condition(made, "Ready")[0] == "True"


def test_a_pod_that_no_node_can_take() -> None:
    wanted = rendered(cluster())
    waiting = pod(pool_set(wanted, Role.DECODE), 0, ready=False)
    waiting["status"]["conditions"].append(
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "Insufficient nvidia.com/gpu",
        }
    )
    made = status_of(cluster(), [*without(running(wanted), "decode"), waiting])
    assert condition(made, "DecodeReady")[1] == "Unschedulable"
    assert "Insufficient nvidia.com/gpu" in condition(made, "DecodeReady")[2]


def test_a_rollout_is_progress() -> None:
    changed = cluster(**{"spec.decode.engine.maxRunning": 8})
    made = status_of(changed, running(rendered(cluster())))
    assert condition(made, "Progressing")[:2] == ("True", "RollingOut")
    assert condition(made, "Ready")[:2] == ("False", "RollingOut")
    assert condition(made, "Available")[0] == "True"


def test_a_pod_that_nobody_makes() -> None:
    """Such as after somebody took its labels: its name is taken, and it isn't the pool's."""
    wanted = rendered(cluster())
    objects = running(wanted)
    name = pool_set(wanted, Role.DECODE)["metadata"]["name"]
    orphan = pod(pool_set(wanted, Role.DECODE), 0)
    orphan["metadata"]["labels"] = {}
    objects = [*without(objects, "decode"), orphan]
    assert observe(objects).missing == (f"{name}-0",)
    first = status_of(cluster(), objects)
    assert condition(first, "DecodeReady") == ("False", "Starting", "0 of 1 ready")
    then = status_of(cluster(), objects, previous=first, lost=(f"{name}-0",))
    text = f"0 of 1 ready; there is no pod {name}-0; kubectl describe statefulset {name} says why"
    assert condition(then, "DecodeReady") == ("False", "PodMissing", text)
    assert condition(then, "Degraded") == ("True", "PodMissing", f"DecodeReady: {text}")
    assert condition(then, "Ready")[1] == "PodMissing"
    told = notices.of_change(first, then)
    assert [(one.reason, one.warning) for one in told] == [("PodMissing", True)] * 2


def test_routers_that_let_nobody_in() -> None:
    """They alone read the Secret: the operator has no right to it."""

    of = cluster(**{"spec.security.apiKeys": {"secret": "chat-keys"}})
    kubernetes = Settings(host_paths=False)
    objects = running(rendered(of, kubernetes))

    def told(clients: float | None, previous: dict[str, Any] | None = None) -> dict[str, Any]:
        router = RouterReading("r", 0.0, 1.0, Counters(), clients=clients)
        samples = Samples(silent=1) if previous else Samples(routers=(router,))
        return status_of(of, objects, samples=samples, previous=previous, settings=kubernetes)

    made = told(0)
    text = (
        "all requests get 401: Secret chat-keys of this namespace is missing or has no key; write"
        " an entry for each client: kubectl create secret generic chat-keys -n default"
        " --from-literal=CLIENT=KEY"
    )
    assert condition(made, "Ready") == condition(made, "Available") == ("False", "NoAPIKeys", text)
    [event] = notices.of_change(told(1), made)
    assert (event.reason, event.warning) == ("NoAPIKeys", True)
    assert condition(told(0, previous=made), "Ready")[1] == "NoAPIKeys"  # none answers
    for clients in (1, None):
        assert condition(told(clients), "Ready")[0] == "True"


def test_draining_pods_do_not_count() -> None:
    wanted = rendered(cluster())
    objects = without(running(wanted), "decode")
    objects.append(pod(pool_set(wanted, Role.DECODE), 0, terminating=True))
    made = status_of(cluster(), objects)
    assert made["decode"]["ready"] == 0
    assert made["decode"]["draining"] == 1
    counts = status.pool_counts(wanted, observe(objects))[Role.DECODE]
    assert counts == {"desired": 1, "ready": 0, "draining": 1, "outdated": 0}


def test_workers_of_an_older_revision_are_counted_until_they_are_gone() -> None:
    old, new = rendered(cluster()), rendered(cluster(**{"spec.decode.engine": {"chunkTokens": 64}}))
    objects = [*running(old), new.pools[1].stateful_set, pod(pool_set(new, Role.DECODE), 0)]
    counts = status.pool_counts(new, observe(objects))
    assert counts[Role.DECODE] == {"desired": 1, "ready": 2, "draining": 0, "outdated": 1}
    assert status.pool_counts(new, observe(running(new)))[Role.DECODE]["outdated"] == 0


@pytest.mark.parametrize(
    ("ttft_ms", "expected"),
    [
        (None, ("Unknown", "NoData", "")),
        (100, ("True", "WithinTarget", "")),
        (900, ("False", "TargetMissed", "p99 TTFT is 900ms, target 500ms")),
    ],
)
def test_targets(ttft_ms: float | None, expected: tuple[str, str, str]) -> None:
    of = cluster(**{"spec.slo.ttft": {"target": "500ms"}})
    samples = Samples(ttft=at(ttft_ms)) if ttft_ms else Samples()
    made = status_of(of, running(rendered(of)), samples=samples)
    assert condition(made, "SLOMet") == expected


def test_an_object_that_cannot_be_read_keeps_its_numbers() -> None:
    before = status_of(cluster(), running(rendered(cluster())))
    with pytest.raises(api.InvalidCluster) as caught:
        cluster(**{"spec.decode.replicas": -1})
    made = status.invalid_status(caught.value, 7, before, LATER)
    assert made["observedGeneration"] == 7
    assert condition(made, "Ready")[1] == "InvalidSpec"
    assert "spec.decode.replicas: is -1" in condition(made, "Ready")[2]
    assert condition(made, "PrefillReady")[0] == "True"
    assert made["decode"] == before["decode"]


def test_columns() -> None:
    created = {"metadata.creationTimestamp": "2026-01-01T00:00:00Z"}
    body = document(**created)
    samples = Samples(ttft=at(123.4), tpot=at(8.5))
    body["status"] = status_of(cluster(), running(rendered(cluster())), samples=samples)
    now = datetime(2026, 1, 1, 3, 0, tzinfo=UTC)
    assert status.columns(body, now) == {
        "NAME": "chat",
        "READY": "True",
        "PREFILL": "1/1",
        "DECODE": "1/1",
        "TTFT": "120ms",
        "TPOT": "8.4ms",
        "MODEL": "smollm2",
        "AGE": "3h",
    }


def test_columns_before_the_first_status() -> None:
    row = status.columns(document(), datetime(2026, 1, 1, tzinfo=UTC))
    assert (row["READY"], row["PREFILL"], row["TTFT"], row["AGE"]) == ("Unknown", "-", "-", "-")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0.4ms"), (0.0123, "12ms"), (0.999, "1000ms"), (1.234, "1200ms"), (12.3, "12s")],
)
def test_latencies_have_two_digits(seconds: float, text: str) -> None:
    assert status.format_latency(seconds) == text
