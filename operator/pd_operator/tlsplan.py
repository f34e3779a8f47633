"""PURE. When authorities and certificates are made, renewed, and no longer trusted.

Two authorities overlap: the next one is trusted for a while before anything of it is used, and
the one before is trusted until what it issued has been out of use for as long. Everything
follows from what exists and from the time; nothing is remembered.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from pd_core.identity import Part


@dataclass(frozen=True, slots=True)
class Terms:
    """How long things hold. `..._left`: with so much left the next one is made. `overlap`: the
    longest that a new version of a Secret may take to reach every pod, with room to spare.
    """

    authority: timedelta = timedelta(days=365)
    authority_left: timedelta = timedelta(days=90)
    leaf: timedelta = timedelta(days=30)
    leaf_left: timedelta = timedelta(days=10)
    overlap: timedelta = timedelta(days=1)

    def __post_init__(self) -> None:
        """What an authority issues must not outlive it, nor be due at once."""
        if not self.leaf_left < self.leaf:
            raise ValueError("leaf_left must be less than leaf")
        if not self.leaf + self.overlap < self.authority_left < self.authority:
            raise ValueError("authority_left must be more than leaf + overlap, less than authority")


@dataclass(frozen=True, slots=True)
class Authority:
    """`signs`: its key is there, too."""

    id: str
    created: datetime
    expires: datetime
    signs: bool = True


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate that can be used; `issuer` is the id of an authority."""

    issuer: str
    created: datetime
    expires: datetime

    def age_share(self, now: datetime) -> float:
        """How much of its life is over; beyond 1 it has ended."""
        return (now - self.created) / (self.expires - self.created)


@dataclass(frozen=True, slots=True)
class Held:
    """What exists. A leaf that is None is missing, or of no use. All pods have been told to
    trust these authorities since `since`; None: no pod has been told of any."""

    authorities: tuple[Authority, ...]
    leaves: Mapping[Part, Leaf | None]
    trusted: frozenset[str] = frozenset()
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What should exist. `renew` are the parts that need a new certificate, by `issuer`; with
    no issuer none can be had. `due_s`: when the plan may be another one, by time alone."""

    trusted: tuple[str, ...]
    issuer: str
    renew: frozenset[Part]
    due_s: float


def needs_authority(held: Held, terms: Terms, now: datetime) -> bool:
    """Whether there is to be one more, before anything else."""
    newest = max(_signers(held, now), key=_age_order, default=None)
    return newest is None or newest.expires - now <= terms.authority_left


def plan(held: Held, terms: Terms, now: datetime) -> Plan:
    """What is to exist, with the authorities that there are."""
    issuer = _issuer(held, terms, now)
    living = [one for one in held.authorities if one.expires > now]
    retired = _retired(held, issuer, terms, now)
    trusted = tuple(sorted(one.id for one in living if one.id not in retired))
    renew = frozenset(
        part
        for part, leaf in held.leaves.items()
        if _is_due(leaf, held, trusted, issuer, terms, now)
    )
    due_s = _due_s(held, terms, now)
    if renew or set(trusted) != held.trusted:  # what is made now is to be looked at again
        due_s = min(
            due_s, *(one.total_seconds() for one in (terms.overlap, terms.leaf - terms.leaf_left))
        )
    return Plan(trusted, issuer.id if issuer else "", renew if issuer else frozenset(), due_s)


def _age_order(one: Authority) -> tuple[datetime, str]:
    return one.created, one.id


def _signers(held: Held, now: datetime) -> list[Authority]:
    return [one for one in held.authorities if one.signs and one.expires > now]


def _is_known_everywhere(one: Authority, held: Held, terms: Terms, now: datetime) -> bool:
    """Whether every pod has had the time to hear that it is to be trusted."""
    return one.id in held.trusted and held.since is not None and now - held.since >= terms.overlap


def _issuer(held: Held, terms: Terms, now: datetime) -> Authority | None:
    """The newest that is known everywhere; before there is any, the oldest that lasts."""
    signers = sorted(_signers(held, now), key=_age_order)
    lasting = [one for one in signers if one.expires - now >= terms.leaf] or signers[-1:]
    known = [one for one in lasting if _is_known_everywhere(one, held, terms, now)]
    return known[-1] if known else next(iter(lasting), None)


def _is_due(
    leaf: Leaf | None,
    held: Held,
    trusted: tuple[str, ...],
    issuer: Authority | None,
    terms: Terms,
    now: datetime,
) -> bool:
    if leaf is None or leaf.issuer not in trusted or leaf.expires - now <= terms.leaf_left:
        return True
    return (
        issuer is not None
        and leaf.issuer != issuer.id
        and _is_known_everywhere(issuer, held, terms, now)
    )


def _retired(held: Held, issuer: Authority | None, terms: Terms, now: datetime) -> set[str]:
    """Older ones whose last certificates have been out of use for long enough."""
    leaves = [leaf for leaf in held.leaves.values() if leaf is not None]
    if issuer is None or len(leaves) < len(held.leaves):
        return set()
    if any(now - leaf.created < terms.overlap for leaf in leaves):
        return set()
    used = {issuer.id, *(leaf.issuer for leaf in leaves)}
    return {one.id for one in held.authorities if one.created < issuer.created} - used


def _due_s(held: Held, terms: Terms, now: datetime) -> float:
    """Until something expires, is to be renewed, or has been known for long enough."""
    leaves = [leaf for leaf in held.leaves.values() if leaf is not None]
    moments = [one.expires - terms.authority_left for one in held.authorities]
    moments += [one.expires for one in held.authorities]
    moments += [leaf.expires - terms.leaf_left for leaf in leaves]
    moments += [leaf.created + terms.overlap for leaf in leaves]
    if held.since is not None:
        moments.append(held.since + terms.overlap)
    ahead = [(one - now).total_seconds() for one in moments if one > now]
    return min(ahead, default=float("inf"))
