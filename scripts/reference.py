"""The pages of docs/reference that are made of the code: `python -m scripts.reference`.

check_repo.py compares.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from pd_cli import kubectl, output
from pd_cli import main as command
from pd_operator import alerts, api
from scripts import exports
from scripts.panels import BOARDS

ROOT = Path(__file__).resolve().parent.parent
_FOLDER = Path("docs/reference")
_CRD = Path("crds/pdcluster.dev_pdclusters.yaml")
_HELP_COLUMNS = 90
_POOLS = ("decode", "colocated")
_PROGRAMS = {
    "router": "The router, on port `admin` (9090) of its pods",
    "engine": "Workers, on port `health` (9090) of their pods",
    "operator": "The operator, on port `metrics` (9090) of its pod",
}
_EVERY_RULE = {
    "apiVersion": "pdcluster.dev/v1alpha1",
    "kind": "PDCluster",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"name": "m", "source": {"builtin": "smollm2-135m-instruct"}},
        "slo": {"ttft": {"target": "500ms"}, "tpot": {"target": "50ms"}},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
    },
}


def files(root: Path = ROOT) -> dict[Path, str]:
    """Path in the repository -> content."""
    return {
        _FOLDER / "metrics.md": metrics(),
        _FOLDER / "fields.md": fields(root),
        _FOLDER / "commands.md": commands(),
    }


def stale(root: Path = ROOT) -> list[str]:
    """Those that differ from what they should be."""
    return [
        path.as_posix()
        for path, text in files(root).items()
        if not (root / path).is_file() or (root / path).read_text() != text
    ]


# ---- metrics ---------------------------------------------------------------------------


def metrics() -> str:
    lines = [
        "# Metrics",
        "",
        "All that is exported, and where it is looked at. A histogram has `_bucket`, `_sum` and "
        "`_count`. Prometheus adds the labels `namespace` and `pdcluster_dev_cluster` when it "
        "scrapes by the PodMonitor that the operator makes.",
    ]
    places = dict(_places())
    for program, found in exports.exported().items():
        lines += ["", f"## {_PROGRAMS[program]}", "", "| metric | kind | labels | what | where |"]
        lines.append("|---|---|---|---|---|")
        for one in found:
            labels = ", ".join(f"`{label}`" for label in one.labels)
            where = ", ".join(places.get(one.name, []))
            lines.append(
                f"| `{one.series}` | {one.kind} | {labels} | {_cell(one.text)} | {where} |"
            )
    lines += ["", "## Recorded by rules", "", _RECORDED, ""]
    return "\n".join(lines)


_RECORDED = (
    "For each promise of `spec.slo` the operator's PrometheusRule records "
    "`pdcluster:slo:target_seconds`, `pdcluster:slo:objective` and, over "
    + ", ".join(alerts.WINDOWS)
    + ", the share of late requests: `pdcluster:ttft_late:ratio_rate1h` and so on. A target "
    "between two bounds of the histogram is read by a straight line between them."
)


def _places() -> Iterator[tuple[str, list[str]]]:
    """Where a metric's name stands: dashboards, and alerts by their pages."""
    texts = [
        (f"*{board.title.partition(': ')[2]}*", query.expression)
        for board in BOARDS
        for panel in board.panels()
        for query in panel.queries
    ]
    groups = [*alerts.groups(api.parse(_EVERY_RULE)), *alerts.operator_groups()]
    for rule in (rule for group in groups for rule in group["rules"]):
        if "alert" in rule:
            texts.append((f"[{rule['alert']}](../runbooks/{rule['alert']}.md)", rule["expr"]))
        else:
            texts.append(("recorded", rule["expr"]))
    for found in exports.exported().values():
        for one in found:
            places = [place for place, text in texts if f"{one.name}" in text]
            yield one.name, sorted(set(places))


# ---- fields ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    path: str
    kind: str
    default: str
    text: str


def fields(root: Path) -> str:
    crd = yaml.safe_load((root / _CRD).read_text())
    [version] = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    rules = _rules(schema["spec"], "spec")
    whole = Field("spec", "object", "", _text(schema["spec"], rules.get("spec", [])))
    spec = [whole, *_walk(schema["spec"], "spec", rules)]
    prefill = {
        (one.path.removeprefix("spec.prefill"), one.kind, one.text)
        for one in spec
        if one.path.startswith("spec.prefill")
    }
    shown = [one for one in spec if not _as_prefill(one, prefill)]
    lines = [
        "# Fields of a PDCluster",
        "",
        "Made from the CRD; `kubectl explain pdcluster.spec` says the same. `decode` and "
        "`colocated` have the fields of `prefill`, and those that are listed under them. What a "
        "field must obey is refused with these words at `kubectl apply` and by `pdcluster "
        "validate`.",
    ]
    for title, rows in (("spec", shown), ("status", list(_walk(schema["status"], "status", {})))):
        lines += ["", f"## {title}", "", "| field | type | default | what |", "|---|---|---|---|"]
        lines += [f"| `{f.path}` | {f.kind} | {f.default} | {f.text} |" for f in rows]
    return "\n".join([*lines, ""])


def _as_prefill(field: Field, prefill: set[tuple[str, str, str]]) -> bool:
    for pool in _POOLS:
        start = f"spec.{pool}."
        if field.path.startswith(start):
            return (f".{field.path.removeprefix(start)}", field.kind, field.text) in prefill
    return False


def _walk(schema: dict[str, Any], path: str, rules: dict[str, list[str]]) -> Iterator[Field]:
    for name, part in schema.get("properties", {}).items():
        bare = f"{path}.{name}"
        inner = part.get("items", part) if part.get("type") == "array" else part
        here = bare + ("[]" if inner is not part else "")
        said = [rule for place in dict.fromkeys((bare, here)) for rule in rules.get(place, [])]
        yield Field(here, _kind(part), _default(part), _text(part, said))
        yield from _walk(inner, here, rules)


def _rules(schema: dict[str, Any], path: str) -> dict[str, list[str]]:
    """What is said of each field, by the rules of whatever it is in."""
    found: dict[str, list[str]] = {}
    for rule in schema.get("x-kubernetes-validations", ()):
        if "message" in rule:
            found.setdefault(path + rule.get("fieldPath", ""), []).append(rule["message"])
    for name, part in schema.get("properties", {}).items():
        for there, said in _rules(part, f"{path}.{name}").items():
            found.setdefault(there, []).extend(said)
    if "items" in schema:
        found |= _rules(schema["items"], f"{path}[]")
    return found


def _kind(part: dict[str, Any]) -> str:
    if "enum" in part:
        return " \\| ".join(f"`{value}`" for value in part["enum"])
    if part.get("x-kubernetes-int-or-string"):
        return "number or text"
    kind = str(part.get("type", "any"))
    bounds = [f"{word} {part[key]}" for key, word in (("minimum", "from"), ("maximum", "to"))
              if key in part]  # fmt: skip
    return " ".join([kind, *bounds])


def _default(part: dict[str, Any]) -> str:
    if "default" not in part or part["default"] in ({}, []):
        return ""
    return f"`{part['default']}`".replace("True", "true").replace("False", "false")


def _text(part: dict[str, Any], rules: list[str]) -> str:
    return _cell(" ".join([part.get("description", ""), *(f"*{rule}*" for rule in rules)]).strip())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---- commands --------------------------------------------------------------------------


def all_commands() -> dict[str, click.Command]:
    """How a command is called -> what it is."""
    found = {
        f"pdcluster {name}": importlib.import_module(module).command
        for name, (module, _) in command._COMMANDS.items()
    }
    return found | {f"kubectl pd {name}": one for name, one in kubectl.main.commands.items()}


def commands() -> str:
    lines = [
        "# Commands",
        "",
        "Made from the commands' own `--help`. `-o json` is for programs: the answer is on the "
        "standard output, all else on standard error. `serve`, `up` and `quickstart` stay in the "
        "foreground and tell as they go; `pdcluster status -o json` tells of them. `completion` "
        "prints a script. `kubectl pd` has "
        + ", ".join(f"`{name}`" for name in kubectl.SAME)
        + " too, the same as `pdcluster`'s.",
        *_exits(),
        *_COMPLETION.splitlines(),
    ]
    for name, found in all_commands().items():
        text = found.get_help(click.Context(found, info_name=name, max_content_width=96))
        lines += ["", f"## {name}", "", "```", text, "```"]
    return "\n".join([*lines, ""])


def _exits() -> list[str]:
    """What each exit status of each command says."""
    codes = sorted({code for means in output.EXITS.values() for code in means})
    lines = ["", "## Exit status", "", "| command | " + " | ".join(map(str, codes)) + " |"]
    lines.append("|---" * (len(codes) + 1) + "|")
    for name in all_commands():
        cells = [_cell(output.EXITS[name].get(code, "")) for code in codes]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


_COMPLETION = """
## Completion

`pdcluster completion bash|zsh|fish` says how. For `kubectl pd` kubectl asks \
`kubectl_complete-pd`, which comes with the Python package as `kubectl-pd` does; with kubectl's \
own completion loaded there is nothing to do."""


def main() -> None:
    (ROOT / _FOLDER).mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        (ROOT / path).write_text(text)


if __name__ == "__main__":
    main()
