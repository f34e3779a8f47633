"""PURE. The two documents of a cluster that is simulated.

The PDCluster is the one that would be applied: pools, bounds, SLO, engine settings. A second
document, `kind: Simulation`, says what the API server can't know: which model on which GPUs,
how long workers take to start, over which link KV goes, who dies when.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pd_core import estimate, known_models
from pd_core.gpus import GPUS
from pd_operator import api
from pd_operator.api import Role
from pd_sim import perf
from pd_sim import profile as profiles
from pd_sim.pools import PoolPlan
from pd_sim.profile import Profile
from pd_sim.router import RouterPlan
from pd_sim.scalers import Goal
from pd_sim.simulation import Fault, Plan

_FIELDS = {
    "model", "gpu", "gpusPerWorker", "link", "startSeconds", "failures", "overheadSeconds",
    "measured", "profile", "prefill", "decode", "colocated",
}  # fmt: skip
_POOL_FIELDS = {"gpu", "gpusPerWorker", "startSeconds", "profile"}
_DEFAULT_GOAL_S = (2.0, 0.1)


class BadScenario(ValueError):
    """The documents don't make a cluster to simulate; the message says what to write."""


Rows = Sequence[Mapping[str, str]]
Profiles = Mapping[str, Profile]
_NO_PROFILES: Profiles = {}
MAX_STEP_S = 0.5  # of prompts in a worker's step, as `--max-step-s` of the engine has it


def split(documents: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The PDCluster, and the Simulation's spec."""
    kinds = {one.get("kind"): one for one in documents if isinstance(one, dict)}
    if set(kinds) != {"PDCluster", "Simulation"} or len(documents) != 2:
        raise BadScenario("two documents are needed: a PDCluster and a Simulation")
    spec = kinds["Simulation"].get("spec")
    if not isinstance(spec, dict):
        raise BadScenario("Simulation: spec is missing")
    return kinds["PDCluster"], spec


def profile_names(spec: Mapping[str, Any]) -> list[str]:
    """Of the profiles that a Simulation names, for it and for its pools."""
    places = (spec, *(spec.get(role.value) for role in Role))
    named = [one["profile"] for one in places if isinstance(one, Mapping) and "profile" in one]
    return sorted({str(name) for name in named})


def plan(
    cluster: api.Cluster,
    spec: Mapping[str, Any],
    measured: Rows = (),
    known: Profiles = _NO_PROFILES,
) -> Plan:
    """What both documents say. `measured`: rows of `spec.measured`; `known`: the profiles
    that it names. Both are read by the caller."""
    unknown = set(spec) - _FIELDS
    if unknown:
        raise BadScenario(f"Simulation: unknown {', '.join(sorted(unknown))}")
    pools = tuple(_pool(pool, spec, measured, known) for pool in cluster.pools)
    cache = min(pool.perf.kv_tokens for pool in pools) // 512
    profile = known.get(str(spec.get("profile", "")))
    router = RouterPlan(_link(spec, profile), cache_blocks=cache)
    if profile is not None:
        router = replace(router, overhead_s=profile.overhead_s)
    if "overheadSeconds" in spec:
        router = replace(router, overhead_s=_number(spec, "overheadSeconds"))
    return Plan(pools, router, _goal(cluster), _faults(spec))


def _goal(cluster: api.Cluster) -> Goal:
    ttft, tpot = cluster.slo.ttft, cluster.slo.tpot
    return Goal(
        ttft.target_s if ttft else _DEFAULT_GOAL_S[0],
        tpot.target_s if tpot else _DEFAULT_GOAL_S[1],
        max(one.percentile for one in (ttft, tpot) if one) if ttft or tpot else 99.0,
    )


def _pool(pool: api.Pool, spec: Mapping[str, Any], measured: Rows, known: Profiles) -> PoolPlan:
    own = spec.get(pool.role.value, {})
    unknown = set(own) - _POOL_FIELDS
    if unknown:
        raise BadScenario(f"Simulation: {pool.role}: unknown {', '.join(sorted(unknown))}")
    said = {**spec, **own}
    scaling, engine = pool.scaling, pool.engine
    speed = _profiled(said, known) or engine_perf(said, measured)
    # A prefill worker has no tokens to generate: chunks would only cost it time.
    chunk = 0 if pool.role is Role.PREFILL else _chunk_tokens(engine.chunk_tokens, speed)
    return PoolPlan(
        pool.role,
        speed,
        replicas=pool.replicas,
        minimum=scaling.min_replicas if scaling else pool.replicas,
        maximum=scaling.max_replicas if scaling else pool.replicas,
        start_s=_number(said, "startSeconds", 60.0),
        chunk_tokens=chunk,
        max_running=engine.max_running,
    )


def _chunk_tokens(asked: int, speed: perf.Perf) -> int:
    """As workers cut prompts: by tokens where that is asked for, and by time."""
    most = max(int(MAX_STEP_S / speed.token_s), 1)
    return min(asked or most, most)


def _profiled(said: Mapping[str, Any], known: Profiles) -> perf.Perf | None:
    """A worker's speed as `pdcluster profile` has measured it, where a profile is named."""
    if "profile" not in said:
        return None
    return profiles.perf(known[str(said["profile"])], int(_number(said, "gpusPerWorker", 1)))


def engine_perf(said: Mapping[str, Any], measured: Rows) -> perf.Perf:
    """A worker's speed: from measurements where there are some of its kind."""
    name, gpu_name = str(said.get("model", "")), str(said.get("gpu", "h100"))
    model, gpu = known_models.find(name), GPUS.get(gpu_name)
    if model is None:
        raise BadScenario(f"model {name!r}: one of {', '.join(known_models.KNOWN_MODELS)}")
    if gpu is None:
        raise BadScenario(f"gpu {gpu_name!r}: one of {', '.join(GPUS)}")
    gpus = int(_number(said, "gpusPerWorker", 1))
    for row_model, row_gpu in {(row["model"], row["hardware"]) for row in measured}:
        if _plain(row_model) == _plain(model.name) and row_gpu.partition("-")[0] == gpu.name:
            if row_gpu.count("-") > 1:  # under a power cap
                continue
            found = perf.read_measured(measured, row_model, row_gpu, gpus)
            if len(found.prompts_s) > 1:
                return perf.fit(model, gpu, gpus, found)
    try:
        return perf.from_data_sheet(model, gpu, gpus)
    except ValueError as error:
        raise BadScenario(str(error)) from None


def _plain(name: str) -> str:
    return name.replace("-", "")


def _link(spec: Mapping[str, Any], profile: Profile | None) -> estimate.Link:
    if profile is not None and "link" not in spec:
        return profiles.link(profile)
    try:
        return estimate.link(str(spec.get("link", "rdma-400g")))
    except ValueError as error:
        raise BadScenario(str(error)) from None


def _faults(spec: Mapping[str, Any]) -> tuple[Fault, ...]:
    try:
        return tuple(
            Fault(float(one["atSeconds"]), Role(one["pool"]), int(one.get("ordinal", 0)))
            for one in spec.get("failures", ())
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadScenario(f"failures: atSeconds, pool and ordinal are needed: {error}") from None


def _number(said: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = said.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise BadScenario(f"Simulation: {name} is {value!r}: a number from 0 on is needed")
    return float(value)
