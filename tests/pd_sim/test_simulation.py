"""The simulator against sums that a person can do, and against the faults it simulates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.estimate import Link
from pd_operator.api import Role
from pd_sim.simulation import Fault, Plan
from pd_sim.trace import Request, Trace
from tests.pd_sim.rig import FAST, evenly, pair, simulate, together, with_perf


def one(prompt: int = 1000, output: int = 101, at_s: float = 0.0) -> Request:
    return Request(at_s, prompt, output)


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    result = simulate(pair(), Trace((one(),)))
    (outcome,) = result.outcomes
    assert outcome.ttft_s == pytest.approx(0.1)
    assert outcome.tpot_s == pytest.approx(0.0105)


def test_two_prompts_queue_and_two_sequences_share_steps() -> None:
    result = simulate(pair(), Trace((one(), one())))
    assert [o.ttft_s for o in result.outcomes] == pytest.approx([0.1, 0.2])
    # Alone for 0.1 s, together, alone again: between 10.5 and 11 ms.
    assert all(0.0105 < (o.tpot_s or 0) < 0.011 for o in result.outcomes)


def test_two_prefill_workers_take_one_prompt_each() -> None:
    result = simulate(pair(prefill=2), Trace((one(), one())))
    assert [o.ttft_s for o in result.outcomes] == pytest.approx([0.1, 0.1])


def test_a_slow_link_shows_in_the_second_token_only() -> None:
    plan = pair()
    slow = Plan(
        plan.pools, plan.router.__class__(Link("slow", 256e3, 0.0), overhead_s=0.0), plan.goal
    )
    (fast,), (late,) = (simulate(p, Trace((one(),))).outcomes for p in (plan, slow))
    assert late.ttft_s == fast.ttft_s
    # 1,000 tokens x 256 B at 256 kB/s is a second, of which a tenth hides.
    assert ((late.tpot_s or 0) - (fast.tpot_s or 0)) * 100 == pytest.approx(0.95, rel=0.1)


def test_kv_reads_make_steps_longer_as_sequences_grow() -> None:
    perf = with_perf(kv_token_s=1e-6)
    (outcome,) = simulate(pair(perf=perf), Trace((one(output=1001),))).outcomes
    # 10.5 ms and the mean of 1,000 to 2,000 tokens, a microsecond each.
    assert outcome.tpot_s == pytest.approx(0.012, rel=0.001)


def test_decode_full_lets_others_wait_for_room_and_no_prompt_is_computed_for_nothing() -> None:
    perf = with_perf(kv_tokens=2000)
    result = simulate(pair(perf=perf), Trace((one(), one())))
    first, second = result.outcomes
    assert second.waited_s == pytest.approx(0.1 + 100 * 0.0105, rel=0.01)
    assert (second.ttft_s or 0) > (first.ttft_s or 0) + 1


def test_a_prompt_stops_those_who_decode_unless_it_is_chunked() -> None:
    """The gap that a long prompt tears into a running answer."""
    trace = Trace((one(output=1001), one(prompt=10_000, output=2, at_s=2.0)))
    whole = simulate(together(), trace)
    chunks = simulate(together(chunk_tokens=256), trace)
    apart = simulate(pair(), trace)
    stall_s = [(r.outcomes[0].tpot_s or 0) * 1000 - 10.5 for r in (whole, chunks, apart)]
    assert stall_s[0] == pytest.approx(1.0, rel=0.05)
    assert stall_s[2] == pytest.approx(0.0, abs=0.01)
    # Chunks spread it over steps: users see steps of 26 ms instead of a second's pause.
    assert (whole.outcomes[1].ttft_s or 0) < (chunks.outcomes[1].ttft_s or 0) * 1.1


def test_a_new_worker_serves_after_its_start_and_is_paid_for_from_the_first_second() -> None:
    class Two:
        period_s = 10.0

        def sizes(self, seen: object) -> dict[Role, int]:
            del seen
            return {Role.PREFILL: 2}

    result = simulate(pair(start_s=30.0), evenly(1, 101), Two())
    served = [(s.at_s, s.serving[Role.PREFILL]) for s in result.sizes]
    assert served == [(0.0, 1), (10.0, 1), (40.0, 2)]
    assert result.gpu_hours * 3600 == pytest.approx(100 + 100 + 90)


def test_a_drained_worker_finishes_what_it_has_and_is_paid_until_then() -> None:
    class Fewer:
        period_s = 1.0

        def sizes(self, seen: object) -> dict[Role, int]:
            del seen
            return {Role.DECODE: 1}

    trace = Trace((one(output=501), one(output=501), one(output=2, at_s=20.0)))
    result = simulate(pair(decode=2), trace, Fewer())
    assert all(o.tpot_s == pytest.approx(0.0105) for o in result.outcomes[:2])
    # The second decode worker goes when its sequence is through.
    assert result.gpu_hours * 3600 == pytest.approx(20 + 20 + 0.1 + 500 * 0.0105, rel=0.01)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_dies_and_nobody_is_lost(role: Role) -> None:
    plan = pair(prefill=2, decode=2)
    faulty = Plan(plan.pools, plan.router, plan.goal, (Fault(5.05, role, 0),))
    calm, hurt = (simulate(p, evenly(8, 30)) for p in (plan, faulty))
    assert all(o.tpot_s is not None for o in hurt.outcomes)
    assert max(o.tpot_s or 0 for o in hurt.outcomes) >= max(o.tpot_s or 0 for o in calm.outcomes)


def test_shared_prefixes_are_computed_once_a_worker() -> None:
    blocks = tuple(bytes([i]) for i in range(8))
    trace = Trace((Request(0.0, 4097, 2, blocks), Request(10.0, 4097, 2, blocks)))
    first, second = simulate(pair(), trace).outcomes
    assert first.ttft_s == pytest.approx(0.4097)
    assert second.ttft_s == pytest.approx(0.01)  # the floor: one token


def test_the_same_run_twice_is_the_same() -> None:
    one_run, other = (simulate(pair(), evenly(20, 60)) for _ in range(2))
    assert one_run.document() == other.document()


@given(
    st.lists(
        st.tuples(st.floats(0, 60), st.integers(1, 3000), st.integers(1, 300)),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from(["pair", "together", "chunks"]),
    st.integers(0, 2),
)
def test_every_request_ends_whatever_dies(
    asked: list[tuple[float, int, int]], kind: str, deaths: int
) -> None:
    requests = sorted((Request(*one) for one in asked), key=lambda r: r.at_s)
    plan = {"pair": pair(2, 2), "together": together(2), "chunks": together(2, 256)}[kind]
    roles = [pool.role for pool in plan.pools]
    faults = tuple(Fault(3.0 + 4 * i, roles[i % len(roles)], i % 2) for i in range(deaths))
    result = simulate(Plan(plan.pools, plan.router, plan.goal, faults), Trace(tuple(requests)))
    for request, outcome in zip(requests, result.outcomes, strict=True):
        assert outcome.ttft_s is not None
        assert outcome.ttft_s >= 0.0099
        assert outcome.tpot_s is not None
        assert outcome.tpot_s >= (0.0104 if request.output_tokens > 1 else 0)


def test_links_without_limits_are_free() -> None:
    assert FAST.round_trip_s == 0
