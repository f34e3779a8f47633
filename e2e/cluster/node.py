"""What the node's programs are started with: containerd, kubelet, kube-proxy, kube-router."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from e2e.cluster import build, netns
from e2e.cluster.controlplane import NODE_USER_PREFIX, PROXY
from e2e.cluster.layout import (
    DNS_ADDRESS,
    NODE,
    NODE_ADDRESS,
    POD_RANGE,
    SERVICE_RANGE,
    Layout,
)
from e2e.cluster.process import Command

CNI_PLUGINS = "/usr/lib/cni"
PAUSE_IMAGE = "pdcluster.test/pause:1"
COREDNS_IMAGE = "pdcluster.test/coredns:1"
GPU = "nvidia.com/gpu"
GPUS = 8

LABELS = {
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.count": str(GPUS),
    "nvidia.com/gpu.present": "true",
    "topology.kubernetes.io/zone": "zone-a",
    "topology.kubernetes.io/region": "region-a",
}

# What an ordinary user's shell has, whoever started us.
_ENV = {"PATH": netns.PATH, "HOME": "/root", "LANG": "C.UTF-8"}


def write_configs(layout: Layout) -> None:
    """All configuration files."""
    for name in ("cni", "containerd", "kubelet", "logs", "pod-logs"):
        (layout.folder / name).mkdir(parents=True, exist_ok=True)
    layout.run.mkdir(parents=True, exist_ok=True)
    (layout.folder / "containerd.toml").write_text(_containerd_config(layout))
    (layout.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(_cni_config(layout)))
    _write_yaml(layout.folder / "kubelet.yaml", _kubelet_config(layout))
    _write_yaml(layout.folder / "kube-proxy.yaml", _proxy_config(layout))


def containerd(layout: Layout) -> Command:
    argv = ("/usr/bin/containerd", "--config", str(layout.folder / "containerd.toml"))
    return _command(layout, "containerd", argv)


def kubelet(layout: Layout) -> Command:
    flags = {
        "config": layout.folder / "kubelet.yaml",
        "kubeconfig": layout.plane.kubeconfig(NODE_USER_PREFIX + NODE),
        "root-dir": layout.folder / "kubelet",
        "cert-dir": layout.folder / "kubelet" / "pki",
        "hostname-override": NODE,
        "node-ip": NODE_ADDRESS,
        "node-labels": ",".join(f"{key}={value}" for key, value in LABELS.items()),
    }
    return _kube(layout, "kubelet", flags)


def kube_proxy(layout: Layout) -> Command:
    return _kube(layout, "kube-proxy", {"config": layout.folder / "kube-proxy.yaml"})


def kube_router(layout: Layout) -> Command:
    """Only as the one that enforces NetworkPolicies."""
    flags = {
        "run-router": "false",
        "run-firewall": "true",
        "run-service-proxy": "false",
        "kubeconfig": layout.plane.kubeconfig("kube-router"),
        "hostname-override": NODE,
        "service-cluster-ip-range": SERVICE_RANGE,
        "iptables-sync-period": "1m",
    }
    program = str(build.built("kube-router") / "kube-router")
    argv = (program, *(f"--{flag}={value}" for flag, value in flags.items()))
    return _command(layout, "kube-router", argv)


def _kube(layout: Layout, name: str, flags: Mapping[str, object]) -> Command:
    program = str(build.built("kube") / name)
    return _command(layout, name, (program, *(f"--{k}={v}" for k, v in flags.items())))


def _command(layout: Layout, name: str, argv: tuple[str, ...]) -> Command:
    return netns.inside(layout, Command(name, argv, layout.log(name), _ENV))


def _write_yaml(file: Path, document: Mapping[str, object]) -> None:
    file.write_text(yaml.safe_dump(dict(document)))


def _containerd_config(layout: Layout) -> str:
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE runc can't lower a sandbox's score, and
    # every pod would die with "can't get final child's PID from pipe".
    restrict = "false" if _may_lower_oom_score() else "true"
    return f"""\
version = 2
root = "{layout.folder}/containerd"
state = "{layout.run}/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "{layout.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = {restrict}
  netns_mounts_under_state_dir = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{layout.folder}/cni"
"""


def _may_lower_oom_score() -> bool:
    """Whether this process has CAP_SYS_RESOURCE."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & 1 << 24)
    return False


def _cni_config(layout: Layout) -> dict[str, object]:
    return {
        "cniVersion": "0.4.0",
        "name": layout.cni_network,
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "hairpinMode": True,
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(layout.folder / "cni-addresses"),
                    "ranges": [[{"subnet": POD_RANGE}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }


def _kubelet_config(layout: Layout) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_ADDRESS,
        # Nobody but this cluster reaches its network.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": "/dev/null",
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "localStorageCapacityIsolation": False,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        "oomScoreAdj": 0,
        "podLogsDir": str(layout.pod_logs),
        "volumePluginDir": str(layout.folder / "kubelet" / "volume-plugins"),
        "seccompDefault": True,
        "serializeImagePulls": False,
        "maxPods": 110,
        "nodeStatusUpdateFrequency": "5s",
        # Secrets and ConfigMaps reach running pods within seconds instead of a minute.
        "syncFrequency": "10s",
        "configMapAndSecretChangeDetectionStrategy": "Watch",
    }


def _proxy_config(layout: Layout) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(layout.plane.kubeconfig(PROXY))},
        "clusterCIDR": POD_RANGE,
        "hostnameOverride": NODE,
        "nodePortAddresses": ["primary"],
        # This machine's connection tracking isn't ours to set.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }


def cgroup_folders(layout: Layout) -> list[Path]:
    """The folders of the pods' parent cgroup: one a controller (v1), or one (v2)."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root / layout.cgroup]
    mounted = [root / name for name in os.listdir(root) if (root / name).is_dir()]
    return [folder / layout.cgroup for folder in mounted if (folder / "cgroup.procs").exists()]
