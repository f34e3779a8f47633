"""Covers web/logic.js in a JavaScript engine: quantiles, plots, bars, events of a stream, and
that nothing grows without bound."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from py_mini_racer import MiniRacer

from pd_router import page

LOGIC = (Path(page.__file__).parent / "web" / "logic.js").read_text()
Evaluate = Callable[[str], Any]


@pytest.fixture(scope="module")
def js() -> Evaluate:
    """The value of a JavaScript expression."""
    engine = MiniRacer()
    engine.eval(LOGIC)
    return lambda code: json.loads(engine.eval(f"JSON.stringify((() => {code})())"))


@pytest.mark.parametrize(
    ("before", "after", "q", "found"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0], 0.5, None),
        ([0, 0, 0, 0], [10, 10, 10, 10], 0.5, 0.5),
        ([5, 5, 5, 5], [5, 15, 15, 15], 0.5, 1.5),
        ([0, 0, 0, 0], [0, 0, 10, 10], 1.0, 4.0),
        ([0, 0, 0, 0], [0, 0, 0, 3], 0.5, 4.0),  # beyond the last bound
        ([9, 9, 9, 9], [1, 1, 1, 1], 0.5, None),  # the router began anew
    ],
)
def test_quantiles_between_two_looks(
    js: Evaluate, before: list[int], after: list[int], q: float, found: float | None
) -> None:
    assert js(f"Logic.quantile([1, 2, 4], {before}, {after}, {q})") == found


def test_a_plot_looks_back_some_looks_and_forgets(js: Evaluate) -> None:
    made = js("""{
        const plot = new Logic.Latency();
        for (let i = 0; i <= 3600; i += 1)
            plot.look(i, { bounds: [1], counts: [i < 10 ? i : 10, i < 10 ? i : 10] });
        return { points: plot.points.items.length, looks: plot.looks.items.length,
                 last: plot.points.last, history: Logic.HISTORY, window: Logic.WINDOW };
    }""")
    assert (made["points"], made["looks"]) == (made["history"], made["window"] + 1)
    assert made["last"] == {"now": 3600, "p50": None, "p99": None}


def test_a_time_of_another_day_says_which(js: Evaluate) -> None:
    made = js("""{
        const today = new Date("2026-03-02T12:00:00Z");
        return ["2026-03-02T11:00:00Z", "2026-02-01T11:00:00Z", "soon"].map(
            (time) => Logic.clock(time, today));
    }""")
    assert "2026" not in made[0]
    assert "2026" in made[1]
    assert made[2] == "soon"


def test_pools_come_in_a_requests_order(js: Evaluate) -> None:
    told = '[{"pool": "decode"}, {"pool": "prefill"}]'
    assert js(f"Logic.ordered({told})") == [{"pool": "prefill"}, {"pool": "decode"}]


def test_a_path_has_gaps_and_ends_at_now(js: Evaluate) -> None:
    points = [{"p50": 1}, {"p50": 2}, {"p50": None}, {"p50": 0}]
    box = '{"left": 0, "right": 179, "top": 0, "bottom": 100}'
    made = js(f"Logic.path({json.dumps(points).replace('None', 'null')}, 'p50', {box}, 2)")
    assert made == "M176.0 50.0L176.1 50.0L177.0 0.0M179.0 100.0L179.1 100.0"
    assert js(f"Logic.path([], 'p50', {box}, 2)") == ""


@pytest.mark.parametrize(
    ("values", "found"), [([], 0.001), ([0.3, 0.02], 0.5), ([1.0], 1), ([7, 11], 20)]
)
def test_round_tops(js: Evaluate, values: list[float], found: float) -> None:
    assert js(f"Logic.top({values})") == pytest.approx(found)


@pytest.mark.parametrize(
    ("value", "text"),
    [("null", "-"), ("undefined", "-"), ("0.0123", "12.3 ms"), ("0.25", "250 ms"), ("2", "2.00 s")],
)
def test_seconds_for_people(js: Evaluate, value: str, text: str) -> None:
    assert js(f"Logic.seconds({value})") == text


def test_bars_of_a_request(js: Evaluate) -> None:
    stretches = [
        {"name": "queue", "where": "router", "start_s": 0, "seconds": 0},
        {"name": "wait", "where": "p-0", "start_s": 0, "seconds": 0.001},
        {"name": "prefill", "where": "p-0", "start_s": 0.001, "seconds": 1},
        {"name": "decode", "where": "d-0", "start_s": 2, "seconds": 2},
    ]
    wait, prefill, decode = js(f"Logic.bars({{ stretches: {json.dumps(stretches)} }}, 4)")
    assert (wait["kind"], wait["width"]) == ("queue", 0.4)  # what took any time is seen
    assert (prefill["kind"], prefill["width"]) == ("prefill", 25)
    assert (decode["x"], decode["width"]) == (50, 50)
    assert decode["text"] == "decode 2.00 s at d-0"


def test_workers_in_the_order_of_a_request_and_their_summary(js: Evaluate) -> None:
    workers = [
        {"worker": name, "role": role, "usable": usable}
        for name, role, usable in (
            ("d-10", "decode", True), ("d-2", "decode", False), ("p-0", "prefill", True),
        )
    ]  # fmt: skip
    listed = json.dumps(workers)
    assert js(f"Logic.ordered({listed}).map((one) => one.worker)") == ["p-0", "d-2", "d-10"]
    state = f"{{ workers: {listed}, queued: {{ requests: 3 }} }}"
    assert js(f"Logic.summary({state})") == (
        "prefill 1 of 1 ready, decode 1 of 2 ready; 3 waiting in the router"
    )
    nobody = js("Logic.summary({ workers: [], queued: { requests: 0 } })")
    assert nobody == "no worker has announced itself; 0 waiting in the router"


def test_events_whatever_pieces_they_come_in(js: Evaluate) -> None:
    stream = 'data: {"a": 1}\n\n: a comment\n\ndata: two\r\n\r\ndata: [DONE]\n\n'
    whole = ['{"a": 1}', "two", "[DONE]"]
    for size in (1, 3, 7, len(stream)):
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        code = "{ const e = new Logic.Events(); return %s.flatMap((p) => e.take(p)); }"
        assert js(code % json.dumps(pieces)) == whole


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ("[DONE]", {"done": True}),
        ('{"choices": [{"delta": {"content": "x"}}]}', {"text": "x"}),
        ('{"choices": [{"delta": {}}]}', {"text": ""}),
        ('{"choices": []}', {"text": ""}),
        ('{"error": {"message": "no workers"}}', {"error": "no workers"}),
        ("<html>", {"error": "The router said something that isn't its API."}),
    ],
)
def test_what_an_event_says(js: Evaluate, data: str, found: dict[str, Any]) -> None:
    assert js(f"Logic.said({json.dumps(data)})") == found


def test_a_conversation_stays_bounded_and_begins_with_its_user(js: Evaluate) -> None:
    roles = js("""{
        let messages = [];
        for (let i = 0; i < 500; i += 1) {
            messages.push({ role: i % 2 ? "assistant" : "user" });
            messages = Logic.kept(messages);
        }
        return messages.map((one) => one.role);
    }""")
    assert len(roles) <= js("Logic.MESSAGES")
    assert roles[0] == "user"
