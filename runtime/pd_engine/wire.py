"""Between the engine's own values and the messages of the protocol."""

import math
from collections.abc import Iterable

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_core.kv import KvLayout
from pd_engine.types import Finish, Mode, Request, RequestKey, Sampling, TokenOut
from pd_proto.v1 import engine_pb2 as pb

_MAX_CHOICES = 128

_FINISH_TO_PB = {
    None: pb.FINISH_UNSPECIFIED,
    Finish.STOP: pb.FINISH_STOP,
    Finish.LENGTH: pb.FINISH_LENGTH,
}
_FINISH_FROM_PB = {value: key for key, value in _FINISH_TO_PB.items()}


def sampling_from_pb(message: pb.Sampling) -> Sampling:
    return Sampling(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        grammar=message.grammar,
    )


def request_from_pb(
    message: pb.Generate | pb.Prefill, key: RequestKey, mode: Mode, vocab_size: int, now: float
) -> Request:
    """A request as the scheduler takes it.

    Raises RequestFailure(INVALID_REQUEST) for what no router of ours would send: the
    worker doesn't trust its peers' arithmetic.
    """
    tokens = tuple(message.token_ids)
    problem = None
    if not tokens:
        problem = "token_ids is empty"
    elif max(tokens) >= vocab_size:
        problem = f"token id {max(tokens)}: the model has {vocab_size} tokens"
    elif not 1 <= message.prompt_tokens <= len(tokens):
        problem = f"prompt_tokens = {message.prompt_tokens} with {len(tokens)} token_ids"
    elif not 1 <= len(message.choices) <= _MAX_CHOICES:
        problem = f"{len(message.choices)} choices: 1 to {_MAX_CHOICES} are possible"
    elif len(set(message.choices)) != len(message.choices):
        problem = "a choice is named twice"
    elif len(message.choices) > 1 and message.prompt_tokens != len(tokens):
        problem = "several choices can't share emitted tokens"
    elif message.sampling.max_tokens <= len(tokens) - message.prompt_tokens:
        problem = f"max_tokens = {message.sampling.max_tokens} leaves nothing to generate"
    elif not message.deadline_s > 0:
        problem = f"deadline_s = {message.deadline_s}"
    else:
        problem = _sampling_problem(message.sampling, vocab_size)
    if problem is not None:
        raise RequestFailure(FailureKind.INVALID_REQUEST, problem)
    deadline = now + message.deadline_s
    grant_deadline, tpot_s = deadline, 0.0
    if isinstance(message, pb.Generate):
        tpot_s = message.tpot_s if message.tpot_s > 0 else 0.0
        if message.grant_wait_s > 0:
            grant_deadline = min(deadline, now + message.grant_wait_s)
    return Request(
        key=key,
        request_id=message.id.request,
        attempt=message.id.attempt,
        token_ids=tokens,
        prompt_tokens=message.prompt_tokens,
        choices=tuple(message.choices),
        sampling=sampling_from_pb(message.sampling),
        mode=mode,
        deadline=deadline,
        grant_deadline=grant_deadline,
        priority=message.priority,
        cache_salt=message.cache_salt,
        tpot_s=tpot_s,
    )


def _sampling_problem(sampling: pb.Sampling, vocab_size: int) -> str | None:
    penalty = sampling.repetition_penalty
    if not 0 <= penalty < math.inf:
        return f"repetition_penalty = {penalty}"
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            return f"{name} = {getattr(sampling, name)}"
    if sampling.grammar and (sampling.min_tokens or sampling.ignore_eos):
        return "min_tokens and ignore_eos can't stand beside a grammar, which says where to end"
    for token, bias in sampling.logit_bias.items():
        if token >= vocab_size or not math.isfinite(bias):
            return f"logit_bias[{token}] = {bias}: the model has {vocab_size} tokens"
    return None


def token_to_pb(token: TokenOut, handle: int = 0) -> pb.TokenOut:
    """`handle` is set in Tokens, where one message serves many requests."""
    message = pb.TokenOut(
        handle=handle,
        choice=token.choice,
        index=token.index,
        token=token.token,
        finish=_FINISH_TO_PB[token.finish],
    )
    if token.logprob is not None:
        message.logprob = token.logprob
        for top_token, logprob in token.top:
            message.top.add(token=top_token, logprob=logprob)
    return message


def token_from_pb(message: pb.TokenOut) -> TokenOut:
    """Raises ValueError for a finish state that this version doesn't know."""
    if message.finish not in _FINISH_FROM_PB:
        raise ValueError(f"unknown finish state {message.finish}")
    return TokenOut(
        choice=message.choice,
        index=message.index,
        token=message.token,
        finish=_FINISH_FROM_PB[message.finish],
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple((t.token, t.logprob) for t in message.top),
    )


def failed_event(handle: int, failure: Failure) -> pb.Event:
    return pb.Event(
        failed=pb.Failed(handle=handle, kind=failure.kind.value, message=failure.message)
    )


def first_tokens(tokens: Iterable[TokenOut]) -> list[pb.TokenOut]:
    return [token_to_pb(token) for token in tokens]


def kv_format(layout: KvLayout) -> pb.KvFormat:
    return pb.KvFormat(
        dtype=layout.dtype,
        quantization=layout.quantization,
        block_tokens=layout.block_tokens,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_bytes=layout.block_bytes,
        protocol_version=layout.protocol_version,
    )
