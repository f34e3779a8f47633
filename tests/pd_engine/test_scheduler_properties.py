"""The scheduler under random use: requests of all modes come, go, fail and are preempted while
steps run and transfers write, and all that `scheduler_world` checks holds after each action."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pd_core.failures import FailureKind
from pd_engine.scheduler import SchedulerConfig
from pd_engine.types import Mode
from tests.pd_engine.scheduler_world import VOCAB, Client, World

_REFUSALS = {
    FailureKind.INVALID_REQUEST,
    FailureKind.CONTEXT_TOO_LONG,
    FailureKind.POOL_TOO_SMALL,
    FailureKind.NO_CAPACITY,
}


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that share beginnings, often as far as whole blocks."""
    family = draw(st.integers(0, 1))
    shared = [1 + (family + i) % (VOCAB - 1) for i in range(18)]
    own = draw(st.lists(st.integers(1, VOCAB - 1), max_size=5))
    return (shared[: draw(st.integers(0, 18))] + own) or [1]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `World.add`; times count from now."""
    choices = draw(st.sampled_from([(0,), (0,), (2,), (0, 1), (0, 1, 2, 3)]))
    resumed = draw(st.integers(0, 3)) if len(choices) == 1 else 0
    return {
        "tokens": draw(prompts()),
        "mode": draw(st.sampled_from([Mode.LOCAL, *Mode])),
        "choices": choices,
        "resumed": resumed,
        "max_tokens": resumed + draw(st.sampled_from([1, 2, 5, 9, 14, 20])),
        "priority": draw(st.sampled_from([0, 0, 1])),
        "deadline": draw(st.sampled_from([3.0, 1e9, 1e9, 1e9])),
        "grant_deadline": draw(st.sampled_from([2.0, 1e9, 1e9])),
        "stop": draw(st.sampled_from([(), (), (0,)])),
        "min_tokens": draw(st.integers(0, 3)),
        "ignore_eos": draw(st.booleans()),
        "salt": draw(st.sampled_from([b"", b"", b"", b"tenant"])),
    }


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Tight ones: a few requests fill the pool, the budget and the slots."""
    budget = draw(st.integers(1, 24))
    cfg = SchedulerConfig(
        max_batch_tokens=budget,
        chunk_tokens=draw(st.integers(0, 9)),
        max_running=min(draw(st.integers(1, 8)), budget),
        max_queued=draw(st.sampled_from([3, 50, 50])),
        max_model_tokens=draw(st.sampled_from([30, 1000, 1000])),
        recompute_max_tokens=draw(st.sampled_from([0, 12, 1000, 1000])),
        decode_reserve_tokens=draw(st.integers(0, 9)),
        draft_tokens=draw(st.sampled_from([0, 0, 1, 3, 6])),
        patience_s_per_token=draw(st.sampled_from([0.0, 0.1, 1.0])),
    )
    block_tokens = draw(st.integers(1, 4))
    tokens = draw(st.integers(1, 60))
    return World(cfg, -(-tokens // block_tokens), block_tokens)


class SchedulerMachine(RuleBasedStateMachine):
    """Random use. Each rule is something that may happen at any time."""

    @initialize(world=worlds(), first=st.lists(requests(), min_size=1, max_size=8))
    def start(self, world: World, first: list[dict[str, Any]]) -> None:
        self.world = world
        for request in first:
            self.add(request)

    def _pick(self, data: st.DataObject, clients: list[Client]) -> Client:
        return data.draw(st.sampled_from(clients))

    @rule(request=requests())
    def add_later(self, request: dict[str, Any]) -> None:
        self.add(request)

    def add(self, request: dict[str, Any]) -> None:
        now = self.world.now
        times = {name: now + request[name] for name in ("deadline", "grant_deadline")}
        client = self.world.add(**{**request, **times})
        if not isinstance(client, Client):
            assert client.kind in _REFUSALS

    @precondition(lambda self: self.world.batch is None)
    @rule(early=st.booleans())
    def begin_step(self, early: bool) -> None:
        self.world.begin_step(early)

    @precondition(lambda self: self.world.batch is not None)
    @rule()
    def end_step(self) -> None:
        self.world.end_step()

    @precondition(lambda self: self.world.batch is not None)
    @rule(dice=st.integers(0, 5))
    def fail_step(self, dice: int) -> None:
        if dice == 5:
            self.world.fail_step()

    @precondition(lambda self: self.world.batch is None)
    @rule(steps=st.integers(1, 6))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if not self.world.step():
                return

    @rule()
    def poll(self) -> None:
        self.world.poll()

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    def _live(self) -> list[Client]:
        return [c for c in self.world.clients.values() if not c.over]

    @precondition(lambda self: self._live())
    @rule(data=st.data(), dice=st.integers(0, 3))
    def cancel(self, data: st.DataObject, dice: int) -> None:
        if dice == 0:
            self.world.cancel(self._pick(data, self._live()))
            self.world.poll()

    @precondition(lambda self: self.world.batch is not None and self._live())
    @rule(data=st.data(), request=requests())
    def cancel_in_flight(self, data: st.DataObject, request: dict[str, Any]) -> None:
        self.world.cancel(self._pick(data, self._live()))
        self.import_in_flight(request)

    @precondition(lambda self: self.world.batch is not None)
    @rule(request=requests())
    def import_in_flight(self, request: dict[str, Any]) -> None:
        """KV arrives, in blocks that were freed a moment ago, while the step still works."""
        self.add({**request, "mode": Mode.IMPORT, "priority": 2})
        self.world.poll()
        for client in self._granted():
            self.world.receive(client, 9)

    def _granted(self) -> list[Client]:
        return [c for c in self._live() if self.world.transferring(c)]

    @precondition(lambda self: self._granted())
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        self.world.attach(self._pick(data, self._granted()))

    @precondition(lambda self: self._granted())
    @rule(data=st.data(), blocks=st.integers(1, 9))
    def receive(self, data: st.DataObject, blocks: int) -> None:
        self.world.receive(self._pick(data, self._granted()), blocks)

    @precondition(lambda self: self._granted())
    @rule(data=st.data())
    def give_up_transfer(self, data: st.DataObject) -> None:
        self.world.cancel(self._pick(data, self._granted()), quarantine=True)

    @precondition(lambda self: self.world.quarantined)
    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        self.world.release_quarantine(data.draw(st.sampled_from([*self.world.quarantined])))

    @precondition(lambda self: self.world.exported())
    @rule(data=st.data())
    def release_export(self, data: st.DataObject) -> None:
        self.world.release_export(self._pick(data, self.world.exported()))

    @invariant()
    def all_is_accounted_for(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.finish()
        for client in self.world.clients.values():
            if client.failure is None:
                continue
            kind = client.failure.kind
            assert kind in {
                FailureKind.DEADLINE,
                FailureKind.NO_CAPACITY,
                FailureKind.STEP_FAILED,
                FailureKind.PREEMPTED,
            }
            if self.world.cfg.recompute_max_tokens == 1000:
                assert kind is not FailureKind.PREEMPTED


TestScheduler: Any = pytest.mark.slow(SchedulerMachine.TestCase)
TestScheduler.settings = settings(stateful_step_count=60)
