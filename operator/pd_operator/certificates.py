"""A PDCluster's certificates by an authority of its own: from Secrets that exist to those that
should. `tlsplan` says what is due, `pki` makes it.

Two steps, the second on what the first has left: an authority issues nothing before it is kept
where the next look finds it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import isinf

from pd_core.identity import Identity, Part
from pd_operator import pki, tlsobjects, tlsplan
from pd_operator.api import Cluster
from pd_operator.keys import Key
from pd_operator.observed import Ref
from pd_operator.pki import Known, Pair
from pd_operator.podparts import Manifest
from pd_operator.status import timestamp
from pd_operator.tlsobjects import BUNDLE, CERTIFICATE, KEY
from pd_operator.tlsplan import Held, Leaf, Terms

_CERTIFICATE_END, _KEY_END = ".crt", ".key"
Objects = Mapping[Ref, Manifest]


@dataclass(frozen=True, slots=True)
class Certified:
    """The Secrets, and when others may be due; None: time changes nothing."""

    secrets: tuple[Manifest, ...] = field(default=(), repr=False)
    due: datetime | None = None

    def due_s(self, now: datetime) -> float:
        return float("inf") if self.due is None else (self.due - now).total_seconds()


@dataclass(frozen=True, slots=True)
class _Read:
    """What the Secrets say. `there`: the one with the authorities exists."""

    there: bool
    authorities: dict[str, Known]
    leaves: dict[Part, dict[str, bytes]]
    held: Held


class Certifier:
    """What is remembered spares reading the same certificates again."""

    def __init__(self, terms: Terms | None = None) -> None:
        self._terms = terms or Terms()
        self._calm: dict[Key, tuple[tuple[Manifest | None, ...], Certified]] = {}
        self._in_use: dict[Key, tuple[Leaf, ...]] = {}

    def forget(self, key: Key) -> None:
        self._calm.pop(key, None)
        self._in_use.pop(key, None)

    def age_share(self, now: datetime) -> float:
        """The largest share of its life that a certificate in use has behind it; 0: none is."""
        leaves = [leaf for found in self._in_use.values() for leaf in found]
        return max((leaf.age_share(now) for leaf in leaves), default=0.0)

    def settled(
        self, key: Key, cluster: Cluster, objects: Objects, now: datetime
    ) -> Certified | None:
        """What the last look found, where the next would find the same."""
        found = self._calm.get(key)
        if found is None or found[0] != _all_secrets(cluster, objects) or found[1].due_s(now) <= 0:
            return None
        return found[1]

    def authority(self, cluster: Cluster, objects: Objects, now: datetime) -> Manifest:
        """The Secret with the authorities: those that are trusted, and a new one where it's
        time."""
        read = _read(cluster, objects)
        kept = read.authorities
        if tlsplan.needs_authority(read.held, self._terms, now):
            made = pki.read_authority(pki.make_authority(now, self._terms.authority))
            assert made is not None
            kept = {**kept, made.facts.id: made}
            return _authority_secret(cluster, kept.values())
        trusted = tlsplan.plan(read.held, self._terms, now).trusted
        return _authority_secret(cluster, [kept[name] for name in trusted])

    def certify(self, key: Key, cluster: Cluster, objects: Objects, now: datetime) -> Certified:
        """All Secrets, with certificates by an authority that is kept. Without one, what there
        is stays as it is."""
        read = _read(cluster, objects)
        # What is due below is in use once it has been written: the next look sees it.
        self._in_use[key] = tuple(leaf for leaf in read.held.leaves.values() if leaf is not None)
        plan = tlsplan.plan(read.held, self._terms, now)
        bundle = b"".join(read.authorities[name].pair.certificate for name in plan.trusted)
        # An authority that isn't there yet couldn't be: nothing is issued by it.
        found = [self.authority(cluster, objects, now)] if read.there else []
        for part, files in read.leaves.items():
            if part in plan.renew:
                identity = _identity(cluster, part)
                made = pki.make_leaf(read.authorities[plan.issuer], identity, now, self._terms.leaf)
                files = {CERTIFICATE: made.certificate, KEY: made.key}
            elif not plan.issuer:
                continue
            since = _since(_secret(cluster, part, objects))
            if since is None or read.leaves[part].get(BUNDLE) != bundle:
                since = now
            wanted = {BUNDLE: bundle, CERTIFICATE: files[CERTIFICATE], KEY: files[KEY]}
            found.append(tlsobjects.leaf_secret(cluster, part, wanted, timestamp(since)))
        due = None if isinf(plan.due_s) else now + timedelta(seconds=plan.due_s)
        certified = Certified(tuple(found), due)
        if plan.issuer:
            self._calm[key] = (_all_secrets(cluster, objects), certified)
        return certified


def _authority_secret(cluster: Cluster, authorities: Iterable[Known]) -> Manifest:
    files = {}
    for one in authorities:
        files[one.facts.id + _CERTIFICATE_END] = one.pair.certificate
        if one.facts.signs:
            files[one.facts.id + _KEY_END] = one.pair.key
    return tlsobjects.authority_secret(cluster, files)


def _all_secrets(cluster: Cluster, objects: Objects) -> tuple[Manifest | None, ...]:
    names = [tlsobjects.authority_name(cluster)]
    names += [tlsobjects.secret_name(cluster, part) for part in Part]
    return tuple(objects.get(Ref("Secret", name)) for name in names)


def _read(cluster: Cluster, objects: Objects) -> _Read:
    own = objects.get(Ref("Secret", tlsobjects.authority_name(cluster)))
    kept = _authorities(own)
    secrets = {part: _secret(cluster, part, objects) for part in Part}
    files = {part: tlsobjects.decoded(one) if one else {} for part, one in secrets.items()}
    if not any(one.facts.signs for one in kept.values()):
        # The keys are lost. What pods trust goes on being trusted, until they know the next.
        for one in files.values():
            kept |= {known.facts.id: known for known in pki.read_bundle(one.get(BUNDLE, b""))}
    leaves: dict[Part, Leaf | None] = {}
    for part, one in files.items():
        pair = Pair(one.get(CERTIFICATE, b""), one.get(KEY, b""))
        leaves[part] = pki.read_leaf(pair, _identity(cluster, part), kept.values())
    told = [one for one in secrets.values() if one is not None]
    since = [_since(one) for one in told]
    trusted = [
        {known.facts.id for known in pki.read_bundle(one.get(BUNDLE, b""))}
        for one in files.values()
        if one
    ]
    held = Held(
        tuple(one.facts for one in kept.values()),
        leaves,
        frozenset(set.intersection(*trusted)) if trusted else frozenset(),
        max((one for one in since if one), default=None) if all(since) else None,
    )
    return _Read(own is not None, kept, files, held)


def _authorities(secret: Manifest | None) -> dict[str, Known]:
    found = {}
    files = tlsobjects.decoded(secret) if secret else {}
    for name, text in files.items():
        stem, end = name[: -len(_CERTIFICATE_END)], name[-len(_CERTIFICATE_END) :]
        if end == _CERTIFICATE_END:
            read = pki.read_authority(Pair(text, files.get(stem + _KEY_END, b"")))
            if read is not None:
                found[read.facts.id] = read
    return found


def _secret(cluster: Cluster, part: Part, objects: Objects) -> Manifest | None:
    return objects.get(Ref("Secret", tlsobjects.secret_name(cluster, part)))


def _since(secret: Manifest | None) -> datetime | None:
    """From when on its bundle has been what it is."""
    annotations = (secret or {"metadata": {}})["metadata"].get("annotations") or {}
    try:
        return datetime.fromisoformat(annotations[tlsobjects.SINCE_ANNOTATION])
    except (KeyError, TypeError, ValueError):
        return None


def _identity(cluster: Cluster, part: Part) -> Identity:
    return Identity(cluster.namespace, cluster.name, part)
