"""What of the chart is generated: CRDs, the operator's rights and its alerts, from elsewhere in
the repository; the schema and the README's table of values, from values.yaml.

`python -m scripts.chart` writes it; check_repo.py compares. A chart can't read files outside
of its own folder, and templates want the CRDs behind a switch.
"""

from pathlib import Path

import yaml

from pd_operator import alerts
from scripts import chart_values

ROOT = Path(__file__).resolve().parent.parent
CHART = Path("charts/pdcluster")
_SWITCH = "{{- if .Values.crds.enabled }}\n"
_METADATA = """\
metadata:
  {{- if .Values.crds.keep }}
  annotations:
    helm.sh/resource-policy: keep
  {{- end }}
  labels:
    {{- include "pdcluster.labels" . | nindent 4 }}
"""
_GENERATED = "# Generated from %s by scripts/chart.py: change it there, then `make chart`.\n"


def files(root: Path = ROOT) -> dict[Path, str]:
    """Path in the repository -> content, of everything that is generated."""
    made = {}
    for crd in sorted((root / "crds").glob("*.yaml")):
        plural = crd.stem.partition("_")[2]
        made[CHART / "templates" / f"crd-{plural}.yaml"] = _template(crd)
    rules = root / "operator" / "pd_operator" / "rbac.yaml"
    name = rules.relative_to(root).as_posix()
    made[CHART / "files" / "rbac.yaml"] = _GENERATED % name + rules.read_text()
    said = {"groups": alerts.operator_groups()}
    name = "operator/pd_operator/alerts.py"
    made[CHART / "files" / "rules.yaml"] = _GENERATED % name + yaml.safe_dump(said, width=96)
    return {**made, **_values(root)}


def _values(root: Path) -> dict[Path, str]:
    text = (root / CHART / "values.yaml").read_text()
    readme = (root / CHART / "README.md").read_text()
    by_hand, head, _ = readme.partition(chart_values.HEAD)
    if not head:
        raise ValueError(f"{CHART}/README.md has no {chart_values.HEAD.strip()!r}")
    return {
        CHART / "values.schema.json": chart_values.schema(text),
        CHART / "README.md": by_hand + chart_values.table(text),
    }


def stale(root: Path = ROOT) -> list[str]:
    """Those that differ from what they should be."""
    wanted = files(root)
    folder = root / CHART / "templates"
    there = {path.relative_to(root) for path in folder.glob("crd-*.yaml")}
    differing = [
        path
        for path, text in wanted.items()
        if not (root / path).is_file() or (root / path).read_text() != text
    ]
    return [path.as_posix() for path in [*differing, *sorted(there - wanted.keys())]]


def _template(crd: Path) -> str:
    """The CRD's own text, behind the switch, with labels and what keeps it."""
    text = crd.read_text()
    if "{{" in text or text.count("\nmetadata:\n") != 1:
        raise ValueError(f"{crd}: Helm would take a part of it for a template")
    body = text.replace("\nmetadata:\n", f"\n{_METADATA}", 1)
    return f"{_SWITCH}{_GENERATED % f'crds/{crd.name}'}{body}{{{{- end }}}}\n"


def main() -> None:
    made = files()
    for name in stale():
        (ROOT / name).unlink(missing_ok=True)
    for path, text in made.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)


if __name__ == "__main__":
    main()
