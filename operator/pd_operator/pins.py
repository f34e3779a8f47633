"""PURE. An operator's upgrade rolls no pool: what was rendered stays until it is edited.

Each StatefulSet carries what it was rendered from and to, packed into an annotation. As
long as the user's part of that is the same, a newer operator, with other defaults, images
or templates, goes on wanting what is recorded. An edit of what makes the pool's pods differ
renders it anew, and so does another value of the annotation `pdcluster.dev/upgrade` at the
PDCluster. docs/adr/0008 says why.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pd_operator import api, children
from pd_operator.api import (
    UPGRADE_ANNOTATION,
    Cluster,
    InvalidCluster,
    Pool,
    Role,
    Rollout,
    Router,
    Slo,
    Template,
)
from pd_operator.manifests import REVISION_LABEL, canonical, stamped
from pd_operator.observed import Observed, Ref, SetView
from pd_operator.podparts import Manifest

if TYPE_CHECKING:
    from pd_operator.desired import Desired, DesiredPool

RECORD_ANNOTATION = f"{api.GROUP}/rendered"
VERSION_ANNOTATION = f"{api.GROUP}/rendered-by"
_NO_ROUTER = Router(0, Template())


@dataclass(frozen=True, slots=True)
class _Record:
    inputs: Cluster
    manifest: Manifest


def inputs_of(cluster: Cluster, role: Role) -> Cluster:
    """The cluster with only what makes this pool's pods differ; all else is blank.

    Of the other pool that is what a pair of workers must have in common.
    """
    return replace(
        cluster,
        uid="",
        generation=0,
        slo=Slo(),
        pools=tuple(_own(pool) if pool.role is role else _other(pool) for pool in cluster.pools),
        router=_NO_ROUTER,
        rollout=Rollout(0, 0, cluster.rollout.drain_timeout_s, 0.0),
        gpus=None,
        ratio=None,
        spec={},
    )


def _own(pool: Pool) -> Pool:
    return replace(pool, replicas=0, scaling=None)


def _other(pool: Pool) -> Pool:
    engine = replace(
        pool.engine, chunk_tokens=0, max_batch_tokens=0, block_tokens=0, dtype="",
        max_running=0, max_queued=0, threads=0, kv_cache_tokens=None, kv_cache_fraction=None,
        draft_tokens=None, retention=None, draft_model=None,
    )  # fmt: skip
    return Pool(pool.role, 0, None, None, 0.0, engine, Template(image=pool.template.image))


def recorded(manifest: Manifest, cluster: Cluster, role: Role, version: str) -> Manifest:
    """The manifest with its record."""
    spec = {key: value for key, value in manifest["spec"].items() if key != "replicas"}
    plain = {key: value for key, value in manifest["metadata"].items() if key != "annotations"}
    content = {
        "document": _document(cluster, role),
        "manifest": {**manifest, "metadata": plain, "spec": spec},
    }
    packed = base64.b64encode(zlib.compress(canonical(content), 9)).decode()
    annotations = {
        **manifest["metadata"]["annotations"],
        RECORD_ANNOTATION: packed,
        VERSION_ANNOTATION: version,
    }
    return {**manifest, "metadata": {**plain, "annotations": annotations}}


def _document(cluster: Cluster, role: Role) -> Manifest:
    """What the user wrote of a pool's inputs, so that a later version can read it again:
    a field that it knows and we don't has the same default here as there."""
    written = cluster.spec
    spec: dict[str, Any] = {
        name: written[name] for name in ("model", "kvTransfer") if name in written
    }
    tls = (written.get("security") or {}).get("tls")
    if tls is not None:
        spec["security"] = {"tls": tls}
    drain = (written.get("rollout") or {}).get("drainTimeout")
    if drain is not None:
        spec["rollout"] = {"drainTimeout": drain}
    for pool in cluster.pools:
        mine = pool.role is role
        body = written.get(pool.role.value) or {}
        spec[pool.role.value] = _own_document(body) if mine else _other_document(pool)
    metadata: dict[str, Any] = {"name": cluster.name, "namespace": cluster.namespace}
    if cluster.upgrade:
        metadata["annotations"] = {UPGRADE_ANNOTATION: cluster.upgrade}
    return {
        "apiVersion": api.API_VERSION,
        "kind": api.KIND,
        "metadata": metadata,
        "spec": spec,
    }


def _own_document(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("replicas", "scaling")}


def _other_document(pool: Pool) -> dict[str, Any]:
    if not pool.template.image:
        return {}
    container = {"name": "engine", "image": pool.template.image}
    return {"template": {"spec": {"containers": [container]}}}


def keep(desired: "Desired", cluster: Cluster, observed: Observed) -> "Desired":
    """What is desired, but for pools whose inputs are those of a set that exists: these
    stay as they were rendered then."""
    pools = tuple(_kept(pool, cluster, observed) for pool in desired.pools)
    return desired if pools == desired.pools else replace(desired, pools=pools)


def _kept(pool: "DesiredPool", cluster: Cluster, observed: Observed) -> "DesiredPool":
    fresh = pool.stateful_set["metadata"]["annotations"][RECORD_ANNOTATION]
    inputs = inputs_of(cluster, pool.role)
    found: tuple[int, SetView, str, Manifest] | None = None
    for item in observed.pool_sets(pool.role):
        text = _annotation(observed, item)
        if text == fresh:
            return pool
        record = _unpacked(text)
        if record is None or record.inputs != inputs or _uid(record.manifest) != cluster.uid:
            continue
        if found is None or item.serving > found[0]:
            found = (item.serving, item, text, record.manifest)
    if found is None:
        return pool
    _, item, text, manifest = found
    return _from_record(pool, cluster, text, manifest, _version(observed, item))


def _from_record(
    pool: "DesiredPool", cluster: Cluster, text: str, manifest: Manifest, version: str
) -> "DesiredPool":
    name = manifest["metadata"]["name"]
    revision = manifest["metadata"]["labels"][REVISION_LABEL]
    spec = {"replicas": pool.replicas, **manifest["spec"]}
    annotations = {RECORD_ANNOTATION: text, VERSION_ANNOTATION: version}
    return replace(
        pool,
        revision=revision,
        service=children.pool_service(cluster, pool.role, name, revision),
        stateful_set=stamped({**manifest, "spec": spec}, annotations),
    )


def _annotations(observed: Observed, item: SetView) -> Mapping[str, str]:
    found = observed.objects[Ref("StatefulSet", item.name)]["metadata"]
    annotations: Mapping[str, str] = found.get("annotations") or {}
    return annotations


def _annotation(observed: Observed, item: SetView) -> str:
    return _annotations(observed, item).get(RECORD_ANNOTATION, "")


def _version(observed: Observed, item: SetView) -> str:
    return _annotations(observed, item).get(VERSION_ANNOTATION, "")


def _uid(manifest: Manifest) -> str:
    return str(manifest["metadata"]["ownerReferences"][0]["uid"])


def _unpacked(text: str) -> _Record | None:
    """None where there is nothing that this version can read: the pool is rendered anew."""
    try:
        content = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
        cluster = api.parse(content["document"])
        manifest = content["manifest"]
        role = Role(manifest["metadata"]["labels"][f"{api.GROUP}/role"])
        return _Record(inputs_of(cluster, role), manifest)
    except (ValueError, KeyError, TypeError, zlib.error, InvalidCluster):
        return None
