"""PURE. Who owns a pool's size, and what is written into its PDPool.

`PDPool.spec.replicas` is the truth in all modes. In mode External whoever writes it decides,
within the bounds. In mode SLO and with fixed replicas the operator does: what somebody else
writes is set back, with an event. What the operator wrote last is marked on the object in the
same write, so that even after a crash it knows its own value from another's.

Where there is no PDPool (yet, or never, on one machine), the status says the last size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pd_operator.api import GROUP, Cluster, Pool, Role, ScalingMode
from pd_operator.manifests import ROLE_LABEL, Manifest, component
from pd_operator.notices import Notice
from pd_operator.observed import Observed

KIND = "PDPool"
MARK = f"{GROUP}/replicas"
"""The size that the operator wrote last, or HANDED_OVER."""
HANDED_OVER = "External"


@dataclass(frozen=True, slots=True)
class Standing:
    """A pool's size before anything is decided. `foreign`: what somebody else wrote in vain;
    `wanted`: what mode External asks for, bounds aside."""

    role: Role
    replicas: int
    foreign: int | None = None
    wanted: int | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Set a PDPool's replicas and its mark, and nothing else of it."""

    pool: Manifest
    replicas: int
    mark: str

    @property
    def name(self) -> str:
        return str(self.pool["metadata"]["name"])


def standings(
    cluster: Cluster, observed: Observed, previous: Mapping[str, Any]
) -> dict[Role, Standing]:
    """What size each pool has by what is written; `previous` is the last status."""
    pools = _objects(observed)
    return {
        pool.role: _standing(pool, pools.get(pool.role), _last(pool.role, previous))
        for pool in cluster.pools
    }


def writes(cluster: Cluster, observed: Observed, sizes: Mapping[Role, int]) -> list[Write]:
    """What is to be written so that the PDPools say `sizes`. Nothing when they do."""
    objects = _objects(observed)
    found = []
    for pool in cluster.pools:
        item = objects.get(pool.role)
        if item is None:
            continue
        value, mark = _value(item), _mark(item)
        if _mode(pool) is not ScalingMode.EXTERNAL:
            if (value, mark) != (sizes[pool.role], str(sizes[pool.role])):
                found.append(Write(item, sizes[pool.role], str(sizes[pool.role])))
        elif mark != HANDED_OVER:
            # Handed over as it is: a value that came with the change of mode counts already.
            seed = sizes[pool.role] if not mark or value is None else value
            found.append(Write(item, seed, HANDED_OVER))
    return found


def notices(
    cluster: Cluster, before: Mapping[Role, Standing], sizes: Mapping[Role, int]
) -> list[Notice]:
    """An event for each value that is set back."""
    found = []
    for pool in cluster.pools:
        standing = before[pool.role]
        if standing.foreign in (None, sizes[pool.role]):
            continue
        who = "fixed replicas" if pool.scaling is None else "scaling in mode SLO"
        text = (
            f"{pool.role} was scaled to {standing.foreign} by somebody else, but the PDCluster "
            f"has {who}: set back to {sizes[pool.role]}. To scale it from outside, write "
            f"spec.{pool.role}.scaling.mode: External"
        )
        found.append(Notice("ScaleReverted", text, True, f"generation {standing.generation}"))
    return found


def pool_statuses(cluster: Cluster, observed: Observed) -> list[tuple[Manifest, dict[str, Any]]]:
    """The status of each PDPool that isn't as it should be."""
    changed = []
    for role, item in _objects(observed).items():
        sets = observed.pool_sets(role)
        status = {
            "replicas": sum(not pod.terminating for one in sets for pod in one.pods),
            "selector": ",".join(
                f"{name}={value}" for name, value in component(cluster, role.value).items()
            ),
            "observedGeneration": item["metadata"].get("generation", 0),
        }
        if item.get("status", {}) != status:
            changed.append((item, status))
    return changed


def _objects(observed: Observed) -> dict[Role, Manifest]:
    found = {}
    for ref, item in observed.objects.items():
        label = item["metadata"].get("labels", {}).get(ROLE_LABEL, "")
        if ref.kind == KIND and label in list(Role):
            found[Role(label)] = item
    return found


def _mode(pool: Pool) -> ScalingMode | None:
    """None: the size is fixed."""
    return pool.scaling.mode if pool.scaling else None


def _clamp(pool: Pool, replicas: int) -> int:
    if pool.scaling is None:
        return pool.replicas
    return max(pool.scaling.min_replicas, min(pool.scaling.max_replicas, replicas))


def _standing(pool: Pool, item: Manifest | None, last: int | None) -> Standing:
    known = _clamp(pool, pool.replicas if last is None else last)
    value = None if item is None else _value(item)
    mark = "" if item is None else _mark(item)
    if value is None or not mark:  # made just now: its value is the schema's default
        return Standing(pool.role, known)
    if _mode(pool) is ScalingMode.EXTERNAL:
        return Standing(pool.role, _clamp(pool, value), wanted=value)
    if mark == HANDED_OVER:
        return Standing(pool.role, _clamp(pool, value))
    ours = int(mark)
    generation = 0 if item is None else item["metadata"].get("generation", 0)
    foreign = value if value != ours else None
    return Standing(pool.role, _clamp(pool, ours), foreign=foreign, generation=generation)


def _last(role: Role, previous: Mapping[str, Any]) -> int | None:
    found = previous.get(role.value, {}).get("desired")
    return found if isinstance(found, int) else None


def _value(item: Manifest) -> int | None:
    found = item.get("spec", {}).get("replicas")
    return found if isinstance(found, int) else None


def _mark(item: Manifest) -> str:
    """Empty where there is none, or none that we would write."""
    found = str(item["metadata"].get("annotations", {}).get(MARK, ""))
    return found if found == HANDED_OVER or found.isdecimal() else ""
