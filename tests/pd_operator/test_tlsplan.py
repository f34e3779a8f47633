"""When authorities and certificates change: each step in order, and, whatever is lost or late,
everybody who was told in time trusts everybody else, and nothing is written without a reason."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.identity import Part
from pd_operator import tlsplan
from pd_operator.tlsplan import Authority, Held, Leaf, Plan, Terms

TERMS = Terms()
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)


@dataclass
class World:
    """The Secrets of one PDCluster, as an operator that follows plans leaves them."""

    now: datetime = BEGIN
    authorities: list[Authority] = field(default_factory=list)
    leaves: dict[Part, Leaf | None] = field(default_factory=lambda: dict.fromkeys(Part))
    trusted: frozenset[str] = frozenset()
    since: datetime | None = None
    made: int = 0

    @property
    def held(self) -> Held:
        return Held(tuple(self.authorities), self.leaves, self.trusted, self.since)

    def look(self) -> Plan:
        if tlsplan.needs_authority(self.held, TERMS, self.now):
            self.made += 1
            name = f"authority-{self.made}"
            self.authorities.append(Authority(name, self.now, self.now + TERMS.authority))
        plan = tlsplan.plan(self.held, TERMS, self.now)
        self.authorities = [one for one in self.authorities if one.id in plan.trusted]
        [issuer] = [one for one in self.authorities if one.id == plan.issuer]
        for part in plan.renew:
            until = min(self.now + TERMS.leaf, issuer.expires)
            self.leaves[part] = Leaf(plan.issuer, self.now, until)
        if frozenset(plan.trusted) != self.trusted:
            self.trusted, self.since = frozenset(plan.trusted), self.now
        return plan

    def issuers(self) -> set[str]:
        return {leaf.issuer for leaf in self.leaves.values() if leaf is not None}


def begun() -> World:
    world = World()
    world.look()
    return world


def test_at_first_all_is_made_at_once() -> None:
    world = begun()
    assert world.issuers() == world.trusted == {"authority-1"}
    assert world.look().renew == frozenset()


def test_a_certificate_is_renewed_before_it_ends_by_the_same_authority() -> None:
    world = begun()
    world.now += TERMS.leaf - TERMS.leaf_left - timedelta(seconds=1)
    assert not world.look().renew
    world.now += timedelta(seconds=1)
    assert world.look().renew == frozenset(Part)
    assert world.issuers() == {"authority-1"}


def test_the_next_authority_is_trusted_before_it_is_used_and_the_last_one_after() -> None:
    world = begun()
    seen = []
    for _ in range(400):
        world.look()
        state = (sorted(world.trusted), sorted(world.issuers()))
        if not seen or seen[-1] != state:
            seen.append(state)
        world.now += DAY
    one, two = "authority-1", "authority-2"
    assert seen[:4] == [([one], [one]), ([one, two], [one]), ([one, two], [two]), ([two], [two])]


def test_due_says_when() -> None:
    """Looked at only when the plan says so, all happens as it does with a look a day."""
    world = begun()
    for _ in range(60):
        plan = world.look()
        assert 0 < plan.due_s <= TERMS.authority.total_seconds()
        world.now += timedelta(seconds=plan.due_s)
    assert world.made > 2
    assert all(leaf is not None and leaf.expires > world.now for leaf in world.leaves.values())


def test_an_authority_that_pods_were_not_told_of_issues_nothing_yet() -> None:
    """The operator ended between the two writes, and came back much later."""
    world = begun()
    world.now += TERMS.authority - TERMS.authority_left
    world.look()
    world.trusted = frozenset({"authority-1"})  # what pods have: the second was never written
    world.now += 5 * DAY
    world.look()
    assert world.issuers() == {"authority-1"}
    assert world.trusted == {"authority-1", "authority-2"}
    world.now += TERMS.overlap
    world.look()
    assert world.issuers() == {"authority-2"}


def test_lost_keys_cost_no_connection() -> None:
    """The authority's Secret is gone; what pods trust is known from theirs."""
    world = begun()
    world.now += 3 * DAY
    [old] = world.authorities
    world.authorities = [replace(old, signs=False)]
    world.look()
    assert world.issuers() == {"authority-1"}
    assert world.trusted == {"authority-1", "authority-2"}
    for _ in range(3):
        world.now += TERMS.overlap
        world.look()
    assert world.issuers() == world.trusted == {"authority-2"}


def test_a_certificate_that_is_lost_is_made_at_once() -> None:
    world = begun()
    world.leaves[Part.ROUTER] = None
    assert world.look().renew == {Part.ROUTER}


def test_without_an_authority_nothing_is_planned() -> None:
    plan = tlsplan.plan(Held((), dict.fromkeys(Part)), TERMS, BEGIN)
    assert (plan.trusted, plan.issuer, plan.renew) == ((), "", frozenset())


@pytest.mark.parametrize(
    "changes",
    [
        {"leaf_left": TERMS.leaf},
        {"authority_left": TERMS.leaf},
        {"authority": TERMS.authority_left},
    ],
)
def test_terms_that_cannot_hold_are_refused(changes: dict[str, timedelta]) -> None:
    with pytest.raises(ValueError, match="must be"):
        replace(TERMS, **changes)


@given(
    pauses=st.lists(st.floats(0, 30), min_size=1, max_size=60),
    late_days=st.floats(0, 0.99),
)
def test_pods_that_hear_late_trust_each_other(pauses: list[float], late_days: float) -> None:
    """However often an operator looks: a pod with the Secrets of some time ago, less than the
    overlap, accepts one with those of now, and the other way."""
    world = begun()
    history = [(world.now, world.trusted, dict(world.leaves))]
    for pause in pauses:
        world.now += timedelta(days=pause)
        world.look()
        history.append((world.now, world.trusted, dict(world.leaves)))
        late = world.now - timedelta(days=late_days)
        _, trusted, leaves = max(
            (one for one in history if one[0] <= late), key=lambda one: one[0], default=history[0]
        )
        for part in Part:
            old, new = leaves[part], world.leaves[part]
            assert old is not None
            assert new is not None
            assert new.expires > world.now
            if old.expires > world.now:  # else nobody looked for too long
                assert old.issuer in world.trusted
                assert new.issuer in trusted


@given(st.lists(st.floats(0.001, 400), min_size=1, max_size=20))
def test_looking_again_at_once_changes_nothing(pauses: list[float]) -> None:
    """Zero writes when nothing is due, after any absence."""
    world = begun()
    for pause in pauses:
        world.now += timedelta(days=pause)
        for _ in range(3):
            world.look()
        before = (world.trusted, dict(world.leaves), list(world.authorities), world.since)
        assert not world.look().renew
        assert before == (world.trusted, world.leaves, world.authorities, world.since)
