"""The drawn pictures of docs/: `python -m scripts.pictures`; a test compares.

How KV is handed over is a list of steps. How pools follow what is asked of them is the
simulator's run of examples/simulate.yaml, so the sizes are the operator's own decisions.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pd_cli.simulate import load_plan
from pd_operator.api import Role
from pd_sim import scalers, simulation, trace
from pd_sim.chance import Chance

ROOT = Path(__file__).resolve().parent.parent
_FOLDER = Path("docs/images")
_STYLE = """\
    text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2933; }
    .title { font-weight: 600; font-size: 15px; }
    .small { font-size: 12px; fill: #52606d; }
    .lane { stroke: #9aa5b1; stroke-dasharray: 4 4; }
    .line { fill: none; stroke: #52606d; stroke-width: 1.6; }
    .kv { fill: none; stroke: #b7791f; stroke-width: 5; }
    .prefill { fill: #fdf1dd; stroke: #b7791f; }
    .decode { fill: #e3f5ec; stroke: #2f855a; }
    .prefill-line { fill: none; stroke: #b7791f; stroke-width: 2; }
    .decode-line { fill: none; stroke: #2f855a; stroke-width: 2; }
    .asked { stroke-dasharray: 3 3; stroke-width: 1.4; }
    #tip path { fill: #52606d; }
    #kvtip path { fill: #b7791f; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e4e7eb; }
      .small { fill: #9aa5b1; }
      .line { stroke: #9aa5b1; }
      .kv, .prefill-line { stroke: #e0a94a; }
      .decode-line { stroke: #58b98a; }
      .prefill { fill: #3d2c10; stroke: #e0a94a; }
      .decode { fill: #123526; stroke: #58b98a; }
      #tip path { fill: #9aa5b1; }
      #kvtip path { fill: #e0a94a; }
    }
"""
_TIPS = """\
  <defs>
    <marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8"\
 orient="auto"><path d="M0 0 10 5 0 10z"/></marker>
    <marker id="kvtip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="3.4"\
 markerHeight="3.4" orient="auto"><path d="M0 0 10 5 0 10z"/></marker>
  </defs>
"""


def files() -> dict[Path, str]:
    """Path in the repository -> picture."""
    return {_FOLDER / "hand-over.svg": hand_over(), _FOLDER / "scaling.svg": scaling()}


def _picture(width: int, height: int, said: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
    body = "\n".join(f"  {part}" for part in parts)
    return (
        f'{head} aria-label="{escape(said)}">\n  <style>\n{_STYLE}  </style>\n{_TIPS}'
        f"{body}\n</svg>\n"
    )


def _text(x: float, y: float, said: str, kind: str = "", anchor: str = "middle") -> str:
    named = f'class="{kind}" ' if kind else ""
    return f'<text {named}x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(said)}</text>'


# ---- the hand-over -------------------------------------------------------------------------

_LANES = {"Client": 70, "Router": 270, "Prefill": 520, "Decode": 770}
_TOP, _STEP = 62, 34
_HALF = 48  # of a box


@dataclass(frozen=True, slots=True)
class Arrow:
    source: str
    target: str
    text: str
    kind: str = "line"
    working: bool = False
    """Its source works meanwhile, so it begins beside the box."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker does beside the arrows that come next, so many steps long."""

    where: str
    text: str
    steps: int


_STEPS: tuple[Arrow | Work, ...] = (
    Arrow("Client", "Router", "prompt"),
    Arrow("Router", "Decode", "reserve room for the KV"),
    Arrow("Decode", "Router", "granted"),
    Arrow("Router", "Prefill", "compute, and where to"),
    Work("Prefill", "chunk 1", 1),
    Work("Prefill", "chunk 2", 1),
    Arrow("Prefill", "Decode", "KV of chunk 1", "kv", working=True),
    Work("Prefill", "chunk 3", 1),
    Arrow("Prefill", "Decode", "KV of chunk 2", "kv", working=True),
    Arrow("Prefill", "Decode", "KV of chunk 3", "kv", working=True),
    Arrow("Prefill", "Decode", "seal: token 0, digest"),
    Arrow("Prefill", "Router", "token 0"),
    Arrow("Router", "Client", "token 0"),
    Work("Decode", "check, commit", 1),
    Work("Decode", "steps", 2),
    Arrow("Decode", "Router", "token 1, token 2, …", working=True),
    Arrow("Router", "Client", "token 1, token 2, …"),
)


def hand_over() -> str:
    """A request from top to bottom, a step a row; work takes none where an arrow follows it."""
    parts: list[str] = []
    row = 0
    for one in _STEPS:
        y = _TOP + row * _STEP
        if isinstance(one, Arrow):
            parts += _arrow(one, y)
            row += 1
        else:
            parts += _work(one, y)
            row += 1 if one.text in ("chunk 1", "check, commit") else 0
    bottom = _TOP + row * _STEP
    lanes = [
        f'<line class="lane" x1="{x}" y1="38" x2="{x}" y2="{bottom}"/>' for x in _LANES.values()
    ]
    heads = [_text(x, 26, name, "title") for name, x in _LANES.items()]
    said = " ".join(
        f"{one.source} to {one.target}: {one.text}." for one in _STEPS if isinstance(one, Arrow)
    )
    return _picture(860, bottom + 14, said, [*lanes, *heads, *parts])


def _arrow(one: Arrow, y: float) -> Iterator[str]:
    start, end = _LANES[one.source], _LANES[one.target]
    side = 1 if end > start else -1
    start, end = start + side * (_HALF + 4 if one.working else 4), end - side * 4
    tip = "kvtip" if one.kind == "kv" else "tip"
    yield f'<path class="{one.kind}" marker-end="url(#{tip})" d="M{start} {y}H{end}"/>'
    # Beside the lane of prefill, where an arrow crosses it.
    middle = (start + end) / 2 if abs(end - start) < 300 else _LANES["Router"] + 125
    yield _text(middle, y - 6, one.text, "small")


def _work(one: Work, y: float) -> Iterator[str]:
    x, high = _LANES[one.where], one.steps * _STEP - 6
    yield (
        f'<rect class="{one.where.lower()}" x="{x - _HALF}" y="{y - 14}" width="{2 * _HALF}" '
        f'height="{high}" rx="5"/>'
    )
    yield _text(x, y - 14 + high / 2 + 4, one.text, "small")


# ---- scaling -------------------------------------------------------------------------------

_MINUTES = 90
_PROMPTS_AT, _ANSWERS_AT, _HUMP_MIN = 25, 62, 9
_RATE_S = 12.0
_LEFT, _RIGHT = 60, 840
_HEIGHT = 110


def _hump(minute: float, at: float) -> float:
    return math.exp(-(((minute - at) / _HUMP_MIN) ** 2))


def day() -> trace.Trace:
    """A quiet load, then many long prompts, then many long answers."""
    chance, at_s, found = Chance(7), 0.0, []
    while at_s < _MINUTES * 60:
        at_s += chance.exponential(1 / _RATE_S)
        drawn = chance.uniform() * _RATE_S
        prompts = 5 * _hump(at_s / 60, _PROMPTS_AT)
        answers = 8 * _hump(at_s / 60, _ANSWERS_AT)
        if drawn < prompts:
            found.append(trace.Request(at_s, 6000, 150))
        elif drawn < prompts + answers:
            found.append(trace.Request(at_s, 400, 3000))
        elif drawn < prompts + answers + 1:
            found.append(trace.Request(at_s, 1000, 250))
    return trace.Trace(tuple(found))


def scaling() -> str:
    plan, asked = load_plan(ROOT / "examples" / "simulate.yaml"), day()
    found = simulation.run(plan, asked, scalers.Slo(plan.pools, plan.goal))
    tokens = {
        Role.PREFILL: _by_minute(asked, lambda one: one.prompt_tokens),
        Role.DECODE: _by_minute(asked, lambda one: one.output_tokens),
    }
    parts: list[str] = []
    top = 30
    for role, title in ((Role.PREFILL, "prompt"), (Role.DECODE, "answer")):
        parts += _demand(top, tokens[role], f"{title} tokens asked for, a second", str(role))
        top += _HEIGHT + 34
    parts += _sizes(top, found.sizes)
    parts += _minutes(top + _HEIGHT)
    within = math.floor(found.attainment * 1000) / 10
    parts.append(
        _text(_LEFT, top + _HEIGHT + 48, f"Simulated: {within:g}% of {found.requests:,} requests "
              f"within TTFT {plan.goal.ttft_s:g} s and TPOT {plan.goal.tpot_s * 1000:g} ms; a "
              "worker takes 2 min to start.", "small", "start")
    )  # fmt: skip
    said = (
        "Over 90 minutes many long prompts come first, then many long answers. The prefill pool "
        "grows and shrinks with the prompts, the decode pool with the answers."
    )
    return _picture(860, top + _HEIGHT + 60, said, parts)


def _by_minute(asked: trace.Trace, tokens: Callable[[trace.Request], int]) -> list[float]:
    found = [0.0] * _MINUTES
    for one in asked.requests:
        found[min(_MINUTES - 1, int(one.at_s // 60))] += tokens(one) / 60
    return found


def _x(minute: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * minute / _MINUTES


def _axis(top: float, title: str, most: float) -> Iterator[str]:
    yield _text(_LEFT, top - 8, title, "small", "start")
    yield _text(_LEFT - 6, top + 5, f"{most:,.0f}", "small", "end")
    yield _text(_LEFT - 6, top + _HEIGHT + 4, "0", "small", "end")
    yield f'<path class="lane" d="M{_LEFT} {top}H{_RIGHT}M{_LEFT} {top + _HEIGHT}H{_RIGHT}"/>'


def _demand(top: float, values: Sequence[float], title: str, role: str) -> Iterator[str]:
    most = math.ceil(max(values) / 10_000) * 10_000
    yield from _axis(top, title, most)
    points = " ".join(
        f"{_x(minute + 0.5):.0f},{top + _HEIGHT * (1 - value / most):.0f}"
        for minute, value in enumerate(values)
    )
    base = f"{top + _HEIGHT:g}"
    yield (
        f'<polygon class="{role}" points="{_x(0.5):.0f},{base} {points} '
        f'{_x(_MINUTES - 0.5):.0f},{base}"/>'
    )


def _sizes(top: float, sizes: Sequence[simulation.Sizes]) -> Iterator[str]:
    most = max(max(one.asked.values()) for one in sizes) + 1
    yield from _axis(top, "workers that serve (dotted: asked for)", most)
    for at, role in ((600, Role.PREFILL), (700, Role.DECODE)):
        yield f'<path class="{role}-line" d="M{at} {top - 12}h24"/>'
        yield _text(at + 30, top - 8, str(role), "small", "start")
    for role in (Role.PREFILL, Role.DECODE):
        asked = [(one.at_s, one.asked[role]) for one in sizes]
        serving = [(one.at_s, one.serving[role]) for one in sizes]
        yield _steps(top, asked, most, f"{role}-line asked")
        yield _steps(top, serving, most, f"{role}-line")


def _steps(top: float, values: Sequence[tuple[float, int]], most: int, kind: str) -> str:
    heights = [(_x(at_s / 60), top + _HEIGHT * (1 - value / most)) for at_s, value in values]
    path = f"M{heights[0][0]:.0f} {heights[0][1]:.1f}"
    path += "".join(f"H{x:.0f}V{y:.1f}" for x, y in heights[1:])
    return f'<path class="{kind}" d="{path}H{_RIGHT}"/>'


def _minutes(y: float) -> Iterator[str]:
    for minute in range(0, _MINUTES + 1, 15):
        anchor = "end" if minute == _MINUTES else "middle"
        yield _text(_x(minute), y + 20, f"{minute} min" if minute else "0", "small", anchor)


def main() -> None:
    for path, text in files().items():
        (ROOT / path).write_text(text)


if __name__ == "__main__":
    main()
