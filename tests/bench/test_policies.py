"""Covers bench.replay: a made trace with shared prefixes through simulated workers, with one
router and with several; the default against policies that go by one thing."""

from dataclasses import replace

import pytest

from bench.replay import Replay, Result, Site, sessions
from pd_core import known_models
from pd_core.estimate import LINKS
from pd_core.gpus import GPUS
from pd_router import policy
from pd_router.routing import PolicyName, Routing
from pd_sim import perf
from pd_sim.trace import Request, Trace


def site(routers: int) -> Site:
    model = known_models.find("llama-3-8b")
    assert model is not None
    fast = perf.from_data_sheet(model, GPUS["h100"], 1)
    slow = perf.from_data_sheet(model, GPUS["a100"], 1)
    return Site((fast, slow), (fast, slow), LINKS["rdma-400g"], routers)


def talks(count: int) -> Trace:
    """Conversations of four turns, each longer by 1,024 tokens than the one before."""
    requests = [
        Request(
            at_s=0.8 * talk + 12.0 * turn,
            prompt_tokens=2048 + 1024 * turn,
            output_tokens=100,
            blocks=tuple(b"%d-%d" % (talk, block) for block in range(4 + 2 * turn)),
        )
        for talk in range(count)
        for turn in range(4)
    ]
    return Trace(tuple(sorted(requests, key=lambda one: one.at_s)))


def replay(policy: PolicyName, routers: int) -> Result:
    return Replay(site(routers), talks(60), Routing(policy)).run()


@pytest.mark.parametrize("routers", [1, 4])
def test_the_default_against_chance(routers: int) -> None:
    default, chance = replay("cost", routers), replay("random", routers)
    assert len(default.outcomes) == 240
    assert all(one.tpot_s is not None for one in default.outcomes), "all end"
    assert default.ttft(90) < chance.ttft(90)
    assert default.hit_rate > chance.hit_rate
    assert default.goodput(1.0, 0.1) >= chance.goodput(1.0, 0.1)


def test_turns_of_a_session_are_found_by_their_blocks() -> None:
    made = talks(3).requests
    found = sessions(made)
    by_talk: dict[bytes, set[bytes]] = {}
    for request, session in zip(made, found, strict=True):
        by_talk.setdefault(request.blocks[0].split(b"-")[0], set()).add(session)
    assert all(len(one) == 1 for one in by_talk.values()), by_talk
    assert len(set(found)) == 3
    begins = [Request(0.0, 1100, 1, (b"system", b"%d" % one, b"rest")) for one in range(3)]
    alone = Request(0.0, 600, 1, (b"system", b"end"))
    assert len(set(sessions([alone, *begins]))) == 3, "what all begin with is nobody's"
    assert sessions([Request(0.0, 100, 1)]) == [b""], "no blocks, no session"


def test_sessions_and_long_prompts_have_their_ways() -> None:
    session, chance = replay("session", 1), replay("random", 1)
    assert session.hit_rate > chance.hit_rate
    length, load = replay("prompt_length", 1), replay("least_load", 1)
    assert length.ttft(50) < load.ttft(50), "on unequal GPUs"


def documents(count: int) -> Trace:
    """Each new document is asked about by four, within less than it takes to announce it."""
    requests = [
        Request(
            at_s=2.5 * one + 0.25 * reader,
            prompt_tokens=8192 + 100,
            output_tokens=20,
            blocks=(*(b"%d-%d" % (one, n) for n in range(16)), b"%d-%d-end" % (one, reader)),
        )
        for one in range(count)
        for reader in range(4)
    ]
    return Trace(tuple(requests))


def test_new_prefixes_are_split_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 routers, none of which knows what the others have just sent where."""
    many = replace(site(8), prefill=site(8).prefill[:1] * 4)
    routing = Routing(disaggregate="always")
    together = Replay(many, documents(100), routing).run()
    monkeypatch.setattr(policy, "_HOME_SLACK", float("-inf"))
    split = Replay(many, documents(100), routing).run()
    assert together.hit_rate > split.hit_rate + 0.05, (together.hit_rate, split.hit_rate)
    assert together.ttft(90) <= split.ttft(90)


def test_it_is_the_same_each_time() -> None:
    first, second = replay("cost", 4), replay("cost", 4)
    assert first.outcomes == second.outcomes
