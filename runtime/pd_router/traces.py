"""A request's spans, from what the journal keeps of it. Pure.

Names are those of OpenTelemetry's conventions for HTTP and for generative AI; what those don't
have begins with `pdcluster.`. Of what a client wrote they hold the model's name, the ids of request
and session, and numbers: all of them bounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pd_router.stretches import stretches_of

if TYPE_CHECKING:
    from pd_router.openai import Ask

Value = str | int | float | bool | Sequence[str]
_OPERATIONS = {"chat": "chat", "completion": "text_completion"}
ROUTER, PREFILL, DECODE = "router", "prefill", "decode"
_MOST_CHARACTERS = 200
_MOST = 2**63 - 1  # that the wire can tell
_SERVICES = {
    "tokenize": ROUTER, "queue": ROUTER, "reserve": DECODE, "wait": PREFILL,
    "pull": PREFILL, "prefill": PREFILL, "transfer": PREFILL, "decode": DECODE,
}  # fmt: skip


class Span(NamedTuple):
    """One span: times in seconds since the request was accepted. `service`: who did it."""

    name: str
    service: str
    start_s: float
    seconds: float
    attributes: Mapping[str, Value]


class Used(NamedTuple):
    """Tokens of all prompts and choices, and why the choices ended."""

    prompt: int
    completion: int
    cached: int
    finishes: Sequence[str]


def root_name(ask: "Ask | None", method: str, path: str, served: str) -> str:
    """As the conventions have it: what is done, and with which model. One that isn't served
    has no part in it: names are few."""
    if ask is None:
        return f"{method} {path}"
    return f"{_OPERATIONS[ask.kind]} {served}" if ask.model == served else _OPERATIONS[ask.kind]


def root_attributes(
    entry: Mapping[str, Any], ask: "Ask | None", method: str, used: Used | None
) -> dict[str, Value]:
    """Of the request as a whole. `entry`: of /debug/requests. `used`: once something ran."""
    lines, failure = entry["timelines"], entry["failure"]
    found: dict[str, Value] = {
        "http.request.method": method,
        "url.path": entry["path"],
        "pdcluster.request_id": entry["request_id"],
    }
    if entry["status"]:
        found["http.response.status_code"] = entry["status"]
    if failure:
        found["error.type"] = str(failure["kind"])
    if ask is not None:
        found |= _asked(ask)
    if used is not None:
        found |= {
            "gen_ai.response.id": entry["id"],
            "gen_ai.usage.input_tokens": used.prompt,
            "gen_ai.usage.output_tokens": used.completion,
            "gen_ai.usage.cache_read.input_tokens": used.cached,
        }
        if used.finishes:
            found["gen_ai.response.finish_reasons"] = list(used.finishes)
    if lines:
        found["pdcluster.attempts"] = max(line["attempts"] for line in lines)
        first_s = lines[0]["ttft_s"]
        if first_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = first_s
    return found


def _asked(ask: "Ask") -> dict[str, Value]:
    found: dict[str, Value] = {
        "gen_ai.operation.name": _OPERATIONS[ask.kind],
        "gen_ai.provider.name": "pdcluster",
        "gen_ai.request.model": ask.model[:_MOST_CHARACTERS],
        "gen_ai.request.stream": ask.stream,
        "gen_ai.request.choice.count": ask.choices,
        "gen_ai.request.temperature": ask.temperature,
        "gen_ai.request.top_p": ask.top_p,
        "gen_ai.request.top_k": min(ask.top_k, _MOST),
        "gen_ai.request.frequency_penalty": ask.frequency_penalty,
        "gen_ai.request.presence_penalty": ask.presence_penalty,
    }
    if ask.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = min(ask.max_tokens, _MOST)
    if ask.session_id:
        found["gen_ai.conversation.id"] = ask.session_id[:_MOST_CHARACTERS]
    return found


def children(entry: Mapping[str, Any]) -> Iterator[Span]:
    """What happened where, prompt after prompt."""
    lines = entry["timelines"]
    for number, line in enumerate(lines):
        which: dict[str, Value] = {"pdcluster.prompt": number} if len(lines) > 1 else {}
        for name, where, start_s, seconds in stretches_of(line, entry["total_s"]):
            if not where:
                continue  # no worker had been chosen when it ended
            service = _SERVICES[name]
            if service == PREFILL and where == line["decode_worker"]:
                service = DECODE  # it was computed where it was decoded
            yield Span(name, service, start_s, seconds, which | _of(name, where, line))


def _of(name: str, where: str, line: Mapping[str, Any]) -> dict[str, Value]:
    """What there is to say of one stretch; `where` as in `stretches`."""
    if name == "queue":
        return {"pdcluster.routing.reason": line["reason"]}
    if name == "transfer":
        return {
            "pdcluster.worker": line["prefill_worker"],
            "pdcluster.transfer.target": line["decode_worker"],
            "pdcluster.transfer.transport": where,
            "pdcluster.transfer.bytes": line["kv_bytes"],
            "pdcluster.transfer.exposed_s": line["exposed_s"],
        }
    if name == "tokenize":
        return {"gen_ai.usage.input_tokens": line["prompt_tokens"]}
    found: dict[str, Value] = {"pdcluster.worker": where}
    if name == "pull":
        found["pdcluster.pull.source"] = line["pulled_from"]
        found["pdcluster.pull.tokens"] = line["pulled_tokens"]
        found["pdcluster.pull.bytes"] = line["pulled_bytes"]
    if name == "prefill":
        found["pdcluster.computed_tokens"] = line["prompt_tokens"] - line["cached_tokens"]
    if name == "decode":
        found["gen_ai.usage.output_tokens"] = line["completion_tokens"]
        if line["tpot_s"] is not None:
            found["pdcluster.tpot_s"] = line["tpot_s"]
    return found
