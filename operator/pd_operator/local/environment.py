"""PURE. What a container's process is started with: its environment and its arguments."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pd_operator.podparts import Manifest

_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class ConfigError(Exception):
    """The container asks for what this backend hasn't."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A path inside the container and where that is on this machine."""

    inside: str
    outside: str


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Kubernetes' `$(NAME)`; `$$` is a plain `$`, and an unknown name stays as it stands."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return "$"
        return variables.get(name, match.group(0))

    return _REFERENCE.sub(replace, text)


def container_env(container: Manifest, pod: Manifest) -> dict[str, str]:
    """The variables of `env`; each may refer to those before it."""
    variables: dict[str, str] = {}
    for item in container.get("env", []):
        if "valueFrom" in item:
            variables[item["name"]] = _from_source(item, pod)
        else:
            variables[item["name"]] = expand(item.get("value", ""), variables)
    return variables


def _from_source(item: Manifest, pod: Manifest) -> str:
    source = item["valueFrom"]
    if "fieldRef" not in source:
        kinds = ", ".join(source)
        raise ConfigError(f"env {item['name']}: {kinds} can't be resolved on this machine")
    return _field(source["fieldRef"]["fieldPath"], pod)


def _field(path: str, pod: Manifest) -> str:
    keyed = _KEYED.fullmatch(path)
    if keyed:
        return str(pod["metadata"].get(keyed.group(1), {}).get(keyed.group(2), ""))
    value: Any = pod
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(f"fieldRef {path}: the pod has no such field")
        value = value[part]
    return str(value)


def map_paths(text: str, mounts: Sequence[Mount]) -> str:
    """A path inside the container as a path on this machine; other texts stay.

    A process shares our file system, so what a container would find under a mount has to
    be named by where it really is: `/models/a` and `--out=/models/a` alike.
    """
    flag, equals, path = text.partition("=") if text.startswith("--") else ("", "", text)
    for mount in sorted(mounts, key=lambda item: -len(item.inside)):
        if path == mount.inside or path.startswith(mount.inside + "/"):
            return flag + equals + mount.outside + path[len(mount.inside) :]
    return text


def command(
    container: Manifest, variables: Mapping[str, str], mounts: Sequence[Mount], python: str
) -> list[str]:
    """The argument vector; `python` stands in for a command of that name."""
    program = [expand(part, variables) for part in container.get("command", [])]
    args = [expand(part, variables) for part in container.get("args", [])]
    if not program and not args:
        raise ConfigError(f"container {container['name']} has no command")
    # The program is this machine's own, wherever it lies; arguments name what is mounted.
    argv = [*program, *(map_paths(part, mounts) for part in args)]
    return [python if argv[0] in ("python", "python3") else argv[0], *argv[1:]]
