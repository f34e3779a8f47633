"""Covers e2e.truth: what clients saw against what alerts said."""

import pytest

from e2e import truth
from e2e.truth import Rule, Seen

RULE = Rule("Burns", "ttft", 0.3, ((180, 15),), lasting_s=6, late_s=5.0)
SLACK_S = 10.0
BURNS = frozenset({"Burns"})
NONE: frozenset[str] = frozenset()


def asked(late_from: float, late_until: float, every_s: float = 1.0) -> list[Seen]:
    """A request a second for ten minutes; those of a stretch of time were late."""
    times = [number * every_s for number in range(int(600 / every_s))]
    return [Seen(at, 9.0 if late_from <= at < late_until else 0.1, 0.01) for at in times]


def looks(*fires: tuple[float, float]) -> list[tuple[float, frozenset[str]]]:
    return [(float(at), BURNS if any(a <= at < b for a, b in fires) else NONE) for at in range(600)]


def test_a_share_is_of_what_ended_in_the_window() -> None:
    seen = asked(100, 110)
    assert truth.share(RULE, seen, 109, 10) == 1.0
    assert truth.share(RULE, seen, 119, 20) == pytest.approx(0.5)
    assert truth.share(RULE, seen, 90, 50) == 0.0
    assert truth.share(RULE, [], 90, 50) == 0.0
    assert truth.share(RULE, [Seen(1, None, None, error=True)], 2, 10) == 0.0


def test_an_alert_that_fires_when_users_wait_is_true() -> None:
    seen, fired = asked(100, 300), looks((220, 310))
    assert truth.false_alarms(RULE, seen, fired, SLACK_S) == []
    assert truth.missing_alarms(RULE, seen, fired, SLACK_S) == []


def test_an_alert_about_nothing_is_false() -> None:
    assert truth.false_alarms(RULE, asked(0, 0), looks((50, 53)), SLACK_S) == [50, 51, 52]
    assert truth.false_alarms(RULE, asked(100, 101), looks((50, 51)), SLACK_S) == [50]


def test_an_alert_that_should_have_fired_is_missing() -> None:
    found = truth.missing_alarms(RULE, asked(100, 500), looks(), SLACK_S)
    assert found
    assert min(found) > 100 + RULE.lasting_s + SLACK_S
    assert truth.missing_alarms(RULE, asked(100, 110), looks(), SLACK_S) == []


def test_errors_are_of_a_kind_of_their_own() -> None:
    rule = Rule("Fail", "error", 0.05, ((15, 15),), lasting_s=30)
    seen = [Seen(float(at), None, None, error=100 <= at < 200) for at in range(600)]
    [(name, (looked, false, missing))] = truth.told([rule], seen, looks(), SLACK_S).items()
    assert (name, looked, false) == ("Fail", 0, [])
    assert min(missing) == pytest.approx(142, abs=4)
