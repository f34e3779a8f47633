"""Between messages and the engine's values: nothing is lost, nonsense is refused."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.failures import FailureKind, RequestFailure
from pd_engine import wire
from pd_engine.types import Finish, Mode, Request, TokenOut
from pd_proto.v1 import engine_pb2 as pb

logprobs = st.floats(-50, 0, width=32)
tokens = st.builds(
    TokenOut,
    choice=st.integers(0, 127),
    index=st.integers(0, 2**20),
    token=st.integers(0, 2**20),
    finish=st.sampled_from([None, *Finish]),
    logprob=logprobs,
    top=st.lists(st.tuples(st.integers(0, 2**20), logprobs), max_size=5).map(tuple),
)


@given(tokens)
def test_a_token_survives_the_wire(token: TokenOut) -> None:
    message = pb.TokenOut.FromString(wire.token_to_pb(token).SerializeToString())
    assert wire.token_from_pb(message) == token


def test_no_logprob_stays_no_logprob() -> None:
    token = TokenOut(choice=0, index=0, token=5)
    assert wire.token_from_pb(wire.token_to_pb(token)).logprob is None


def test_an_unknown_finish_state_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown finish state 9"):
        wire.token_from_pb(pb.TokenOut(finish=9))


def sampling(**fields: Any) -> pb.Sampling:
    return pb.Sampling(max_tokens=5, **fields)


def generate(**changes: object) -> pb.Generate:
    fields: dict[str, object] = {
        "handle": 1,
        "id": pb.TransferId(request="r", attempt=2),
        "token_ids": [1, 2, 3],
        "prompt_tokens": 2,
        "choices": [0],
        "sampling": pb.Sampling(max_tokens=5, temperature=0.5, seed=2**63 + 1, logprobs=True),
        "deadline_s": 60.0,
        "grant_wait_s": 10.0,
        "priority": -1,
        "cache_salt": b"t",
    }
    return pb.Generate(**{**fields, **changes})


def parse(message: pb.Generate) -> Request:
    return wire.request_from_pb(message, (7, 1), Mode.IMPORT, vocab_size=100, now=1000.0)


def test_a_request_as_the_scheduler_takes_it() -> None:
    request = parse(generate())
    assert request.key == (7, 1)
    assert (request.request_id, request.attempt) == ("r", 2)
    assert request.token_ids == (1, 2, 3)
    assert request.first_index == 1
    assert request.sampling.max_tokens == 5
    assert request.sampling.temperature == 0.5
    assert request.sampling.seed == 2**63 + 1
    assert request.sampling.logprobs
    assert (request.deadline, request.grant_deadline) == (1060.0, 1010.0)
    assert (request.priority, request.cache_salt) == (-1, b"t")


@pytest.mark.parametrize(("told", "kept"), [(0.05, 0.05), (0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0)])
def test_what_was_promised_between_tokens(told: float, kept: float) -> None:
    assert parse(generate(tpot_s=told)).tpot_s == kept


def test_what_a_router_leaves_out_changes_no_logits() -> None:
    plain = parse(generate()).sampling
    assert not plain.penalizes
    assert plain.logit_bias == ()
    asked = sampling(repetition_penalty=0.5, presence_penalty=-1, logit_bias={9: 1.5, 3: -2})
    found = parse(generate(sampling=asked)).sampling
    assert (found.repetition_penalty, found.presence_penalty, found.frequency_penalty) == (
        0.5,
        -1.0,
        0.0,
    )
    assert found.penalizes
    assert found.logit_bias == ((3, -2.0), (9, 1.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [], "prompt_tokens": 0}, "token_ids is empty"),
        ({"token_ids": [1, 100], "prompt_tokens": 2}, "token id 100: the model has 100 tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens = 0"),
        ({"prompt_tokens": 4}, "prompt_tokens = 4"),
        ({"choices": []}, "0 choices"),
        ({"choices": list(range(129)), "prompt_tokens": 3}, "129 choices"),
        ({"choices": [0, 0], "prompt_tokens": 3}, "named twice"),
        ({"choices": [0, 1]}, "can't share emitted tokens"),
        ({"sampling": pb.Sampling(max_tokens=1)}, "leaves nothing to generate"),
        ({"sampling": sampling(repetition_penalty=-1)}, "repetition_penalty"),
        ({"sampling": sampling(grammar="g", min_tokens=1)}, "beside a grammar"),
        ({"sampling": sampling(grammar="g", ignore_eos=True)}, "beside a grammar"),
        ({"sampling": sampling(presence_penalty=float("inf"))}, "presence_penalty"),
        ({"sampling": sampling(frequency_penalty=float("nan"))}, "frequency_penalty"),
        ({"sampling": sampling(logit_bias={100: 1.0})}, r"logit_bias\[100\] .* 100 tokens"),
        ({"sampling": sampling(logit_bias={5: float("-inf")})}, r"logit_bias\[5\]"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestFailure, match=message) as error:
        parse(generate(**changes))
    assert error.value.failure.kind is FailureKind.INVALID_REQUEST
