"""`python -m e2e.cluster up|down|status|demo|load-image|exec`: a Kubernetes of one node here."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from e2e.cluster import build, cluster, envtest, netns
from e2e.cluster.api import Api
from e2e.cluster.containers import Containers
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import DEFAULT_NAME, Layout


def _programs() -> str:
    """Folders of kubectl, and of helm where it is built."""
    found = [Path(envtest.kubectl()).parent]
    if build.is_built("helm"):
        found.append(build.built("helm"))
    return ":".join(map(str, found))


def up(layout: Layout, _: argparse.Namespace) -> int:
    cluster.up(layout)
    print(
        f"\n  export KUBECONFIG={layout.admin}\n"
        f"  export PATH={_programs()}:$PATH\n"
        "  kubectl get pods --all-namespaces\n"
    )
    return 0


def down(layout: Layout, _: argparse.Namespace) -> int:
    cluster.down(layout)
    print(f"cluster {layout.name!r} is down")
    return 0


def status(layout: Layout, _: argparse.Namespace) -> int:
    config = cluster.kubeconfig_of(layout)
    print(f"KUBECONFIG={config}\n", flush=True)
    base = [envtest.kubectl(), "--kubeconfig", str(config), "get"]
    for what in (["nodes"], ["pods", "--all-namespaces", "-o", "wide"]):
        subprocess.run([*base, *what], timeout=60, check=True)
        print(flush=True)
    print("images:", *Containers(layout).images(), sep="\n  ")
    return 0


def demo(layout: Layout, options: argparse.Namespace) -> int:
    from e2e import site  # needs more than a cluster

    api = Api(cluster.kubeconfig_of(layout))
    try:
        print(yaml.safe_dump(site.demo(api, options.namespace), sort_keys=False), end="")
    finally:
        api.close()
    return 0


def load_image(layout: Layout, options: argparse.Namespace) -> int:
    cluster.kubeconfig_of(layout)
    for file in options.files:
        Containers(layout).load(file)
    return 0


def execute(layout: Layout, options: argparse.Namespace) -> int:
    cluster.kubeconfig_of(layout)
    command = [*netns.enter(layout), *options.command]
    os.execvp(command[0], command)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    parser.add_argument("--name", default=DEFAULT_NAME, help="which cluster (%(default)s)")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, run, words in (
        ("up", up, "start it"),
        ("down", down, "end it and remove all that it had"),
        ("status", status, "nodes, pods and images"),
    ):
        verbs.add_parser(name, help=words).set_defaults(run=run)
    shown = verbs.add_parser("demo", help="make a namespace, print a PDCluster for it")
    shown.add_argument("namespace", nargs="?", default="demo", metavar="NAMESPACE")
    shown.set_defaults(run=demo)
    load = verbs.add_parser("load-image", help="import docker or OCI archives")
    load.add_argument("files", nargs="+", type=Path, metavar="FILE")
    load.set_defaults(run=load_image)
    inside = verbs.add_parser("exec", help="run a command in the cluster's network")
    inside.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    inside.set_defaults(run=execute)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(Layout(options.name), options))
    except (ClusterError, TimeoutError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
