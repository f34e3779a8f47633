"""A PDCluster's token: made once, followed by the next in steps that no pod can miss, and nowhere
but in its Secret. Routers have it where all workers have."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pd_core.proof import parse_tokens
from pd_operator import peertokens, pins, tokening
from pd_operator.applied import is_applied
from pd_operator.keys import Key
from pd_operator.observed import Ref, observe
from pd_operator.peertokens import Kept, Step, TokenTerms
from pd_operator.pki import make_token
from pd_operator.podparts import Manifest, Settings
from pd_operator.tlsobjects import decoded, encoded
from tests.pd_operator.objects import cluster, rendered

KEY = Key("default", "chat")
CHAT = cluster()
NOW = datetime(2026, 12, 1, 12, 0, 0, 123456, UTC)
TERMS = TokenTerms()
DAY = timedelta(days=1)
A, B = b"a" * 43, b"b" * 43
SECRET = Ref("Secret", "chat-token")


def test_one_follows_another_in_steps() -> None:
    """Each is accepted everywhere before it is used, and as long as anybody may use it."""
    kept = peertokens.plan(None, TERMS, NOW, A)
    assert kept == Kept((A,), Step.SETTLED, NOW)
    now = NOW
    for days, tokens, step in (
        (29.9, (A,), Step.SETTLED),
        (0.2, (A, B), Step.NEXT_KNOWN),
        (0.9, (A, B), Step.NEXT_KNOWN),
        (0.2, (B, A), Step.NEXT_USED),
        (0.9, (B, A), Step.NEXT_USED),
        (0.2, (B,), Step.SETTLED),
        (29, (B,), Step.SETTLED),
    ):
        now += days * DAY
        before, kept = kept, peertokens.plan(kept, TERMS, now, B)
        assert (kept.tokens, kept.step) == (tokens, step)
        assert kept.since == (now if kept.step is not before.step else before.since)


def look(objects: dict[Ref, Manifest], now: datetime) -> peertokens.Token:
    """As a reconcile does it."""
    made = peertokens.keep(CHAT, objects, TERMS, now, make_token())
    objects[SECRET] = made.manifest
    return made


def lines(objects: dict[Ref, Manifest]) -> tuple[bytes, ...]:
    return parse_tokens(decoded(objects[SECRET])[peertokens.FILE])


def test_a_life_by_its_secret() -> None:
    objects: dict[Ref, Manifest] = {}
    first = look(objects, NOW)
    assert "data" not in repr(first)
    [token] = lines(objects)
    assert first.due == NOW + TERMS.life
    for now in (NOW, NOW + 29 * DAY):
        written = dict(objects)
        assert is_applied(look(objects, now).manifest, written[SECRET]), "nothing is written"
    look(objects, NOW + 31 * DAY)
    assert lines(objects)[0] == token
    [_, other] = lines(objects)
    look(objects, NOW + 33 * DAY)
    assert lines(objects) == (other, token)
    look(objects, NOW + 35 * DAY)
    assert lines(objects) == (other,)


@pytest.mark.parametrize(
    ("data", "marks", "kept"),
    [
        pytest.param(None, {}, None, id="empty"),
        pytest.param(b"short", {}, None, id="too short"),
        pytest.param(A, {}, Kept((A,), Step.SETTLED, NOW), id="written by somebody"),
        pytest.param(
            A + b"\n" + B, {"step": "nonsense", "since": "soon"},
            Kept((A, B), Step.SETTLED, NOW), id="marks of nonsense",
        ),
        pytest.param(
            A, {"step": "next-known", "since": "2026-11-30T00:00:00+00:00"},
            Kept((A,), Step.SETTLED, NOW), id="one where there are to be two",
        ),
        pytest.param(
            A, {"step": "settled", "since": "2026-11-30T00:00:00"},
            Kept((A,), Step.SETTLED, NOW), id="a time of no zone",
        ),
        pytest.param(
            A, {"step": "settled", "since": "2027-11-30T00:00:00+00:00"},
            Kept((A,), Step.SETTLED, NOW), id="a time to come",
        ),
    ],
)  # fmt: skip
def test_what_a_secret_says(data: bytes | None, marks: dict[str, str], kept: Kept | None) -> None:
    annotations = {f"pdcluster.dev/token-{name}": text for name, text in marks.items()}
    found: Manifest = {
        "metadata": {"annotations": annotations},
        "data": {} if data is None else encoded({peertokens.FILE: data}),
    }
    assert peertokens.read(found, NOW) == kept


# ---- what a look does ------------------------------------------------------------------


def tokener(**settings: Any) -> tokening.Tokener:
    return tokening.Tokener(Settings(**settings), TERMS, make_token)


def pod(ready: bool) -> Manifest:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "kind": "Pod",
        "metadata": {"name": "chat-router-1", "labels": {"pdcluster.dev/role": "router"}},
        "spec": {},
        "status": {"conditions": conditions},
    }


def test_where_it_may_read_secrets_it_keeps_one() -> None:
    found = tokener().look(KEY, CHAT, rendered(CHAT), observe([]), NOW)
    assert found.provide is None
    assert found.secret is not None
    assert found.due_s(NOW) == TERMS.life.total_seconds()


def test_where_it_may_only_create_them_it_asks_when_one_may_be_missing() -> None:
    """At first, and while pods wait; not while all of them serve."""
    one = tokener(certificates=False)

    def asks(*pods: Manifest, after_s: float) -> bool:
        now = NOW + timedelta(seconds=after_s)
        found = one.look(KEY, CHAT, rendered(CHAT), observe(pods), now)
        assert found.secret is None
        if found.provide is not None:
            one.provided(KEY, now)
        return found.provide is not None

    assert asks(after_s=0)
    assert not asks(pod(ready=False), after_s=30), "it has just been made"
    assert asks(pod(ready=False), after_s=60)
    assert not asks(pod(ready=True), after_s=3600)
    one.forget(KEY)
    assert not asks(pod(ready=True), after_s=3600), "what runs has found it"
    assert asks(pod(ready=False), after_s=3700), "somebody deleted it"


def test_without_tokens_there_is_none() -> None:
    plain = Settings(tokens=False)
    wanted = rendered(CHAT, settings=plain)
    assert tokening.Tokener(plain, TERMS, make_token).look(KEY, CHAT, wanted, observe([]), NOW) == (
        tokening.Tokened()
    )
    assert "peer-token" not in str([pool.stateful_set["spec"]["template"] for pool in wanted.pools])


def test_routers_have_it_where_all_workers_have() -> None:
    """Pools that an operator rendered before it made tokens stay as they are until an edit."""
    before, now = rendered(CHAT, settings=Settings(tokens=False)), rendered(CHAT)
    sets = [pool.stateful_set for pool in before.pools]
    seen = observe([{**one, "metadata": {**one["metadata"], "uid": "u"}} for one in sets])
    kept = pins.keep(now, CHAT, seen)
    assert tokener().wants(now)
    assert not tokener().wants(kept)
    found = tokener().look(KEY, CHAT, kept, seen, NOW)
    assert found == tokening.Tokened()
