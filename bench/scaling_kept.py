"""Runs of bench.scaling that needn't be made again: hours of simulation, cell by cell.

A run's figures stand in bench/out/scaling, with a hash of the code that made them: of all
modules of the product and the bench that are loaded, docstrings and comments aside. What a
rival costs doesn't depend on our policy, nor on another rival's.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.common import OUT, ROOT
from pd_operator.api import Role
from pd_sim.simulation import Result

FOLDER = OUT / "scaling"
_PACKAGES = ("bench.days", "bench.rivals", "bench.scaling_cells", "pd_")
_OURS = "pd_operator.scaling"
_OUR_CLASSES = ("Slo",)  # pd_sim's, which calls decide()
_RIVALS = "bench.rivals."


@dataclass(frozen=True, slots=True)
class Kept:
    """`fill`: how full a rival's workers were; `whole`: it wasn't given up as too late.
    `sizes`: (seconds, prefill and decode workers that are paid for)."""

    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    gpu_hours: float
    changes: int
    whole: bool = True
    fill: float | None = None
    sizes: tuple[tuple[float, int, int], ...] = ()


def kept(result: Result, fill: float | None = None) -> Kept:
    sizes = tuple(
        (round(one.at_s, 1), one.asked[Role.PREFILL], one.asked[Role.DECODE])
        for one in result.sizes
    )
    return Kept(
        result.attainment, result.ttft_attainment, result.tpot_attainment, result.gpu_hours,
        result.changes, result.whole, fill, sizes,
    )  # fmt: skip


def once(cell: str, policy: str, uses: str, make: Callable[[], Kept | None]) -> Kept | None:
    """What was found by this very code, else what `make` finds. `uses`: its module."""
    key, file = code_hash(uses), FOLDER / f"{cell}-{policy}.json"
    known = _read(file)
    if known is not None and known["code"] == key:
        found = known["kept"]
        return None if found is None else _kept(found)
    made = make()
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"code": key, "kept": None if made is None else asdict(made)}))
    part.replace(file)
    return made


def is_kept(cell: str, policy: str, uses: str) -> bool:
    known = _read(FOLDER / f"{cell}-{policy}.json")
    return known is not None and known["code"] == code_hash(uses)


@cache
def code_hash(uses: str) -> str:
    """Of everything loaded that a policy's run depends on."""
    digest = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "/")
        if not name.startswith(_PACKAGES) or ROOT not in path.parents:
            continue
        if name.startswith(_RIVALS) and name != uses:
            continue
        if name.startswith(_OURS) and uses != _OURS:
            continue
        without = () if uses == _OURS else _OUR_CLASSES
        digest.update(name.encode() + _code(path.read_text(), without).encode())
    return digest.hexdigest()


def _code(source: str, without: Container[str] = ()) -> str:
    """Without docstrings, comments, and the classes of these names."""
    tree = ast.parse(source)
    tree.body = [
        one for one in tree.body if not (isinstance(one, ast.ClassDef) and one.name in without)
    ]
    for node in ast.walk(tree):
        body: list[ast.stmt] = getattr(node, "body", None) or []
        if isinstance(body, list) and body and _is_text(body[0]):
            del body[0]
    return ast.dump(tree)


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if {"code", "kept"} <= found.keys() else None


def _kept(found: dict[str, Any]) -> Kept:
    sizes: Iterable[list[Any]] = found["sizes"]
    return Kept(**{**found, "sizes": tuple((float(a), int(p), int(d)) for a, p, d in sizes)})
