"""What the live page and `pdcluster top` show, as one small document. Pure.

Of requests it has times, counts and workers, never a text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pd_router.signals import Queued
from pd_router.stretches import stretches

RECENT_REQUESTS = 30
Distribution = dict[str, list[float]]


def document(
    head: Mapping[str, Any],
    queued: Queued,
    workers: Sequence[Mapping[str, Any]],
    entries: Sequence[Mapping[str, Any]],
    distributions: Mapping[str, Distribution],
) -> dict[str, Any]:
    """`head`: the model, the router, whether it's ready. `entries`: the latest first."""
    return {
        **head,
        "queued": {"requests": queued.requests, "tokens": queued.tokens},
        "workers": [_worker(one) for one in workers],
        "requests": [_request(one) for one in entries[:RECENT_REQUESTS]],
        "distributions": distributions,
    }


def merged(router: str, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document of those of several routers, or processes of one: each hears the same
    workers, and has requests of its own. There is at least one."""
    first = documents[0]
    requests = [one for document in documents for one in document["requests"]]
    requests.sort(key=lambda one: float(one["ended_at"]), reverse=True)
    return {
        **first,
        "router": router,
        "ready": any(document["ready"] for document in documents),
        "sizes": max((document.get("sizes", {}) for document in documents), key=_newest),
        "queued": {
            name: sum(document["queued"][name] for document in documents)
            for name in first["queued"]
        },
        "requests": requests[:RECENT_REQUESTS],
        "distributions": {
            name: {"bounds": one["bounds"], "counts": _added(documents, name)}
            for name, one in first["distributions"].items()
        },
    }


def _newest(sizes: Mapping[str, Any]) -> str:
    """When the latest of it was decided: a router may not have been told yet."""
    said = [*sizes.get("standing", ()), *sizes.get("changes", ())]
    return max((str(one["time"]) for one in said), default="")


def _added(documents: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    counts = [document["distributions"][name]["counts"] for document in documents]
    return [sum(column) for column in zip(*counts, strict=True)]


def _worker(one: Mapping[str, Any]) -> dict[str, Any]:
    load = one["load"]
    blocks = load["kv_blocks"]
    return {
        "worker": one["worker"],
        "role": one["role"],
        "revision": one["revision"],
        "state": one["why_unusable"] or "ready",
        "usable": one["usable"],
        "queued": load["queued"],
        "running": load["running"],
        "waiting_grants": load["waiting_grants"],
        "pending_tokens": one["pending_tokens"],
        "kv_share": min(one["kv_used"] / blocks, 1.0) if blocks else 0.0,
        "step_s": load["step_s"],
    }


def _request(entry: Mapping[str, Any]) -> dict[str, Any]:
    failure = entry["failure"] or {}
    lines = entry["timelines"]
    line: Mapping[str, Any] = lines[0] if lines else {}
    return {
        "id": entry["id"] or entry["request_id"],
        "status": entry["status"],
        "failure": failure.get("kind", ""),
        "ended_at": entry["ended_at"],
        "total_s": entry["total_s"],
        "ttft_s": line.get("ttft_s"),
        "tpot_s": line.get("tpot_s"),
        "prompt_tokens": sum(one["prompt_tokens"] for one in lines),
        "cached_tokens": sum(one["cached_tokens"] for one in lines),
        "completion_tokens": sum(one["completion_tokens"] for one in lines),
        "prefill": line.get("prefill_worker", ""),
        "decode": line.get("decode_worker", ""),
        "transport": line.get("transport", ""),
        "attempts": max((one["attempts"] for one in lines), default=0),
        "reason": line.get("reason", ""),
        "stretches": [one._asdict() for one in stretches(entry)],
    }
