"""Between the router's own values and the messages of the protocol."""

from collections.abc import Iterable
from typing import Any

from pd_proto.v1 import engine_pb2 as pb
from pd_router.fleet import LoadReport
from pd_router.moves import Committed, Granted, OpenDecode, OpenPrefill, Prefilled, Token
from pd_router.types import Bundle, FinishReason, GenerateRequest, Sampling

_LEASE_S = 30.0
_FINISH: dict[int, FinishReason | None] = {
    pb.FINISH_UNSPECIFIED: None,
    pb.FINISH_STOP: "stop",
    pb.FINISH_LENGTH: "length",
}


def sampling_to_pb(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        grammar=sampling.grammar,
    )


def generate_to_pb(
    action: OpenDecode,
    handle: int,
    request: GenerateRequest,
    sampling: pb.Sampling,
    tpot_s: float | None,
) -> pb.Command:
    """`tpot_s`: what the client was promised between two tokens."""
    return pb.Command(
        generate=pb.Generate(
            **_attempt(action, handle, request, sampling),
            grant_wait_s=action.grant_wait_s,
            prefill_here=action.prefill_here,
            tpot_s=tpot_s or 0.0,
        )
    )


def prefill_to_pb(
    action: OpenPrefill,
    handle: int,
    request: GenerateRequest,
    sampling: pb.Sampling,
    decode: pb.Hello,
) -> pb.Command:
    """`decode`: how the worker that takes the KV announced itself."""
    return pb.Command(
        prefill=pb.Prefill(
            **_attempt(action, handle, request, sampling),
            target=_kv_target(action.grant, decode),
            lease_s=_LEASE_S,
        )
    )


def pull_to_pb(handle: int, of: pb.TransferId, hashes: tuple[bytes, ...]) -> pb.Command:
    return pb.Command(pull=pb.Pull(handle=handle, id=of, hashes=hashes))


def share_to_pb(
    handle: int, of: pb.TransferId, hashes: tuple[bytes, ...], grant: Granted, target: pb.Hello
) -> pb.Command:
    """`target`: how the worker that takes the copy announced itself."""
    share = pb.Share(handle=handle, id=of, hashes=hashes, lease_s=_LEASE_S)
    share.target.CopyFrom(_kv_target(grant, target))
    return pb.Command(share=share)


def _kv_target(grant: Granted, worker: pb.Hello) -> pb.KvTarget:
    return pb.KvTarget(
        worker=worker.worker,
        epoch=worker.epoch,
        kv_address=grant.kv_address or worker.kv_address,
        layout_hash=worker.layout_hash,
        grant=grant.grant,
        prefix_tokens=grant.prefix_tokens,
    )


def _attempt(
    action: OpenDecode | OpenPrefill, handle: int, request: GenerateRequest, sampling: pb.Sampling
) -> dict[str, Any]:
    """What both sides of an attempt are told."""
    return {
        "handle": handle,
        "id": pb.TransferId(request=request.request_id, attempt=action.side.attempt),
        "token_ids": action.token_ids,
        "prompt_tokens": len(request.token_ids),
        "choices": action.choices,
        "sampling": sampling,
        "deadline_s": action.deadline_s,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
    }


def cancel_to_pb(handle: int) -> pb.Command:
    return pb.Command(cancel=pb.Cancel(handle=handle))


def renew_to_pb(handles: Iterable[int]) -> pb.Command:
    return pb.Command(renew=pb.Renew(handles=handles))


def token_from_pb(out: pb.TokenOut) -> Token:
    """A finish state that this version doesn't know ends the choice too: as `stop`."""
    finish = out.finish
    named = _FINISH.get(finish, "stop") if finish else None
    if not out.HasField("logprob"):  # the hot path
        return Token(out.choice, out.index, out.token, named)
    top = tuple((other.token, other.logprob) for other in out.top)
    return Token(out.choice, out.index, out.token, named, out.logprob, top)


def granted_from_pb(event: pb.Granted) -> Granted:
    return Granted(event.grant, event.prefix_tokens, event.wait_s, event.kv_address)


def prefilled_from_pb(event: pb.Prefilled) -> Prefilled:
    return Prefilled(
        first=tuple(token_from_pb(out) for out in event.first),
        cached_tokens=event.cached_tokens,
        queue_s=event.queue_s,
        prefill_s=event.prefill_s,
        kv_bytes=event.kv_bytes,
        transfer_s=event.transfer_s,
        transport=event.transport,
    )


def committed_from_pb(event: pb.Committed) -> Committed:
    return Committed(
        first=tuple(token_from_pb(out) for out in event.first),
        cached_tokens=event.cached_tokens,
        kv_bytes=event.kv_bytes,
        transfer_s=event.transfer_s,
        transport=event.transport,
    )


def load_from_pb(load: pb.Load) -> LoadReport:
    return LoadReport(
        queued=load.queued,
        running=load.running,
        waiting_grants=load.waiting_grants,
        pending_tokens=load.pending_tokens,
        kv_blocks=load.kv_blocks,
        kv_free=load.kv_free,
        kv_cached=load.kv_cached,
        kv_active=load.kv_active,
        kv_granted=load.kv_granted,
        kv_quarantined=load.kv_quarantined,
        step_s=load.step_s,
        steps=load.steps,
        busy_s=load.busy_s,
        computed_tokens=load.computed_tokens,
        computed_pairs=load.computed_pairs,
        pending_pairs=load.pending_pairs,
    )


def bundle_from_pb(message: pb.TokenizerBundle) -> Bundle:
    return Bundle(
        bundle_hash=message.bundle_hash,
        tokenizer_json=message.tokenizer_json,
        chat_template=message.chat_template,
        special_tokens=dict(message.special_tokens),
        eos_token_ids=tuple(message.eos_token_ids),
        add_bos=message.add_bos,
        vocab_size=message.vocab_size,
    )
