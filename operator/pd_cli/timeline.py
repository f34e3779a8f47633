"""PURE. What happened to one request, as a table for people."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from pd_router.stretches import stretches

_BAR = 32
_LEAST_BAR = 8
_GAPS = 10  # around the cells of five columns


@dataclass(frozen=True, slots=True)
class Step:
    """One stretch of a request's life, in seconds since the router took it."""

    name: str
    where: str
    start_s: float
    seconds: float
    detail: str = ""


def steps(entry: Mapping[str, Any]) -> list[Step]:
    """The steps of an entry of the router's /debug/requests page."""
    line = entry["timelines"][0]
    computed = line["prompt_tokens"] - line["cached_tokens"]
    details = {
        "reserve": "room for the KV",
        "wait": "for its turn",
        "pull": _pulled(line),
        "prefill": f"{line['prompt_tokens']} tokens, {computed} computed",
        "transfer": f"{_bytes(line['kv_bytes'])} of KV, {_time(line['exposed_s'])} exposed",
        "decode": f"{line['completion_tokens']} tokens",
    }
    return [Step(*one, details.get(one.name, "")) for one in stretches(entry)]


def _pulled(line: Mapping[str, Any]) -> str:
    if not line.get("pulled_tokens"):
        return "came to nothing"
    size = _bytes(line["pulled_bytes"])
    return f"{line['pulled_tokens']} tokens, {size} from {line['pulled_from']}"


def table(entry: Mapping[str, Any], width: int) -> Table:
    """The steps, with bars on one time scale, in `width` columns of a terminal.

    Where those are few, bars get shorter, then the details are left out.
    """
    rows = steps(entry)
    line = entry["timelines"][0]
    details = True
    room = width - _GAPS - _widest(row.name for row in rows) - _widest(row.where for row in rows)
    room -= _widest(_time(row.seconds) for row in rows)
    bar = room - _widest(row.detail for row in rows)
    if bar < _LEAST_BAR:
        details, bar = False, room
    bar = min(_BAR, max(_LEAST_BAR, bar))
    made = Table(title=f"What happened to {entry['id']}", title_justify="left", box=None)
    for name in ("step", "where", "time", "", "what")[: 5 if details else 4]:
        made.add_column(name, justify="right" if name == "time" else "left", no_wrap=True)
    for row in rows:
        cells = [row.name, row.where, _time(row.seconds), _bar(row, entry["total_s"], bar)]
        made.add_row(*cells, *([row.detail] if details else []))
    summary = f"TTFT {_time(line['ttft_s'])}   TPOT {_time(line['tpot_s'])}"
    made.caption = f"{summary}   total {_time(entry['total_s'])}"
    made.caption_justify = "left"
    return made


def _widest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)


def _bar(step: Step, total_s: float, width: int) -> str:
    """What takes any time at all has one cell."""
    scale = width / total_s if total_s > 0 else 0.0
    start = min(width - 1, int(step.start_s * scale))
    length = max(1, round(step.seconds * scale)) if step.seconds > 0 else 0
    return " " * start + "█" * min(length, width - start)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
