"""PURE. A PDCluster's token: the Secret that its routers and workers prove themselves by.

Where this operator may read Secrets, the token is followed by the next one, as authorities of
certificates are: the next is accepted everywhere before anybody proves with it, and the one
before is accepted until nobody does. Where it may only create them, the first one stays until
somebody writes another.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from pd_core.proof import parse_tokens
from pd_operator.api import GROUP, Cluster
from pd_operator.manifests import owned, selector
from pd_operator.observed import Ref
from pd_operator.podparts import Manifest
from pd_operator.tlsobjects import decoded, encoded

TOKEN_PATH = "/etc/pdcluster/token"
TOKEN_VOLUME = "peer-token"
FILE = "tokens"
STEP_ANNOTATION = f"{GROUP}/token-step"
SINCE_ANNOTATION = f"{GROUP}/token-since"
_ONLY_ITS_USER = 0o440


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """`life`: after so long there is to be another one. `overlap`: the longest that a new version
    of a Secret may take to reach every pod, with room to spare."""

    life: timedelta = timedelta(days=30)
    overlap: timedelta = timedelta(days=1)


class Step(StrEnum):
    """How far one token has followed another. The first of a file is the one that is proven."""

    SETTLED = "settled"  # there is one
    NEXT_KNOWN = "next-known"  # the second of two is accepted, and not used yet
    NEXT_USED = "next-used"  # the second of two is the one before


@dataclass(frozen=True, slots=True)
class Kept:
    """What is to be in the Secret: tokens, and since when."""

    tokens: tuple[bytes, ...] = field(repr=False)
    step: Step
    since: datetime


def plan(kept: Kept | None, terms: TokenTerms, now: datetime, fresh: bytes) -> Kept:
    """What is to be there now; `fresh` is used where one more is due."""
    if kept is None:
        return Kept((fresh,), Step.SETTLED, now)
    if now < due(kept, terms):
        return kept
    match kept.step:
        case Step.SETTLED:
            return Kept((*kept.tokens[:1], fresh), Step.NEXT_KNOWN, now)
        case Step.NEXT_KNOWN:
            return Kept(tuple(reversed(kept.tokens)), Step.NEXT_USED, now)
        case Step.NEXT_USED:
            return Kept(kept.tokens[:1], Step.SETTLED, now)


def due(kept: Kept, terms: TokenTerms) -> datetime:
    return kept.since + (terms.life if kept.step is Step.SETTLED else terms.overlap)


# ---- objects -------------------------------------------------------------------------


def secret_name(cluster: Cluster) -> str:
    return f"{cluster.name}-token"


def flags() -> list[str]:
    """Of routers and workers."""
    return [f"--token-file={TOKEN_PATH}/{FILE}"]


def volume(cluster: Cluster) -> tuple[Manifest, Manifest]:
    """The volume and its mount. Without the Secret no pod starts."""
    source = {"secretName": secret_name(cluster), "defaultMode": _ONLY_ITS_USER}
    mount = {"name": TOKEN_VOLUME, "mountPath": TOKEN_PATH, "readOnly": True}
    return {"name": TOKEN_VOLUME, "secret": source}, mount


def has_token(template: Manifest) -> bool:
    """Whether pods of this template prove themselves by it, and want to be proven to."""
    volumes = (template.get("spec") or {}).get("volumes") or ()
    return any(one["name"] == TOKEN_VOLUME for one in volumes)


def all_have_token(sets: Iterable[Manifest]) -> bool:
    return all(has_token(one["spec"]["template"]) for one in sets)


def secret(cluster: Cluster, kept: Kept) -> Manifest:
    made = owned(
        cluster, "v1", "Secret", secret_name(cluster), selector(cluster),
        {"type": "Opaque", "data": encoded({FILE: b"\n".join(kept.tokens) + b"\n"})},
    )  # fmt: skip
    marks = {
        STEP_ANNOTATION: kept.step.value,
        SINCE_ANNOTATION: kept.since.isoformat(timespec="seconds"),
    }
    metadata = made["metadata"]
    return {**made, "metadata": {**metadata, "annotations": {**metadata["annotations"], **marks}}}


def read(found: Manifest | None, now: datetime) -> Kept | None:
    """What a Secret says; None where it's of no use. What has no marks of ours, or wrong ones, was
    written by somebody, and counts from now on."""
    if found is None:
        return None
    try:
        tokens = parse_tokens(decoded(found).get(FILE, b""))
    except ValueError:
        return None
    marks = found["metadata"].get("annotations") or {}
    try:
        step, since = Step(marks[STEP_ANNOTATION]), datetime.fromisoformat(marks[SINCE_ANNOTATION])
        since = min(since, now)  # TypeError: without a time zone
    except (LookupError, TypeError, ValueError):
        step, since = Step.SETTLED, now
    if len(tokens) != (1 if step is Step.SETTLED else 2):
        step, since = Step.SETTLED, now
    return Kept(tokens, step, since)


@dataclass(frozen=True, slots=True)
class Token:
    """The Secret, and when another may be due."""

    manifest: Manifest = field(repr=False)
    due: datetime


def keep(
    cluster: Cluster,
    objects: Mapping[Ref, Manifest],
    terms: TokenTerms,
    now: datetime,
    fresh: bytes,
) -> Token:
    """The Secret as it is to be, from the one that exists; `fresh` is for where one is due."""
    found = objects.get(Ref("Secret", secret_name(cluster)))
    kept = plan(read(found, now), terms, now, fresh)
    return Token(secret(cluster, kept), due(kept, terms))
