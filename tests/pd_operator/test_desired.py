"""Manifests: names, labels, flags, probes, security; what makes another revision and what
doesn't; how each kind of model source gets into the pod.
"""

from dataclasses import replace
from typing import Any

import pytest

from pd_operator import podspec
from pd_operator.api import InvalidCluster, Role
from pd_operator.desired import check_supported
from pd_operator.podparts import Manifest, Settings
from tests.pd_operator.objects import SETTINGS, cluster, flags, pool_set, rendered, routers

_GPU = {"resource": "nvidia.com/gpu", "product": "NVIDIA-H100-80GB-HBM3"}


def template(made: Manifest) -> Manifest:
    found: Manifest = made["spec"]["template"]["spec"]
    return found


def revisions(**changes: Any) -> dict[Role, str]:
    return {pool.role: pool.revision for pool in rendered(cluster(**changes)).pools}


def test_names_fit_whatever_the_cluster_is_called() -> None:
    made = rendered(cluster(**{"metadata.name": "a" * 40}))
    for pool in made.pools:
        assert len(pool.name) <= 52
        assert pool.name == f"{'a' * 40}-{pool.role[0]}-{pool.revision}"
        assert pool.service["metadata"]["name"] == pool.name
        assert pool.stateful_set["spec"]["serviceName"] == pool.name


def test_kinds_and_names_of_the_surroundings() -> None:
    made = rendered(cluster())
    found = [(item["kind"], item["metadata"]["name"]) for item in made.surroundings]
    assert found == [
        ("ServiceAccount", "chat-router"),
        ("ServiceAccount", "chat-workers"),
        ("NetworkPolicy", "chat-router"),
        ("NetworkPolicy", "chat-workers"),
        ("Service", "chat-router"),
        ("Service", "chat-control"),
        ("Deployment", "chat-router"),
        ("PDPool", "chat-prefill"),
        ("PDPool", "chat-decode"),
        ("PodDisruptionBudget", "chat-router"),
        ("PodDisruptionBudget", "chat-prefill"),
        ("PodDisruptionBudget", "chat-decode"),
        ("PodMonitor", "chat"),
        ("PrometheusRule", "chat"),
    ]


def test_everything_is_labelled_and_owned() -> None:
    made = rendered(cluster(**{"metadata.uid": "u-1", "metadata.namespace": "apps"}))
    everything = [*made.surroundings, *(p.service for p in made.pools)]
    for item in [*everything, *(p.stateful_set for p in made.pools)]:
        metadata = item["metadata"]
        assert metadata["namespace"] == "apps"
        assert metadata["labels"]["app.kubernetes.io/instance"] == "chat"
        assert metadata["labels"]["pdcluster.dev/cluster"] == "chat"
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "pdcluster.dev/v1alpha1",
                "kind": "PDCluster",
                "name": "chat",
                "uid": "u-1",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]


def test_selectors_find_their_own_pods_and_no_others() -> None:
    made = rendered(cluster())
    workloads = [p.stateful_set for p in made.pools] + [routers(made)]
    for one in workloads:
        wanted = one["spec"]["selector"]["matchLabels"].items()
        matched = [
            other["metadata"]["name"]
            for other in workloads
            if wanted <= other["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert matched == [one["metadata"]["name"]]


def test_engine_flags() -> None:
    made = rendered(
        cluster(
            **{
                "spec.model.name": "org/smollm2:it",
                "spec.model.dtype": "float32",
                "spec.model.maxModelLen": 4096,
                "spec.prefill.engine": {"chunkTokens": 0, "threads": 2, "kvCacheTokens": 4096},
                "spec.rollout.drainTimeout": "1m30s",
            }
        )
    )
    revision = podspec.pair_revision(
        cluster(**{"spec.model.name": "org/smollm2:it", "spec.model.dtype": "float32",
                   "spec.model.maxModelLen": 4096}), SETTINGS)  # fmt: skip
    assert flags(pool_set(made, Role.PREFILL)) == {
        "role": "prefill",
        "model": "/models/smollm2-135m-instruct",
        "served-name": "org/smollm2:it",
        "worker-name": "$(POD_NAME)",
        "revision": revision,
        "host": "$(POD_IP)",
        "work-port": "7001",
        "kv-port": "7002",
        "health-port": "9090",
        "routers": "chat-control:7000",
        "dtype": "float32",
        "kv-transport": "auto",
        "kv-quantization": "none",
        "max-model-len": "4096",
        "block-tokens": "16",
        "chunk-tokens": "0",
        "max-batch-tokens": "2048",
        "max-running": "64",
        "max-queued": "256",
        "threads": "2",
        "drain-timeout-s": "90",
        "kv-cache-tokens": "4096",
        "token-file": "/etc/pdcluster/token/tokens",
    }


def test_pools_of_two_precisions() -> None:
    made = rendered(
        cluster(**{"spec.model.dtype": "float32", "spec.prefill.engine": {"dtype": "bfloat16"}})
    )
    prefill, decode = (flags(pool_set(made, role)) for role in (Role.PREFILL, Role.DECODE))
    assert (prefill["dtype"], decode["dtype"]) == ("bfloat16", "float32")
    assert prefill["revision"] == decode["revision"], "routers take them for a pair"


@pytest.mark.parametrize(
    ("speculation", "drafts"),
    [
        ({}, "8"),
        ({"maxDraftTokens": 3}, "3"),
        ({"method": "none"}, "0"),
        ({"method": "none", "maxDraftTokens": 3}, "0"),
    ],
)
def test_speculation_is_for_workers_that_decode(
    speculation: dict[str, object], drafts: str
) -> None:
    made = rendered(cluster(**{"spec.decode.engine": {"speculation": speculation}}))
    assert flags(pool_set(made, Role.DECODE))["draft-tokens"] == drafts
    assert "draft-tokens" not in flags(pool_set(made, Role.PREFILL))
    plain = rendered(cluster())
    assert "draft-tokens" not in flags(pool_set(plain, Role.DECODE)), "the engine knows itself"


DRAFT_SOURCES: list[tuple[dict[str, object], str, list[str]]] = [
    ({"builtin": "smollm2-135m-instruct"}, "/draft-models/smollm2-135m-instruct", ["draft-models"]),
    ({"huggingFace": {"repo": "a/b"}}, "/draft-models/a--b", ["draft-models"]),
    (
        {"persistentVolumeClaim": {"claimName": "a", "path": "small"}},
        "/draft-source/small",
        ["draft-source"],
    ),
    ({"image": "small:1"}, "/draft-models", ["draft-models"]),
    ({"hostPath": "/m/small.gguf"}, "/draft-models/small-", ["draft-models", "draft-source"]),
]


@pytest.mark.parametrize(("source", "path", "volumes"), DRAFT_SOURCES)
def test_a_draft_model_lies_beside_the_model(
    source: dict[str, object], path: str, volumes: list[str]
) -> None:
    speculation = {"method": "draft", "maxDraftTokens": 4, "draftModel": {"source": source}}
    made = rendered(cluster(**{"spec.decode.engine": {"speculation": speculation}}))
    decode, plain = pool_set(made, Role.DECODE), pool_set(rendered(cluster()), Role.DECODE)
    assert flags(decode)["draft-tokens"] == "4"
    assert flags(decode)["draft-model"].startswith(path)
    assert flags(decode)["model"] == flags(plain)["model"]
    assert "draft-model" not in flags(pool_set(made, Role.PREFILL))
    pod, before = (one["spec"]["template"]["spec"] for one in (decode, plain))
    added = [one["name"] for one in pod["volumes"] if one not in before["volumes"]]
    assert sorted(added) == volumes
    mounts = [one["name"] for one in pod["containers"][0]["volumeMounts"]]
    assert set(mounts) & set(volumes), "the engine finds it"
    assert len(set(mounts)) == len(mounts)
    if "draft-models" in volumes:
        assert [one["name"] for one in pod["initContainers"]] == ["model", "draft-model"]


def test_a_draft_model_from_the_host_is_for_one_machine() -> None:
    speculation = {"method": "draft", "draftModel": {"source": {"hostPath": "/m"}}}
    asked = cluster(**{"spec.decode.engine": {"speculation": speculation}})
    with pytest.raises(InvalidCluster, match=r"spec.decode.engine.speculation.draftModel.source"):
        check_supported(asked, replace(SETTINGS, host_paths=False))


def test_what_is_kept_and_where() -> None:
    kept = {"ttl": "2h", "maxShare": 0.5, "hostMemory": "2Gi", "disk": "8Gi"}
    made = rendered(cluster(**{"spec.decode.engine": {"retention": kept}}))
    decode = pool_set(made, Role.DECODE)
    told = {name: value for name, value in flags(decode).items() if name.startswith("kv-")}
    assert (
        told
        | {
            "kv-ttl-s": "7200",
            "kv-idle-share": "0.5",
            "kv-host-bytes": str(2 << 30),
            "kv-disk-bytes": str(8 << 30),
            "kv-disk-folder": "/var/lib/pdcluster/kv",
        }
        == told
    )
    pod = decode["spec"]["template"]["spec"]
    [volume] = [one for one in pod["volumes"] if one["name"] == "kv-store"]
    assert volume["emptyDir"]["sizeLimit"] == "8256Mi"
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["kv-store"] == "/var/lib/pdcluster/kv"
    prefill = pool_set(made, Role.PREFILL)
    assert not {name for name in flags(prefill) if name.startswith(("kv-host", "kv-ttl"))}


def test_memory_alone_needs_no_volume() -> None:
    made = rendered(cluster(**{"spec.decode.engine": {"retention": {"hostMemory": "1500M"}}}))
    decode = pool_set(made, Role.DECODE)
    assert flags(decode)["kv-host-bytes"] == "1500000000"
    assert "kv-disk-bytes" not in flags(decode)
    names = [one["name"] for one in decode["spec"]["template"]["spec"]["volumes"]]
    assert "kv-store" not in names


def test_colocated_workers_do_both() -> None:
    made = rendered(
        cluster(**{"spec.prefill": ..., "spec.decode": ..., "spec.colocated": {"replicas": 2}})
    )
    [pool] = made.pools
    assert flags(pool.stateful_set)["role"] == "both"
    assert pool.stateful_set["spec"]["replicas"] == 2
    assert pool.name.startswith("chat-c-")


def test_router_flags() -> None:
    deployment = routers(rendered(cluster(**{"spec.router.replicas": 3})))
    assert deployment["spec"]["replicas"] == 3
    assert flags(deployment) == {
        "model": "smollm2",
        "router-name": "$(POD_NAME)",
        "http": "$(PD_HTTP_BIND)",
        "admin": "$(POD_IP):9090",
        "control": "$(POD_IP):7000",
        "drain-timeout-s": "60",
        "token-file": "/etc/pdcluster/token/tokens",
    }
    [container] = template(deployment)["containers"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert env["PD_HTTP_BIND"] == "$(POD_IP):8000"
    assert next(iter(env)) == "POD_IP"


def test_flags_are_those_that_the_programs_take() -> None:
    from pd_engine import settings as engine
    from pd_router import settings as router

    made = rendered(cluster(**{"spec.decode.engine.kvCacheFraction": 0.5}))
    for pool in made.pools:
        [container] = template(pool.stateful_set)["containers"]
        assert engine.parse(container["args"]).served_name == "smollm2"
    [container] = template(routers(made))["containers"]
    addresses = [item.replace("$(POD_IP)", "10.0.0.1") for item in container["args"]]
    addresses = [item.replace("$(PD_HTTP_BIND)", "10.0.0.1:8000") for item in addresses]
    assert router.parse(addresses).model == "smollm2"


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"spec.decode.replicas": 7}, set()),
        ({"spec.router.replicas": 2}, set()),
        ({"spec.rollout.maxSurge": 2}, set()),
        ({"spec.slo.ttft": {"target": "1s"}}, set()),
        ({"metadata.uid": "u"}, set()),
        ({"spec.decode.engine.maxRunning": 8}, {Role.DECODE}),
        ({"spec.prefill.engine.chunkTokens": 64}, {Role.PREFILL}),
        ({"spec.model.dtype": "float32"}, {Role.PREFILL, Role.DECODE}),
        ({"spec.rollout.drainTimeout": "5s"}, {Role.PREFILL, Role.DECODE}),
    ],
)
def test_what_makes_another_revision(changes: Any, changed: set[Role]) -> None:
    before, after = revisions(), revisions(**changes)
    assert {role for role in before if before[role] != after[role]} == changed


def test_pairs_share_a_revision_that_one_pools_settings_leave() -> None:
    def pair(**changes: Any) -> str:
        made = rendered(cluster(**changes))
        [revision] = {flags(pool.stateful_set)["revision"] for pool in made.pools}
        return revision

    assert pair() == pair(**{"spec.decode.engine.maxRunning": 8})
    assert pair() != pair(**{"spec.model.dtype": "float32"})


def test_rendering_is_stable() -> None:
    assert rendered(cluster()) == rendered(cluster())


def test_probes_and_grace() -> None:
    made = rendered(cluster(**{"spec.rollout.drainTimeout": "30s"}))
    pod = template(pool_set(made, Role.DECODE))
    [container] = pod["containers"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1800
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}
    liveness = container["livenessProbe"]
    assert liveness["httpGet"]["path"] == "/livez"
    assert liveness["periodSeconds"] * liveness["failureThreshold"] <= 10
    assert liveness["terminationGracePeriodSeconds"] < 10
    assert pod["terminationGracePeriodSeconds"] > 30
    router = template(routers(made))
    assert router["terminationGracePeriodSeconds"] >= pod["terminationGracePeriodSeconds"]
    assert router["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] == 5


def test_pods_are_restricted() -> None:
    made = rendered(cluster())
    for workload in [*(p.stateful_set for p in made.pools), routers(made)]:
        pod = template(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_a_device_brings_limits_shared_memory_and_a_node() -> None:
    made = rendered(cluster(**{"spec.decode.accelerator": _GPU}))
    pod = template(pool_set(made, Role.DECODE))
    [container] = pod["containers"]
    device = {"nvidia.com/gpu": "1"}
    assert container["resources"] == {"requests": device, "limits": device}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_template_overrides_are_merged() -> None:
    overrides = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {
            "nodeSelector": {"zone": "c"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "priorityClassName": "high",
            "containers": [
                {
                    "name": "engine",
                    "image": "engine:2",
                    "imagePullPolicy": "Never",
                    "env": [{"name": "HOME", "value": "/h"}, {"name": "POD_IP", "value": "x"}],
                    "resources": {"limits": {"memory": "8Gi"}},
                }
            ],
        },
    }
    made = pool_set(rendered(cluster(**{"spec.decode.template": overrides})), Role.DECODE)
    metadata, pod = made["spec"]["template"]["metadata"], template(made)
    [container] = pod["containers"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert metadata["labels"]["team"] == "a"
    assert metadata["labels"]["pdcluster.dev/role"] == "decode"
    assert metadata["annotations"] == {"note": "b"}
    assert pod["nodeSelector"] == {"zone": "c"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert pod["priorityClassName"] == "high"
    assert (container["image"], container["imagePullPolicy"]) == ("engine:2", "Never")
    assert container["resources"] == {"limits": {"memory": "8Gi"}}
    assert env["HOME"] == "/h"
    assert env["POD_IP"] is None  # the address itself can't be overridden
    assert pod["initContainers"][0]["image"] == "engine:2"


def test_who_converts_the_model_has_the_users_mounts_and_environment() -> None:
    """It runs the engine's image: what that one needs, it needs too."""
    mounts = [{"name": "cas", "mountPath": "/cas", "readOnly": True}]
    overrides = {
        "spec": {
            "volumes": [{"name": "cas", "persistentVolumeClaim": {"claimName": "cas"}}],
            "containers": [
                {
                    "name": "engine",
                    "volumeMounts": mounts,
                    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:1"}],
                }
            ],
        }
    }
    made = rendered(cluster(**{"spec.decode.template": overrides}))
    pod = template(pool_set(made, Role.DECODE))
    for container in (pod["initContainers"][0], pod["containers"][0]):
        assert mounts[0] in container["volumeMounts"]
        assert overrides["spec"]["containers"][0]["env"][0] in container["env"]


def source(**value: Any) -> tuple[Manifest, Manifest | None]:
    """(pod spec, its init container) of a worker with this model source."""
    made = rendered(cluster(**{"spec.model.source": value}))
    pod = template(pool_set(made, Role.PREFILL))
    inits = pod.get("initContainers", [])
    return pod, inits[0] if inits else None


def model_flag(pod: Manifest) -> str:
    [found] = [item for item in pod["containers"][0]["args"] if item.startswith("--model=")]
    return str(found).removeprefix("--model=")


def test_the_builtin_model_is_converted_once() -> None:
    pod, init = source(builtin="smollm2-135m-instruct")
    assert init is not None
    assert init["command"] == ["python", "-m", "pd_engine.convert"]
    assert init["args"] == [
        "--source=builtin:smollm2-135m-instruct",
        "--out=/models/smollm2-135m-instruct",
    ]
    assert model_flag(pod) == "/models/smollm2-135m-instruct"


def test_a_gguf_file_is_mounted_and_converted() -> None:
    pod, init = source(hostPath="/data/Some.gguf")
    other, _ = source(hostPath="/other/Some.gguf")
    assert init is not None
    assert init["args"][0] == "--source=/source/Some.gguf"
    volume = {"name": "source", "hostPath": {"path": "/data/Some.gguf", "type": "File"}}
    assert volume in pod["volumes"]
    assert model_flag(pod).startswith("/models/Some-")
    assert model_flag(pod) != model_flag(other)


def test_a_folder_needs_no_conversion() -> None:
    pod, init = source(hostPath="/data/llama")
    assert init is None
    assert model_flag(pod) == "/source"
    mounts = {item["name"]: item for item in pod["containers"][0]["volumeMounts"]}
    assert mounts["source"] == {"name": "source", "mountPath": "/source", "readOnly": True}


def test_a_claim_is_mounted_read_only() -> None:
    pod, init = source(persistentVolumeClaim={"claimName": "models", "path": "llama/3"})
    assert init is None
    assert model_flag(pod) == "/source/llama/3"
    claim = {"claimName": "models", "readOnly": True}
    assert {"name": "source", "persistentVolumeClaim": claim} in pod["volumes"]


def test_a_repository_is_fetched_with_its_token() -> None:
    pod, init = source(huggingFace={"repo": "a/b", "revision": "v1", "tokenSecret": "hub"})
    assert init is not None
    assert init["args"] == ["--source=huggingface:a/b@v1", "--out=/models/a--b"]
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert {"name": "HF_TOKEN", "valueFrom": secret} in init["env"]
    assert model_flag(pod) == "/models/a--b"


def test_an_image_is_copied() -> None:
    pod, init = source(image="models/llama:3")
    assert init is not None
    assert (init["image"], init["command"][:2]) == ("models/llama:3", ["cp", "-r"])
    assert model_flag(pod) == "/models"


def test_settings_choose_programs_and_images() -> None:
    settings = Settings(engine_image="e:9", router_image="r:9", engine_command=("engine",))
    made = rendered(cluster(), settings)
    [container] = template(pool_set(made, Role.DECODE))["containers"]
    assert (container["image"], container["command"]) == ("e:9", ["engine"])
    assert template(routers(made))["containers"][0]["image"] == "r:9"
