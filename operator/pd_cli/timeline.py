"""PURE. What happened to one request, as a table for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

_BAR = 32


@dataclass(frozen=True, slots=True)
class Step:
    """One stretch of a request's life; steps follow each other."""

    name: str
    where: str
    seconds: float
    detail: str = ""


def steps(entry: Mapping[str, Any]) -> list[Step]:
    """The steps of an entry of the router's /debug/requests page."""
    line = entry["timelines"][0]
    kv = _bytes(line["kv_bytes"])
    ttft_s = line["ttft_s"] or 0.0
    computed = line["prompt_tokens"] - line["cached_tokens"]
    prompt = f"{line['prompt_tokens']} prompt tokens, {computed} computed"
    found = [
        Step("tokenize", "router", line["tokenize_s"]),
        Step("queue", "router", line["queue_s"]),
        Step("reserve", line["decode_worker"], line["grant_wait_s"], "room for the KV"),
    ]
    if line["prefill_worker"]:
        waited = line["prefill_queue_s"]
        found.append(Step("wait", line["prefill_worker"], waited, "for its turn"))
    found.append(
        Step("prefill", line["prefill_worker"] or line["decode_worker"], line["prefill_s"], prompt)
    )
    if line["transport"]:
        found.append(Step("transfer", line["transport"], line["transfer_s"], f"{kv} of KV"))
    tokens = line["completion_tokens"]
    decode_s = max(0.0, entry["total_s"] - ttft_s)
    found.append(Step("decode", line["decode_worker"], decode_s, f"{tokens} tokens"))
    return found


def table(entry: Mapping[str, Any]) -> Table:
    """The steps with bars, one beginning where the one before it ends."""
    rows = steps(entry)
    line = entry["timelines"][0]
    made = Table(title=f"What happened to {entry['id']}", title_justify="left", box=None)
    for name in ("step", "where", "time", "", "what"):
        made.add_column(name, justify="right" if name == "time" else "left", no_wrap=True)
    for row, bar in zip(rows, _bars([row.seconds for row in rows]), strict=True):
        made.add_row(row.name, row.where, _time(row.seconds), bar, row.detail)
    summary = f"TTFT {_time(line['ttft_s'])}   TPOT {_time(line['tpot_s'])}"
    made.caption = f"{summary}   total {_time(entry['total_s'])}"
    made.caption_justify = "left"
    return made


def _bars(durations: Sequence[float]) -> list[str]:
    """Bars on one scale; what takes any time at all has one cell."""
    total = sum(durations) or 1.0
    bars, passed = [], 0.0
    for seconds in durations:
        start = min(_BAR - 1, int(passed / total * _BAR))
        length = max(1, round(seconds / total * _BAR)) if seconds > 0 else 0
        bars.append(" " * start + "█" * min(length, _BAR - start))
        passed += seconds
    return bars


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
