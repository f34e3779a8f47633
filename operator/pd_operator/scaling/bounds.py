"""PURE. From what each pool would like to what all pools may have together.

Hard: each pool's minimum and maximum, and the GPU budget over all. Then the ratio of
prefill to decode, as far as those allow. A pool that holds for want of data moves only
where the hard bounds say so.
"""

import math
from collections.abc import Collection, Mapping

from pd_operator.api import Role
from pd_operator.scaling.types import PoolSpec, Ratio, Spec

_ROUNDING = 1e-9


def settle(
    spec: Spec, wanted: Mapping[Role, int], holding: Collection[Role]
) -> tuple[dict[Role, int], dict[Role, str]]:
    """The size of each pool, and for those that don't get what they want a reason."""
    pools = {pool.role: pool for pool in spec.pools}
    sizes = {
        role: pool.replicas if pool.fixed else pool.clamp(wanted[role])
        for role, pool in pools.items()
    }
    free = [role for role in sizes if role not in holding and not pools[role].fixed]
    asked = dict(sizes)
    _wake_together(sizes, pools, free)
    _raise_to_ratio(sizes, pools, free, spec.ratio)
    before = dict(sizes)
    _fit_budget(sizes, pools, free, spec.gpus)
    _lower_to_ratio(sizes, pools, free, spec.ratio)
    poor = spec.gpus is not None and _gpus(before, pools) > spec.gpus
    reasons = {
        role: "Budget" if poor and size < before[role] else "Ratio"
        for role, size in sizes.items()
        if size != asked[role]
    }
    return sizes, reasons


def _gpus(sizes: Mapping[Role, int], pools: Mapping[Role, PoolSpec]) -> int:
    return sum(size * pools[role].gpus_each for role, size in sizes.items())


def _wake_together(
    sizes: dict[Role, int], pools: Mapping[Role, PoolSpec], free: Collection[Role]
) -> None:
    """No pool of a pair serves anybody while the other is at zero."""
    if any(sizes.values()):
        for role in free:
            sizes[role] = max(sizes[role], min(1, pools[role].maximum))


def _raise_to_ratio(
    sizes: dict[Role, int],
    pools: Mapping[Role, PoolSpec],
    free: Collection[Role],
    ratio: Ratio,
) -> None:
    """A worker too many costs a GPU, one too few a target: first the smaller pool grows."""
    if Role.PREFILL not in sizes or Role.DECODE not in sizes:
        return
    prefill, decode = sizes[Role.PREFILL], sizes[Role.DECODE]
    if Role.DECODE in free and prefill > ratio.high * decode:
        most = pools[Role.DECODE].maximum
        fitting = most if prefill > ratio.high * most else prefill / ratio.high
        sizes[Role.DECODE] = max(decode, math.ceil(fitting - _ROUNDING))
    elif Role.PREFILL in free and prefill < ratio.low * decode:
        fitting = math.ceil(ratio.low * decode - _ROUNDING)
        sizes[Role.PREFILL] = max(prefill, min(fitting, pools[Role.PREFILL].maximum))


def _lower_to_ratio(
    sizes: dict[Role, int],
    pools: Mapping[Role, PoolSpec],
    free: Collection[Role],
    ratio: Ratio,
) -> None:
    if Role.PREFILL not in sizes or Role.DECODE not in sizes:
        return
    prefill, decode = sizes[Role.PREFILL], sizes[Role.DECODE]
    if Role.PREFILL in free and prefill > ratio.high * decode:
        sizes[Role.PREFILL] = max(int(ratio.high * decode + _ROUNDING), pools[Role.PREFILL].minimum)
    elif Role.DECODE in free and prefill < ratio.low * decode:
        sizes[Role.DECODE] = max(int(prefill / ratio.low + _ROUNDING), pools[Role.DECODE].minimum)


def _fit_budget(
    sizes: dict[Role, int],
    pools: Mapping[Role, PoolSpec],
    free: Collection[Role],
    gpus: int | None,
) -> None:
    """Nobody loses what it has to another; what is left goes where most is missing."""
    if gpus is None or _gpus(sizes, pools) <= gpus:
        return
    wanted = dict(sizes)
    for role in free:
        sizes[role] = pools[role].clamp(min(wanted[role], pools[role].replicas))
    _shrink(sizes, pools, free, gpus)
    _shrink(sizes, pools, [role for role in sizes if not pools[role].fixed], gpus)
    left = gpus - _gpus(sizes, pools)
    while True:
        able = [
            role for role in free if sizes[role] < wanted[role] and pools[role].gpus_each <= left
        ]
        if not able:
            return
        poorest = min(able, key=lambda role: (sizes[role] / wanted[role], role.value))
        sizes[poorest] += 1
        left -= pools[poorest].gpus_each


def _shrink(
    sizes: dict[Role, int],
    pools: Mapping[Role, PoolSpec],
    from_roles: Collection[Role],
    gpus: int,
) -> None:
    """The budget itself got smaller: those furthest above their minimum give first."""
    while _gpus(sizes, pools) > gpus:
        able = [
            role
            for role in from_roles
            if sizes[role] > pools[role].minimum and pools[role].gpus_each
        ]
        if not able:
            return
        richest = max(able, key=lambda role: (sizes[role] - pools[role].minimum, role.value))
        sizes[richest] -= 1
