"""The cluster that the stories run on: it schedules, resolves names, enforces policies and pod
security, counts GPUs; our images start in it under all that and answer a request.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from e2e.cluster import claims, images
from e2e.cluster.api import Api, ApiError, Manifest, wait_for
from e2e.cluster.envtest import Kube
from e2e.cluster.layout import Layout
from tests.reference import Reference
from tests.tiny_model import tiny_model_dir

ROUTER, ENGINE = (images.IMAGES[name].reference for name in ("router", "engine-thin"))
PACKAGES = "/opt/pdcluster/packages"
READY_DEADLINE_S = 120.0
SERVER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000)"

DENIED = ("ConnectionRefusedError", "TimeoutError")  # rejected or dropped, as it pleases

pytestmark = pytest.mark.timeout(600)


def pod(name: str, image: str, **container: Any) -> Manifest:
    """A pod as strict as the `restricted` standard wants it, and a read-only root."""
    volumes = container.pop("volumes", [])
    mounts = container.pop("mounts", [])
    env = {"HOME": "/tmp", "USER": "pdcluster", **container.pop("env", {})}
    spec = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": key, "value": value} for key, value in env.items()),
        ],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],
        **container,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [spec],
            "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes],
        },
    }


def web_server(name: str, **container: Any) -> Manifest:
    ready = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    command = ["python", "-c", SERVER]
    return pod(name, ROUTER, command=command, readinessProbe=ready, **container)


def headless(name: str, ports: Mapping[str, int]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": name},
            "ports": [{"name": key, "port": port} for key, port in ports.items()],
        },
    }


def ready(kube: Kube, namespace: str, name: str) -> None:
    """Waits for the pod; says what one would look at when time is up."""

    def is_ready() -> bool:
        found = kube.api.get("v1", "Pod", name, namespace)["status"]
        return any(
            c["type"] == "Ready" and c["status"] == "True" for c in found.get("conditions", [])
        )

    try:
        wait_for(f"pod {name} is ready", is_ready, READY_DEADLINE_S)
    except TimeoutError as error:
        said = [
            kube.kubectl("describe", "pod", name, "-n", namespace),
            kube.kubectl("logs", name, "-n", namespace, "--tail=40"),
        ]
        raise AssertionError("\n".join([str(error), *said])) from None


def fetch(kube: Kube, namespace: str, name: str, url: str, timeout_s: float = 3) -> str:
    """The status that a pod gets from there, or the name of the error."""
    code = (
        "import sys, urllib.request as u\n"
        "try: print(u.urlopen(sys.argv[1], timeout=float(sys.argv[2])).status)\n"
        "except OSError as e: print(type(getattr(e, 'reason', e)).__name__)\n"
    )
    command = ["python", "-c", code, url, str(timeout_s)]
    return kube.kubectl("exec", name, "-n", namespace, "--", *command).strip()


@contextlib.contextmanager
def mounted(api: Api, namespace: str, folders: Mapping[str, Any]) -> Iterator[list[Manifest]]:
    """Volumes of a pod for these folders."""
    made = [claims.claim(api, namespace, name, folder) for name, folder in folders.items()]
    try:
        yield [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in folders]
    finally:
        for volume in made:
            api.delete("v1", "PersistentVolume", volume)


def test_names_of_headless_services_resolve_and_policies_are_enforced(
    kube: Kube, api: Api, namespace: str
) -> None:
    for name in ("server", "client"):
        api.apply(headless(name, {"http": 8000}), namespace)
        api.apply(web_server(name), namespace)
    for name in ("server", "client"):
        ready(kube, namespace, name)
    url = "http://server:8000/"
    assert fetch(kube, namespace, "client", url) == "200"

    deny: dict[str, Any] = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "deny"},
        "spec": {"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"]},
    }
    api.apply(deny, namespace)
    wait_for(
        "the policy holds",
        lambda: fetch(kube, namespace, "client", url, 1) in DENIED,
        60,
    )
    allow = [{"from": [{"podSelector": {"matchLabels": {"app": "client"}}}]}]
    deny["spec"] |= {"ingress": allow}
    api.apply(deny, namespace)
    wait_for("it allows", lambda: fetch(kube, namespace, "client", url, 1) == "200", 60)


def test_gpus_are_counted_and_nodes_found_by_their_product(
    kube: Kube, api: Api, namespace: str
) -> None:
    greedy = pod("greedy", ROUTER, resources={"limits": {"nvidia.com/gpu": "9"}})
    api.apply(greedy, namespace)

    def why() -> str:
        conditions = api.get("v1", "Pod", "greedy", namespace)["status"].get("conditions", [])
        return next((c["message"] for c in conditions if c.get("reason") == "Unschedulable"), "")

    assert "Insufficient nvidia.com/gpu" in wait_for("it can't be scheduled", why)
    modest = web_server("modest", resources={"limits": {"nvidia.com/gpu": "8"}})
    modest["spec"]["nodeSelector"] = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    api.apply(modest, namespace)
    ready(kube, namespace, "modest")


def test_pods_that_ask_for_too_much_are_refused(api: Api, namespace: str) -> None:
    strong = pod("strong", ROUTER)
    strong["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(ApiError, match="violates PodSecurity"):
        api.apply(strong, namespace)
    folder = pod("folder", ROUTER, volumes=[{"name": "host", "hostPath": {"path": "/"}}])
    with pytest.raises(ApiError, match="hostPath"):
        api.apply(folder, namespace)


@pytest.mark.parametrize("name", ["router", "operator", "engine-thin"])
def test_images_hold_no_build_tools_and_only_what_they_need(
    kube: Kube, api: Api, namespace: str, name: str
) -> None:
    code = (
        "import importlib.util as i, os, shutil\n"
        "names = ('pip', 'torch', 'kopf', 'grpc', 'pd_engine', 'pd_router', 'pd_operator')\n"
        "print(*(n for n in names if i.find_spec(n)),"
        " *(t for t in ('gcc', 'cc', 'make', 'pip', 'pip3') if shutil.which(t)), os.getuid())\n"
    )
    reference = images.IMAGES[name].reference
    once = pod("once", reference, command=["python", "-c", code])
    once["spec"]["restartPolicy"] = "Never"
    api.apply(once, namespace)
    wait_for(
        "it has run",
        lambda: api.get("v1", "Pod", "once", namespace)["status"]["phase"] == "Succeeded",
        READY_DEADLINE_S,
    )
    assert (
        kube.kubectl("logs", "once", "-n", namespace).split()
        == {
            "router": ["grpc", "pd_router", "65532"],
            "operator": ["kopf", "pd_operator", "65532"],
            "engine-thin": ["pd_engine", "65532"],
        }[name]
    )


def router_pod() -> Manifest:
    return pod(
        "router",
        ROUTER,
        args=[
            "--model=tiny",
            "--router-name=router",
            "--http=$(POD_IP):8000",
            "--admin=$(POD_IP):9090",
            "--control=$(POD_IP):7000",
        ],
        readinessProbe={"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
    )


def engine_pod(volumes: Sequence[Manifest]) -> Manifest:
    return pod(
        "engine",
        ENGINE,
        args=[
            "--role=both",
            "--model=/model",
            "--served-name=tiny",
            "--worker-name=engine",
            "--host=$(POD_IP)",
            "--health-port=9090",
            "--routers=router:7000",
            "--dtype=float32",
            "--kv-cache-tokens=4096",
            "--threads=1",
        ],
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp"},
        readinessProbe={"httpGet": {"path": "/readyz", "port": 9090}, "periodSeconds": 1},
        resources={"limits": {"nvidia.com/gpu": "1"}},
        volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}, *volumes],
        mounts=[
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "packages", "mountPath": PACKAGES, "readOnly": True},
            {"name": "model", "mountPath": "/model", "readOnly": True},
        ],
    )


def test_a_router_and_an_engine_answer_in_pods_under_the_restricted_standard(
    kube: Kube, api: Api, namespace: str, layout: Layout
) -> None:
    model = tiny_model_dir()
    reference = Reference(model, threads=1)
    prompt = "The river runs past the old mill"
    expected = reference.decode(reference.generate(prompt, 16, ignore_eos=True))
    copy = claims.readable(model, layout.folder / "models" / model.name)
    folders = {"packages": images.host_packages(), "model": copy}
    with mounted(api, namespace, folders) as volumes:
        api.apply(headless("router", {"http": 8000, "control": 7000}), namespace)
        api.apply(router_pod(), namespace)
        api.apply(engine_pod(volumes), namespace)
        ready(kube, namespace, "router")
        ready(kube, namespace, "engine")
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
        }
        path = api.path("v1", "Pod", "router:8000", namespace, "proxy/v1/completions")
        answer = api.call("POST", path, body, deadline_s=60)
        for name in ("engine", "router"):
            api.delete("v1", "Pod", name, namespace)
    assert answer["choices"][0]["text"] == expected
