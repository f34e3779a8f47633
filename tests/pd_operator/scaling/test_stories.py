"""Covers scaling.decide over longer stories, with workers that take their time to start: a slow
ramp is met ahead of time, chats are followed by long prompts, silence after load, pods that
never start, chance around a threshold, what users got."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pd_operator.api import Role
from pd_operator.scaling.types import Answered, Flow, Flows, Observations, PoolSignals, Target
from tests.pd_operator.scaling.world import (
    POLL_S,
    PROMPT_TOKENS,
    SPEED,
    Cluster,
    decode,
    observations,
    prefill,
    sketch,
)

pytestmark = pytest.mark.slow

P, D = Role.PREFILL, Role.DECODE
CHAT, LONG = 6, 14  # prompts of less than 64 and of less than 16,384 tokens
CHATTED = {CHAT: Answered(300, 300 * 400.0)}
"""What ended in a minute of five chats a second, of 400 tokens each."""


def mixed(cluster: Cluster, chats: float, prompts: float, **fields: Any) -> None:
    """A look at so many chats and long prompts a second, with room for KV to spare."""
    flow = Flow(
        chats + prompts, chats + prompts, chats * 50 + prompts * 12_000.0,
        {CHAT: chats, LONG: prompts},
    )  # fmt: skip
    signals = PoolSignals(
        workers=cluster.size(D), running=fields.pop("running"), kv_tokens_each=1e9,
        max_running_each=256,
    )  # fmt: skip
    seen = observations(0, chats + prompts, decode=signals, **fields)
    cluster.look(replace(seen, flows=dict.fromkeys(Role, Flows(flow, flow))))


def after_chats() -> tuple[Cluster, int, int]:
    """Ten minutes of chats, and the sizes then."""
    cluster = Cluster()
    for _ in range(120):
        mixed(cluster, 5, 0, running=60, answers=CHATTED, output_tokens=400.0)
    return cluster, cluster.size(P), cluster.size(D)


@pytest.mark.parametrize(
    ("chats", "answers", "output_tokens"),
    [
        pytest.param(0, {}, None, id="nothing ends: prompts wait for prefill"),
        pytest.param(0, CHATTED, 400.0, id="none but chats ends"),
        pytest.param(5, CHATTED, 400.0, id="chats go on beside them"),
        pytest.param(0, {LONG: Answered(300, 600)}, 2.0, id="long prompts are answered"),
        pytest.param(
            5, {**CHATTED, LONG: Answered(300, 600)}, 201.0, id="both are, half as long on average"
        ),
    ],
)
def test_long_prompts_with_short_answers_after_chats_move_prefill_alone(
    chats: float, answers: dict[int, Answered], output_tokens: float | None
) -> None:
    """Four times the requests, by prompts that are answered in two tokens. Times the chats'
    mean answer, which is all that ends in the first minute, it would be four times decode."""
    cluster, prefill_then, decode_then = after_chats()
    assert decode_then > 1
    for _ in range(24):
        mixed(
            cluster, chats, 20, running=60 if chats else 0,
            answers=answers, output_tokens=output_tokens,
        )  # fmt: skip
    assert cluster.size(P) > 3 * prefill_then
    assert cluster.size(D) == decode_then
    assert cluster.last[P].reason != cluster.last[D].reason


def test_chats_that_are_over_count_no_longer_than_the_window() -> None:
    """A pool that follows ten seconds: half a minute after the last chat a long prompt comes,
    and decode, which has gone back, stays as small as it is."""
    window = {"window_s": 10.0, "stabilization_s": 20.0, "step_s": 5.0}
    cluster = Cluster([prefill(), decode(4, **window)])
    for _ in range(60):
        mixed(cluster, 5, 0, running=150, answers=CHATTED, output_tokens=400.0)
    assert cluster.size(D) >= 4
    for _ in range(8):
        mixed(cluster, 0, 0, running=0, answers={}, output_tokens=None)
    gone = cluster.size(D)
    assert gone == 1
    mixed(cluster, 0, 0.6, running=0, answers={}, output_tokens=None)
    assert cluster.size(D) == gone


def test_more_chats_beside_long_prompts_move_decode_at_once() -> None:
    cluster, _, decode_then = after_chats()
    mixed(cluster, 15, 20, running=60, answers=CHATTED, output_tokens=400.0)
    assert cluster.size(D) > decode_then
    assert cluster.last[D].numbers["output_tokens"] == pytest.approx(15 * 400 / 35, rel=1e-3)


def test_long_answers_to_prompts_of_a_new_length_move_decode_once_they_run() -> None:
    """Nobody knows how long these answers will be, and none has ended yet."""
    cluster, _, decode_then = after_chats()
    for running in (0, 20, 60):
        mixed(cluster, 0, 20, running=running, answers=CHATTED, output_tokens=400.0)
        assert cluster.size(D) == decode_then
    for running in (120, 180, 240):
        mixed(cluster, 0, 20, running=running, answers=CHATTED, output_tokens=400.0)
    assert cluster.size(D) > decode_then


@dataclass
class Slow:
    """A cluster whose workers serve `start_s` after they were asked for."""

    start_s: float
    cluster: Cluster = field(default_factory=Cluster)
    born: dict[Role, list[float]] = field(default_factory=lambda: {P: [-1e9] * 2, D: [-1e9] * 2})

    def serving(self, role: Role) -> int:
        return sum(self.cluster.now - born >= self.start_s for born in self.born[role])

    def look(self, requests: float) -> None:
        signals = {
            P: PoolSignals(workers=self.serving(P)),
            D: PoolSignals(workers=self.serving(D), kv_tokens_each=1e6, max_running_each=256),
        }
        self.cluster.look(observations(0, requests, prefill=signals[P], decode=signals[D]))
        for role, born in self.born.items():
            size = self.cluster.size(role)
            del born[size:]
            born.extend([self.cluster.now] * (size - len(born)))

    def run(self, demand: Callable[[float], float], for_s: float) -> list[tuple[float, int]]:
        """(load of prefill in workers, workers that serve) at each look."""
        begin, found = self.cluster.now, []
        while self.cluster.now < begin + for_s:
            requests = demand(self.cluster.now - begin)
            self.look(requests)
            found.append((requests * PROMPT_TOKENS / SPEED, self.serving(P)))
        return found


@pytest.mark.parametrize("start_s", [60.0, 180.0, 300.0])
def test_a_slow_ramp_is_met_before_it_is_there(start_s: float) -> None:
    """From 10 to 70 requests a second within an hour: never are there too few workers, and
    at the end not many too many."""
    slow = Slow(start_s)
    slow.run(lambda _: 10.0, 900)
    seen = slow.run(lambda at: 10 + at / 60, 3600)
    assert all(load < serving for load, serving in seen)
    assert seen[-1][1] <= 11
    starts = slow.cluster.state.pools[P].starts
    assert starts.measured_s == pytest.approx(start_s, abs=POLL_S)
    assert slow.cluster.last[P].numbers["horizon_s"] == pytest.approx(start_s + 30, abs=POLL_S)


def test_silence_after_load_still_lets_go_of_workers() -> None:
    """No request, so no percentile, no length, no share of anything: zero is zero."""
    cluster = Cluster()
    cluster.steady(60, 600)
    nothing = Observations(
        complete=True, read_at=0.0, flows=observations(0, 0).flows,
        pools={role: PoolSignals(workers=2) for role in Role},
    )  # fmt: skip
    for _ in range(300):
        cluster.look(nothing)
    assert cluster.trail[-1] == {P: 1, D: 1}


def test_pods_that_never_start_ask_for_no_more_pods() -> None:
    cluster = Cluster([prefill(2), decode(4)])
    stuck = PoolSignals(workers=2, pending_tokens=5000)
    for _ in range(700):
        cluster.look(observations(0, 30, prefill=stuck))
    sizes = [sizes[P] for sizes in cluster.trail[50:]]
    assert max(sizes) == min(sizes) <= 6
    assert len(cluster.state.pools[P].starts.asked) <= 8


@pytest.mark.parametrize("seed", range(6))
def test_chance_around_a_threshold_turns_it_once_in_ten_minutes_at_most(seed: int) -> None:
    """Poisson arrivals at a rate at which one worker more or less is as good."""
    chance = random.Random(seed)
    cluster = Cluster()
    moves: list[tuple[float, int]] = []
    for _ in range(720):
        before = cluster.size(P)
        requests = 33.5 + chance.gauss(0, math.sqrt(33.5 / 60))
        cluster.look(observations(0, requests, burst=33.5 + chance.gauss(0, math.sqrt(3.35))))
        if cluster.size(P) != before:
            moves.append((cluster.now, cluster.size(P) - before))
    turns = [b[0] for a, b in itertools.pairwise(moves) if (a[1] > 0) != (b[1] > 0)]
    assert all(later - earlier >= 600 for earlier, later in itertools.pairwise(turns))


def test_answers_that_get_longer_are_met_before_they_are_there() -> None:
    """No more requests come, but their answers grow to four times the length within an hour."""
    cluster = Cluster()
    room = {"kv_tokens_each": 1e9, "max_running_each": 256}
    cluster.steady(10, 900, output_tokens=200.0)
    first = {role: cluster.size(role) for role in (P, D)}
    for look in range(720):
        output = 200.0 * (1 + 3 * look / 720)
        signals = PoolSignals(workers=cluster.size(D), **room)
        cluster.look(observations(0, 10, decode=signals, output_tokens=output))
    numbers = cluster.last[D].numbers
    assert numbers["demand"] == pytest.approx(10 * 800, rel=0.01)
    assert cluster.size(D) > first[D]
    assert cluster.size(P) == first[P]


@pytest.mark.parametrize("seed", range(3))
def test_sequences_that_happen_to_run_are_no_demand(seed: int) -> None:
    """A pool is sized for how many run on average, not for the most of a hundred looks."""
    chance = random.Random(seed)
    still, swinging = Cluster(), Cluster()
    for _ in range(360):
        for cluster, running in ((still, 60.0), (swinging, chance.gauss(60, math.sqrt(60)))):
            signals = PoolSignals(
                workers=cluster.size(D), running=running, kv_used_tokens=running * PROMPT_TOKENS,
                kv_tokens_each=60_000, max_running_each=256,
            )  # fmt: skip
            cluster.look(observations(0, 5, decode=signals))
    assert swinging.size(D) <= still.size(D) + 1


def test_sequences_beyond_chance_count_at_once() -> None:
    cluster = Cluster()
    few, many = (
        PoolSignals(workers=2, running=running, kv_tokens_each=1e6, max_running_each=256)
        for running in (20.0, 200.0)
    )
    cluster.steady(5, 300, decode=few)
    before = cluster.size(D)
    cluster.look(observations(0, 5, decode=many))
    assert cluster.size(D) > before


def test_late_requests_add_workers_and_good_times_take_them_back() -> None:
    """The model says 4 are enough; a twentieth of all requests says they aren't."""
    cluster = Cluster()
    cluster.steady(25, 1500)
    usual = cluster.size(P)
    late = {"own_ttft": sketch([0.2] * 95 + [4.0] * 5)}
    for _ in range(240):
        serving = PoolSignals(workers=cluster.size(P))
        cluster.look(observations(0, 25, prefill=serving, **late))
    assert cluster.size(P) > usual
    assert cluster.last[P].numbers["correction"] > 1.1
    assert cluster.last[P].numbers["late"] == pytest.approx(0.05)
    for _ in range(3000):
        serving = PoolSignals(workers=cluster.size(P))
        cluster.look(observations(0, 25, prefill=serving, own_ttft=sketch([0.2] * 100)))
    assert cluster.size(P) <= usual


def test_who_waits_for_decodes_room_adds_decode_workers_alone() -> None:
    """TPOT is met and prefill is quick, but a twentieth waits too long for KV."""
    cluster = Cluster([prefill(), decode(ttft=Target(99, 1.0))])
    room = {"kv_tokens_each": 40_000, "max_running_each": 256}
    fine = {"own_ttft": sketch([0.2] * 100), "tpot": sketch([0.012] * 100)}

    def look(late: int) -> None:
        signals = PoolSignals(
            workers=cluster.size(D), running=60, kv_used_tokens=60 * PROMPT_TOKENS, **room
        )
        ttft = sketch([0.2] * (100 - late) + [9.0] * late)
        cluster.look(observations(0, 20, decode=signals, ttft=ttft, **fine))

    for _ in range(120):
        look(0)
    before = {role: cluster.size(role) for role in (P, D)}
    for _ in range(120):
        look(5)
    assert cluster.last[D].numbers["late"] == pytest.approx(0.05)
    assert cluster.size(D) > before[D]
    assert cluster.size(P) == before[P]


def test_late_for_want_of_workers_that_still_start_teaches_nothing() -> None:
    cluster = Cluster([prefill(2), decode()])
    late = sketch([4.0] * 100)
    for _ in range(60):
        cluster.look(observations(0, 60, prefill=PoolSignals(workers=2), own_ttft=late))
    assert cluster.last[P].numbers["correction"] == 1.0


def test_the_same_tokens_in_few_long_prompts_need_more_workers() -> None:
    """An average hides them: who comes behind a prompt of 9 s waits for it."""
    goal = Target(99, 1.3)
    alike, mixed = (Cluster([prefill(2, ttft=goal), decode()]) for _ in range(2))
    long = sketch([500.0] * 190 + [10_000.0] * 10)
    for _ in range(240):
        alike.look(observations(0, 22))
        mixed.look(observations(0, 22, uncached=long))
    assert mixed.size(P) > alike.size(P)
    variations = [one.last[P].numbers["service_variation"] for one in (alike, mixed)]
    assert variations[0] < 1 < variations[1]
