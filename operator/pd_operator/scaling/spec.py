"""PURE. What the PDCluster says about scaling, as `decide` wants it."""

from collections.abc import Mapping

from pd_operator.api import Cluster, Pool, Role, ScalingMode
from pd_operator.api import Target as ApiTarget
from pd_operator.scaling.types import PoolSpec, Ratio, Spec, Target


def spec_of(cluster: Cluster, present: Mapping[Role, int]) -> Spec:
    """`present`: the size of each pool now, as asked for."""
    ratio = Ratio(cluster.ratio.low, cluster.ratio.high) if cluster.ratio else Ratio()
    pools = tuple(_pool(cluster, pool, present[pool.role]) for pool in cluster.pools)
    return Spec(pools, cluster.gpus, ratio)


def is_scaled(cluster: Cluster) -> bool:
    """Whether the size of any pool is the operator's to decide."""
    return any(_is_ours(pool) for pool in cluster.pools)


def longest_window_s(spec: Spec) -> float:
    """How far back readings matter."""
    return max((pool.window_s for pool in spec.pools if not pool.fixed), default=0.0)


def _is_ours(pool: Pool) -> bool:
    return pool.scaling is not None and pool.scaling.mode is ScalingMode.SLO


def _pool(cluster: Cluster, pool: Pool, present: int) -> PoolSpec:
    scaling = pool.scaling
    if scaling is None or scaling.mode is not ScalingMode.SLO:
        return PoolSpec(pool.role, present, present, present, gpus_each=pool.gpus_each, fixed=True)
    return PoolSpec(
        pool.role,
        present,
        minimum=scaling.min_replicas,
        maximum=scaling.max_replicas,
        gpus_each=pool.gpus_each,
        ttft=_target(cluster.slo.ttft),
        tpot=_target(cluster.slo.tpot) if pool.role is not Role.PREFILL else None,
        window_s=scaling.window_s,
        panic_window_s=scaling.panic_window_s,
        stabilization_s=scaling.scale_down_window_s,
    )


def _target(target: ApiTarget | None) -> Target | None:
    return Target(target.percentile, target.target_s) if target else None
