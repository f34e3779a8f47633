"""The walk over random schedules of workers that fail at every edge: one end, in time;
contiguous and right tokens; nothing left open; never an attempt too many."""

from hypothesis import given
from hypothesis import strategies as st

from pd_core.failures import FailureKind
from pd_router.moves import Done, Fail
from tests.pd_router.walk_world import Plan, World

stops = st.lists(st.none() | st.integers(0, 12), max_size=3).map(tuple)
plans = st.builds(
    Plan,
    seed=st.integers(0, 2**32),
    prefills=st.integers(0, 3),
    decodes=st.integers(0, 3),
    boths=st.integers(0, 1),
    choices=st.integers(1, 3),
    max_tokens=st.integers(1, 12),
    fault_rate=st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.7]),
    duplicate_rate=st.sampled_from([0.0, 0.2, 0.8]),
    deadline_s=st.sampled_from([0.05, 1.0, 60.0]),
    cancel_at=st.none() | st.floats(0.0, 3.0),
    max_retries=st.integers(0, 4),
    hedge_after_s=st.sampled_from([None, 0.02, 0.5, 3.0]),
    stops=stops,
)


@given(plans)
def test_any_schedule_ends_once_and_right(plan: Plan) -> None:
    world = World(plan)
    world.run()
    world.check_end()


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 12), st.integers(0, 3), stops)
def test_without_faults_it_is_done_at_the_first_attempt(
    seed: int, choices: int, max_tokens: int, prefills: int, stop: tuple[int | None, ...]
) -> None:
    world = World(Plan(seed, prefills, 2, 0, choices, max_tokens, 0.0, 0.3, stops=stop))
    world.run()
    world.check_end()
    assert isinstance(world.ends[0], Done)
    assert world.timeline.attempts == 1


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_with_hedges_nobody_waits_for_a_silent_prefill(seed: int, choices: int) -> None:
    """One prefill worker takes everything and says nothing for ever: the other is asked long
    before it's given up, and what it says is what goes out."""
    world = World(Plan(seed, 2, 2, 0, choices, 5, 0.0, 0.3, hedge_after_s=0.5))
    world.silent = next(iter(world.views))
    began = world.now
    world.run()
    world.check_end()
    assert isinstance(world.ends[0], Done)
    assert world.now - began < world.config.prefill_wait_s
    assert world.hedged in ([], [True])


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_with_few_faults_it_is_mostly_done(seed: int, choices: int) -> None:
    """Failures are those that retries can't help, never a hang or a wrong token."""
    world = World(Plan(seed, 2, 2, 1, choices, 10, 0.03, 0.1, max_retries=20))
    world.run()
    world.check_end()
    end = world.ends[0]
    if isinstance(end, Fail):
        assert end.failure.kind in (
            FailureKind.INTERNAL,  # not retryable
            FailureKind.STEP_FAILED,  # twice
            FailureKind.NO_CAPACITY,  # everywhere
            FailureKind.NO_WORKERS,
            FailureKind.DEADLINE,
        )
