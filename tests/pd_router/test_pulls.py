"""Whether a prompt's beginning is copied or computed, and how a copy goes: pure."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pd_core.estimate import Link
from pd_core.failures import Failure, FailureKind
from pd_core.kv import KvForm
from pd_router.costs import Costs, Need
from pd_router.fleet import LoadReport, Role, WorkerId, WorkerView
from pd_router.moves import Committed, Granted
from pd_router.policy import Exclusions, Placement, place
from pd_router.pulls import USUAL, Broken, Pull, PullRules, Pulls
from pd_router.pullwalk import AskHolder, AskTarget, Close, Over, PullWalk
from pd_router.routing import Routing

FORM = KvForm("m" * 64, "float32", 16, 2, 1, 64)
LINK = Link("test", 1e9, 1e-4)
TOKENS = 4000
KV_TOKEN_BYTES = 10_000.0  # 40 MB for the prompt: 0.04 s on the link
NEED = Need(tokens=TOKENS, output_tokens=100)


def view(name: str, role: Role, **changes: Any) -> WorkerView:
    fields: dict[str, Any] = {
        "id": WorkerId(name, "e"),
        "role": role,
        "kv": FORM,
        "kv_blocks": 1000,
        "max_model_tokens": 8192,
        "load": LoadReport(kv_blocks=1000, kv_free=1000),
        "usable": True,
        "reachable": True,
        "shares_prefixes": True,
        "tokens_per_s": 4000.0,
        "kv_token_bytes": KV_TOKEN_BYTES,
    }
    return WorkerView(**{**fields, **changes})


def found(
    target: WorkerView, *holders: tuple[WorkerView, int], rules: PullRules | None = USUAL
) -> Pull | None:
    """`holders` with the tokens that they have; the target has what it's named with, too."""
    held = {w.id: tokens for w, tokens in holders}
    views = [w for w, _ in holders if w is not target]
    pulls = Pulls([target, *views], lambda w: held.get(w.id, 0), LINK, rules)
    costs = Costs(NEED, [target, *views], LINK)
    better = pulls.better(costs.prefill(target, held.get(target.id, 0)), costs.prefill)
    pull = pulls.of(target.id)
    alone = costs.prefill(target, held.get(target.id, 0))
    assert better.ready_s < alone.ready_s if pull is not None else better == alone
    return pull


P, D = view("p-0", Role.PREFILL), view("d-0", Role.DECODE)


def test_a_long_prefix_that_decode_holds_is_pulled() -> None:
    pull = found(P, (D, 3840))
    assert pull is not None
    assert (pull.holder, pull.target) == (D.id, P.id)
    assert (pull.blocks, pull.block_tokens, pull.new_tokens) == (240, 16, 3840)
    assert pull.save_s == pytest.approx(0.96)
    assert pull.take_s == pytest.approx(0.0384 + 0.0101)
    assert pull.limit_s == pytest.approx(0.8 * 0.96)
    assert "3840 tokens pulled from d-0" in pull.reason


def test_however_slow_computing_is_a_copy_is_given_up_before_decode_gives_up() -> None:
    pull = found(view("p-0", Role.PREFILL, tokens_per_s=20.0), (D, 3840))
    assert pull is not None
    assert pull.save_s == pytest.approx(192)
    assert pull.limit_s == 30


def test_only_what_the_target_lacks_counts() -> None:
    pull = found(P, (P, 1920), (D, 3840))
    assert pull is not None
    assert (pull.blocks, pull.new_tokens) == (240, 1920)
    assert pull.save_s == pytest.approx(0.48)


@pytest.mark.parametrize(
    "why",
    [
        {"tokens_per_s": 200_000.0},
        {"link_bytes_s": 20e6},
        {"shares_prefixes": False},
    ],
)
def test_the_target_computes_faster_or_takes_no_copies(why: dict[str, Any]) -> None:
    assert found(view("p-0", Role.PREFILL, **why), (D, 3840)) is None


@pytest.mark.parametrize(
    "why",
    [
        {"shares_prefixes": False},
        {"reachable": False},
        {"kv": replace(FORM, dtype="bfloat16")},
        {"kv": replace(FORM, block_tokens=32)},
        {"kv": replace(FORM, model_hash="n" * 64)},
    ],
)
def test_holders_that_arent_asked(why: dict[str, Any]) -> None:
    assert found(P, (view("d-0", Role.DECODE, **why), 3840)) is None


def test_the_target_has_as_much_itself() -> None:
    assert found(P, (P, 3840), (D, 3840)) is None


def test_after_a_failed_copy_another_holder_is_asked_or_none() -> None:
    other = view("d-1", Role.DECODE)
    broken = Broken(for_s=30.0)
    broken.failed(D.id, P.id, 100.0)

    def asked(now: float, *holders: WorkerView) -> str:
        pulls = Pulls(
            holders, lambda w: 0 if w is P else 3840, LINK, USUAL,
            lambda holder, target: broken.between(holder, target, now),
        )  # fmt: skip
        costs = Costs(NEED, [P, *holders], LINK)
        pulls.better(costs.prefill(P, 0), costs.prefill)
        pull = pulls.of(P.id)
        return pull.holder.name if pull is not None else ""

    assert asked(129.9, D, other) == "d-1"
    assert asked(129.9, D) == ""
    assert asked(130.0, D) == "d-0"
    assert not broken.between(P.id, D.id, 100.0), "the other way is another link"


def test_what_is_known_of_failed_copies_is_bounded() -> None:
    broken = Broken(for_s=30.0, most=2)
    ids = [WorkerId(f"d-{i}", "e") for i in range(3)]
    for at, one in enumerate((ids[0], ids[1], ids[0], ids[2])):
        broken.failed(one, P.id, float(at))
    assert [broken.between(one, P.id, 4.0) for one in ids] == [True, False, True]


def test_switched_off() -> None:
    assert found(P, (D, 3840), rules=None) is None


def test_whoever_has_most_is_asked_and_of_those_who_has_least_to_do() -> None:
    busy = view("d-1", Role.DECODE, load=LoadReport(running=5, kv_blocks=1000))
    for holders, chosen in (
        (((D, 1920), (busy, 3840)), busy),
        (((busy, 3840), (D, 3840)), D),
    ):
        pull = found(P, *holders)
        assert pull is not None
        assert pull.holder == chosen.id


def test_a_worker_that_drains_still_gives() -> None:
    assert found(P, (view("d-1", Role.DECODE, usable=False), 3840)) is not None


# ---- the policy ---------------------------------------------------------------------


def holding(held: dict[WorkerId, int]) -> Callable[[WorkerView], int]:
    """So many of the prompt's tokens are cached at each."""
    return lambda worker: held.get(worker.id, 0)


def placed(
    workers: list[WorkerView], held: dict[WorkerId, int], exclusions: Exclusions | None = None
) -> Placement:
    routing = Routing(link=LINK, disaggregate="always")
    found = place(NEED, workers, holding(held), exclusions or Exclusions(), routing=routing)
    assert isinstance(found, Placement)
    return found


def test_prefill_that_lost_its_cache_pulls_and_says_so() -> None:
    placement = placed([P, D], {D.id: 3840})
    assert placement.pull is not None
    assert placement.compute_tokens == 160
    assert "3840 tokens pulled from d-0" in placement.reason


def test_a_request_that_had_trouble_with_the_holder_doesnt_ask_it() -> None:
    placement = placed([P, D], {D.id: 3840}, Exclusions(disliked={D.id}))
    assert placement.pull is None
    assert placement.compute_tokens == TOKENS


def test_a_session_whose_worker_drains_is_taken_over() -> None:
    """By a worker that both computes and decodes, straight from the one that leaves."""
    leaving = view("b-0", Role.BOTH, usable=False)
    heir = view("b-1", Role.BOTH)
    placement = placed([leaving, heir], {leaving.id: 3840})
    assert placement.decode == heir.id
    assert placement.pull is not None
    assert (placement.pull.holder, placement.pull.target) == (leaving.id, heir.id)


def test_a_session_whose_worker_is_full_is_taken_over() -> None:
    need = replace(NEED, session=b"a talk")
    full = LoadReport(kv_blocks=1000, kv_free=50)
    both = [view(f"b-{i}", Role.BOTH) for i in range(2)]
    routing = Routing(link=LINK)

    def going(workers: list[WorkerView]) -> Placement:
        found = place(need, workers, holding({owner: 3840}), Exclusions(), routing=routing)
        assert isinstance(found, Placement)
        return found

    owner = both[0].id
    owner = going(both).decode
    assert going(both).pull is None
    moved = going([replace(w, load=full) if w.id == owner else w for w in both])
    assert moved.decode != owner
    assert moved.pull is not None
    assert moved.pull.holder == owner


# ---- its walk -----------------------------------------------------------------------

PULL = Pull(D.id, P.id, 240, 16, 3840, 0.05, 0.96, 0.5)
GRANT = Granted(b"g" * 16)
LOST = Failure(FailureKind.WORKER_LOST, "gone")


def test_a_copy_that_comes_in_time() -> None:
    walk = PullWalk(PULL, 10.0)
    assert walk.start() == [AskTarget()]
    assert walk.granted(GRANT) == [AskHolder(GRANT)]
    assert walk.committed(Committed((), cached_tokens=16, kv_bytes=5), 10.25) == [
        Close(True, cancel=False),
        Close(False, cancel=False),
        Over(5, 0.25, had_tokens=16),
    ]
    assert walk.ended
    assert walk.tick(11.0) == walk.failed(target=True, failure=LOST, now=11.0) == []


def test_a_copy_that_is_late_is_cancelled_at_both_ends() -> None:
    walk = PullWalk(PULL, 10.0)
    walk.start()
    walk.granted(GRANT)
    assert walk.tick(10.4) == []
    late = walk.tick(10.5)
    assert late[:2] == [Close(True, cancel=True), Close(False, cancel=True)]
    assert isinstance(late[2], Over)
    assert "longer than 0.5" in late[2].why


@pytest.mark.parametrize("target", [True, False])
def test_one_side_that_fails_ends_the_other(target: bool) -> None:
    walk = PullWalk(PULL, 10.0)
    walk.start()
    walk.granted(GRANT)
    assert walk.failed(target=target, failure=LOST, now=10.1) == [
        Close(target, cancel=False),
        Close(not target, cancel=True),
        Over(0, pytest.approx(0.1), "gone", broken=True),
    ]


def test_cancelled_it_says_nothing_more() -> None:
    walk = PullWalk(PULL, 10.0)
    walk.start()
    assert walk.cancel() == [Close(True, cancel=True)]
    assert walk.committed(Committed(()), 10.1) == walk.cancel() == []


def test_any_order_of_events_ends_it_once_and_closes_both_sides() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        walk, now = PullWalk(PULL, 0.0), 0.0
        actions = walk.start()
        opened = closed = 0
        for _ in range(draw.randrange(1, 8)):
            now += draw.random() * 0.2
            event = draw.randrange(6)
            if event == 0:
                actions += walk.granted(GRANT)
            elif event == 1:
                actions += walk.committed(Committed(()), now)
            elif event in (2, 3):
                actions += walk.failed(target=event == 2, failure=LOST, now=now)
            elif event == 4 and draw.random() < 0.3:
                actions += walk.cancel()
            else:
                actions += walk.tick(now)
        actions += walk.tick(1.0)
        opened = sum(isinstance(a, AskTarget | AskHolder) for a in actions)
        closed = sum(isinstance(a, Close) for a in actions)
        assert walk.ended
        assert opened == closed
        assert sum(isinstance(a, Over) for a in actions) <= 1
        assert not any(isinstance(a, Over) for a in actions[:-1])
