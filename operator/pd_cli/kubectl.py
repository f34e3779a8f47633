"""`kubectl pd …`: the command for PDClusters on Kubernetes, through kubectl's own access.

kubectl finds it as `kubectl-pd` on the PATH. What it shows comes by `kubectl get`, `logs` and
`port-forward`, so contexts, credentials and rights are kubectl's; nothing here speaks to an
API server. Commands that need no cluster (estimate, advise, simulate, validate) are the same.
"""

import json
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, TypeVar

import click
from click.shell_completion import ShellComplete

from pd_cli import main as here
from pd_cli import output as outputs

_ROUTERS = "pdcluster.dev/role=router,pdcluster.dev/cluster={}"
_PODS = "pdcluster.dev/cluster={}"
_OPERATORS = "app.kubernetes.io/component=operator,app.kubernetes.io/part-of=pdcluster"
"""Whatever the release and the chart are called (`nameOverride`)."""
_EVENTS = "involvedObject.name={},involvedObject.kind=PDCluster"
_ADMIN_PORT = 9090
_FORWARD_S = 20.0
_CALL_S = 60.0
_LOG_LINES = 5000
_FORWARDED = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")
SAME = ("estimate", "advise", "simulate", "validate")

Access = Sequence[str]
"""kubectl's own flags: --context, --namespace, …"""
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Kubectl:
    """kubectl with the flags that the user gave."""

    def __init__(self, access: Access = ()) -> None:
        self._access = tuple(access)

    def also(self, flag: str) -> "Kubectl":
        """With one flag more. Of two values of a flag kubectl takes the last."""
        return Kubectl([*self._access, flag])

    def run(self, *arguments: str) -> str:
        """Its output. ClickException with its own words when it fails."""
        command = ["kubectl", *self._access, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_CALL_S, check=False
            )
        except FileNotFoundError:
            raise click.ClickException("there is no kubectl on the PATH") from None
        except subprocess.TimeoutExpired:
            message = f"kubectl {arguments[0]} gave no answer within {_CALL_S:.0f} s"
            raise click.ClickException(message) from None
        if done.returncode != 0:
            raise click.ClickException(done.stderr.strip() or f"kubectl {arguments[0]} failed")
        return done.stdout

    def get(self, *arguments: str) -> Any:
        return json.loads(self.run("get", *arguments, "-o", "json"))

    @contextmanager
    def forwarded(self, pod: str, port: int) -> Iterator[int]:
        """A port of this machine that leads to the pod's while the block runs."""
        command = ["kubectl", *self._access, "port-forward", f"pod/{pod}", f":{port}"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if process.stdout is None:
            raise AssertionError("a pipe was asked for")
        try:
            yield _port(process.stdout, pod)
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(said: IO[str], pod: str) -> int:
    """The port that kubectl tells; its output is read on, so that it never waits for us."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with suppress(ValueError):  # closed
            for line in said:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    heard, until = "", time.monotonic() + _FORWARD_S
    while (left := until - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            break
        if line is None:
            raise click.ClickException(f"no way to {pod}: {heard.strip() or 'kubectl ended'}")
        if found := _FORWARDED.search(line):
            return int(found[1])
        heard += line
    raise click.ClickException(f"kubectl didn't forward a port to {pod} in {_FORWARD_S:.0f} s")


def _routers(kubectl: Kubectl, name: str) -> list[str]:
    """Router pods that are ready."""
    pods = kubectl.get("pods", "-l", _ROUTERS.format(name))["items"]
    ready = [pod["metadata"]["name"] for pod in pods if _is_ready(pod)]
    if not ready:
        kubectl.run("get", "pdcluster", name)  # says so where there's no such object
        raise click.ClickException(f"no router of {name} is ready; see: kubectl pd status {name}")
    return ready


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


@contextmanager
def _admins(kubectl: Kubectl, name: str) -> Iterator[list[tuple[str, int]]]:
    """The admin ports of all ready routers, as places of this machine."""
    with ExitStack() as stack:
        yield [
            ("127.0.0.1", stack.enter_context(kubectl.forwarded(pod, _ADMIN_PORT)))
            for pod in _routers(kubectl, name)
        ]


# ---- commands ----------------------------------------------------------------------------


class _Plugin(click.Group):
    """Our own commands, and those that are the same everywhere."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *SAME]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in SAME:
            return here.main.get_command(ctx, cmd_name)
        return super().get_command(ctx, cmd_name)


def _given(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value:
        ctx.obj = ctx.ensure_object(Kubectl).also(f"--{parameter.name}={value}")


def _with_access(command: _Command) -> _Command:
    """kubectl's own flags, which it takes before the verb and after it."""
    for names in (("--kubeconfig",), ("--context",), ("-n", "--namespace")):
        command = click.option(*names, expose_value=False, callback=_given, help="As kubectl's.")(
            command
        )
    return command


@click.group(cls=_Plugin, context_settings={"help_option_names": ["-h", "--help"]})
@_with_access
@click.version_option(package_name="pdcluster")
@click.pass_context
def main(ctx: click.Context) -> None:
    """PDClusters on Kubernetes, through kubectl."""
    ctx.ensure_object(Kubectl)


@main.command()
@click.argument("name", required=False)
@outputs.option
@_with_access
@click.pass_obj
def status(kubectl: Kubectl, name: str | None, output: str) -> None:
    """Show PDClusters; of one, its conditions, pods and what happened last."""
    if output == outputs.JSON:
        outputs.document(_objects(kubectl, name))
        return
    if name is None:
        click.echo(kubectl.run("get", "pdclusters"), nl=False)
        return
    found = kubectl.get("pdcluster", name)
    click.echo(kubectl.run("get", "pdcluster", name))
    for one in found.get("status", {}).get("conditions", ()):
        click.echo(f"{one['type']:16} {one['status']:8} {one['reason']:24} {one['message']}")
    click.echo("\n" + kubectl.run("get", "pods", "-l", _PODS.format(name), "-o", "wide"))
    chosen = _EVENTS.format(name)
    click.echo(kubectl.run("get", "events", "--field-selector", chosen), nl=False)


def _objects(kubectl: Kubectl, name: str | None) -> dict[str, Any]:
    """The same as Kubernetes' own objects."""
    if name is None:
        return {"clusters": kubectl.get("pdclusters")["items"]}
    return {
        "clusters": [kubectl.get("pdcluster", name)],
        "pods": kubectl.get("pods", "-l", _PODS.format(name))["items"],
        "events": kubectl.get("events", "--field-selector", _EVENTS.format(name))["items"],
    }


@main.command()
@click.argument("name")
@click.option("--every", type=click.FloatRange(0.2, 60), default=1.0, show_default=True,
              help="Seconds between two looks.")  # fmt: skip
@click.option("--once", is_flag=True, help="Print once and end.")
@outputs.option
@_with_access
@click.pass_obj
def top(kubectl: Kubectl, name: str, every: float, once: bool, output: str) -> None:
    """Watch workers, latencies and recent requests of NAME until Ctrl-C."""
    from pd_cli.top import watch

    with _admins(kubectl, name) as places:
        watch(lambda: places, every, once, output)


@main.command()
@click.argument("name")
@click.option("--id", "request_id", help="Of an answer (`id`), or as x-request-id has it.")
@click.option("--last", type=click.IntRange(1, 100), default=1, show_default=True,
              help="So many requests, the latest first.")  # fmt: skip
@outputs.option
@_with_access
@click.pass_obj
def requests(kubectl: Kubectl, name: str, request_id: str | None, last: int, output: str) -> None:
    """Show what happened to requests of NAME: each step, where, how long; what carried the KV."""
    from pd_cli.requests import show
    from pd_cli.top import NothingToSee

    with _admins(kubectl, name) as places:
        try:
            show(places, request_id, last, output)
        except NothingToSee as error:
            raise click.ClickException(str(error)) from None


@main.command(name="open")
@click.argument("name")
@outputs.option
@_with_access
@click.pass_obj
def open_page(kubectl: Kubectl, name: str, output: str) -> None:
    """Make the live page of NAME's router reachable from here until Ctrl-C."""
    router = _routers(kubectl, name)[0]
    with suppress(KeyboardInterrupt), kubectl.forwarded(router, _ADMIN_PORT) as port:
        if output == outputs.JSON:
            outputs.document({"url": f"http://127.0.0.1:{port}/"})
        else:
            click.echo(f"http://127.0.0.1:{port}/ until Ctrl-C")
        sys.stdout.flush()
        threading.Event().wait()


@main.command()
@click.argument("name")
@click.option("--last", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="So many decisions of each pool.")  # fmt: skip
@outputs.option
@_with_access
@click.pass_obj
def explain(kubectl: Kubectl, name: str, last: int, output: str) -> None:
    """Say why the pools of NAME have the sizes that they have, from the operators' logs."""
    from pd_cli.explain import say

    pods = kubectl.get("pods", "--all-namespaces", "-l", _OPERATORS)["items"]
    if not pods:
        raise click.ClickException("no operator's pod is found: is the chart installed?")
    said: list[str] = []
    mute: list[click.ClickException] = []  # one that starts has no log yet
    for pod in pods:
        place, operator = pod["metadata"]["namespace"], pod["metadata"]["name"]
        logs = ("logs", f"--namespace={place}", f"--tail={_LOG_LINES}", operator)
        try:
            said += kubectl.run(*logs).splitlines()
        except click.ClickException as error:
            mute.append(error)
    if len(mute) == len(pods):
        raise mute[0]
    say(said, name, last, output)


# ---- completion --------------------------------------------------------------------------

_NO_FILES, _FILES = ":4", ":0"  # of Cobra, whose completion kubectl has


def complete() -> None:
    """`kubectl_complete-pd`: kubectl asks it for what may follow `kubectl pd`, the last word
    maybe begun, and reads a line for each and what else to do."""
    *words, begun = sys.argv[1:] or [""]
    made = ShellComplete(main, {}, "kubectl pd", "").get_completions(words, begun)
    for one in made:
        if one.type == "plain":
            click.echo(f"{one.value}\t{one.help}" if one.help else one.value)
    click.echo(_FILES if any(one.type != "plain" for one in made) else _NO_FILES)
