"""PURE. What `pdcluster top` draws: workers, latencies and recent requests, as text."""

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

WINDOW = 5  # looks that one value sums up
HISTORY = 60
_SPARKS = "▁▂▃▄▅▆▇█"
_BAR = 10
_WAY = 24
_CHANGES = 3
_ORDER = ("prefill", "decode", "both")
_COLORS = {"prefill": "yellow", "transfer": "magenta", "decode": "blue"}
_WIDE = 110  # columns from which on requests say where their time went


def quantile(
    bounds: Sequence[float], before: Sequence[float], after: Sequence[float], share: float
) -> float | None:
    """Between two looks at growing counts, by straight lines. None: nothing came, or the
    router began anew."""
    delta = [late - early for early, late in zip(before, after, strict=True)]
    if min(delta) < 0 or not delta[-1]:
        return None
    rank = share * delta[-1]
    at = next(i for i, count in enumerate(delta) if count >= rank)
    if at == len(bounds):
        return bounds[-1]
    low, below = (bounds[at - 1], delta[at - 1]) if at else (0.0, 0.0)
    inside = delta[at] - below
    return low + (bounds[at] - low) * (rank - below) / inside if inside else bounds[at]


class Latency:
    """One latency over time, look by look; bounded."""

    def __init__(self, whole: bool = False) -> None:
        """`whole`: of all that routers have seen, for whoever looks only once."""
        self._whole = whole
        self._looks: deque[Sequence[float]] = deque(maxlen=WINDOW + 1)
        self.points: deque[tuple[float | None, float | None]] = deque(maxlen=HISTORY)

    def look(self, distribution: Mapping[str, Sequence[float]]) -> None:
        counts = distribution["counts"]
        self._looks.append([0.0] * len(counts) if self._whole else counts)
        found = (
            quantile(distribution["bounds"], self._looks[0], counts, share) for share in (0.5, 0.99)
        )
        self.points.append((next(found), next(found)))

    def line(self, name: str) -> Text:
        """The last values, and how p99 went."""
        half, most = self.points[-1] if self.points else (None, None)
        words = f"{name:<5} p50 {seconds(half):>8}  p99 {seconds(most):>8}  "
        if self._whole:
            return Text(f"{words}since the routers' start")
        return Text(words) + Text(sparks([one for _, one in self.points]), style="cyan")


def sparks(values: Iterable[float | None]) -> str:
    """A character a value, up to the highest; a blank where there is none."""
    known = list(values)
    top = max((one for one in known if one is not None), default=0.0)
    if not top:
        return " " * len(known)
    steps = len(_SPARKS) - 1
    return "".join(" " if v is None else _SPARKS[round(v / top * steps)] for v in known)


def screen(
    state: Mapping[str, Any], latencies: Mapping[str, Latency], width: int, height: int
) -> RenderableType:
    """All of it, in a terminal of so many columns and lines."""
    health = Text("ready", "green") if state["ready"] else Text("no usable pair", "bold red")
    head = Text.assemble(
        (state["model"], "bold"), "  ", health, f"  waiting in the router: "
        f"{state['queued']['requests']}  router: {state['router']}",
    )  # fmt: skip
    workers = _workers(state["workers"], width)
    lines = [one.line(name.upper()) for name, one in latencies.items()]
    why = _sizes(state.get("sizes", {}), width)
    left = max(3, height - workers.row_count - len(lines) - len(why) - 8)
    requests = _requests(state, width, left)
    return Group(head, Text(), workers, *why, Text(), *lines, Text(), requests)


def _sizes(sizes: Mapping[str, Any], width: int) -> list[Text]:
    """Why pools have their sizes: what holds, then the last changes, a line each."""
    standing, changes = sizes.get("standing", ()), sizes.get("changes", ())
    known = {one["text"] for one in standing}
    shown = [*standing, *[one for one in changes if one["text"] not in known][:_CHANGES]]
    lines = [Text(f"{_clock(one['time'])}  {one['text']}") for one in shown]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return [Text(), *lines] if lines else []


def _clock(time: str) -> str:
    try:
        return datetime.fromisoformat(time).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return time


def _workers(workers: Sequence[Mapping[str, Any]], width: int) -> Table:
    table = _table("pool", "worker", "state", "queue>", "batch>", "waits>", "tokens left>", "KV")
    for one in sorted(workers, key=_place):
        state = Text(one["state"], "green" if one["usable"] else "red")
        table.add_row(
            one["role"], one["worker"], state, str(one["queued"]), str(one["running"]),
            str(one["waiting_grants"]), str(one["pending_tokens"]), _kv(one["kv_share"], width),
        )  # fmt: skip
    return table


def _place(worker: Mapping[str, Any]) -> tuple[int, list[int | str]]:
    """Pools in a request's order, workers by number."""
    parts: list[int | str] = [
        int(part) if part.isdigit() else part for part in re.split(r"(\d+)", worker["worker"])
    ]
    return _ORDER.index(worker["role"]), parts


def _kv(share: float, width: int) -> str:
    if width < _WIDE:
        return f"{share:.0%}"
    full = round(share * _BAR)
    return f"{'█' * full}{'░' * (_BAR - full)} {share:>4.0%}"


def _requests(state: Mapping[str, Any], width: int, most: int) -> Table:
    wide = width >= _WIDE
    names = ("ended", "answer", "prompt>", "output>", "TTFT>", "TPOT>", "total>")
    table = _table(*names, *(["where the time went"] if wide else []), "decode")
    shown = state["requests"][:most]
    longest_s = max((one["total_s"] for one in shown), default=0.0)
    for one in shown:
        failed = bool(one["failure"])
        answer = Text(one["failure"] or str(one["status"]), "red" if failed else "green")
        table.add_row(
            datetime.fromtimestamp(one["ended_at"]).strftime("%H:%M:%S"), answer,
            str(one["prompt_tokens"]), str(one["completion_tokens"]), seconds(one["ttft_s"]),
            seconds(one["tpot_s"]), seconds(one["total_s"]),
            *([_way(one, longest_s)] if wide else []), one["decode"],
        )  # fmt: skip
    return table


def _way(request: Mapping[str, Any], longest_s: float) -> Text:
    """The stretches on one scale; a hand-over beside its prefill isn't seen apart."""
    cells = [(" ", "")] * _WAY
    scale = _WAY / longest_s if longest_s else 0.0
    for one in request["stretches"]:
        first = min(int(one["start_s"] * scale), _WAY - 1)
        last = min(int((one["start_s"] + one["seconds"]) * scale), _WAY - 1)
        for cell in range(first, last + 1 if one["seconds"] else first):
            cells[cell] = ("█", _COLORS.get(one["name"], "bright_black"))
    return Text.assemble(*cells)


def _table(*names: str) -> Table:
    """`>` behind a name: numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        justify: JustifyMethod = "right" if name.endswith(">") else "left"
        table.add_column(name.removesuffix(">"), justify=justify, no_wrap=True)
    return table


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
