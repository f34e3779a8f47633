"""A request's life in stretches of time, from what the journal keeps of it. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Stretch(NamedTuple):
    """One part of a request's life, in seconds since the router took it."""

    name: str
    where: str
    start_s: float
    seconds: float


def stretches(entry: Mapping[str, Any]) -> list[Stretch]:
    """Those of an entry of /debug/requests, in order; none for a request that was refused
    before anything ran."""
    if not entry["timelines"]:
        return []
    return stretches_of(entry["timelines"][0], entry["total_s"])


def stretches_of(line: Mapping[str, Any], total_s: float) -> list[Stretch]:
    """Those of one prompt, by its timeline."""
    prefill = line["prefill_worker"] or line["decode_worker"]
    found: list[Stretch] = []
    for name, where, field in (
        ("tokenize", "router", "tokenize_s"),
        ("queue", "router", "queue_s"),
        ("reserve", line["decode_worker"], "grant_wait_s"),
        *((("pull", prefill, "pull_s"),) if line.get("pulled_from") else ()),
        ("wait", prefill, "prefill_queue_s"),
        ("prefill", prefill, "prefill_s"),
    ):
        start_s = found[-1].start_s + found[-1].seconds if found else 0.0
        found.append(Stretch(name, where, start_s, line[field]))
    if line["transport"]:
        # KV leaves while later layers compute, so the two overlap.
        end_s = found[-1].start_s + found[-1].seconds
        start_s = max(found[-1].start_s, end_s - line["transfer_s"])
        found.append(Stretch("transfer", line["transport"], start_s, line["transfer_s"]))
    if line["ttft_s"] is not None:
        rest_s = max(0.0, total_s - line["ttft_s"])
        found.append(Stretch("decode", line["decode_worker"], line["ttft_s"], rest_s))
    return found
