"""The live page in a real Chromium, beside a real cluster: a chat whose tokens appear one by
one, workers that go and come, accessibility by axe-core in light and dark, by keyboard alone,
nothing from elsewhere, and an hour of looks that leaves no more behind than five minutes.
"""

import asyncio
import json
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from pd_operator.keys import Key
from pd_operator.scaling.explaining import Told
from pd_operator.teller import Teller
from tests.browser.conftest import DEADLINE_MS, Watched
from tests.cluster import Cluster, pdcluster

KEY, NOW = Key("ml", "test"), "2026-01-01T00:00:00Z"
SHORT_LOOKS, LONG_LOOKS = 300, 3600
MOST_GROWTH_BYTES = 2 << 20


def answer(page: Page) -> str:
    """The text of the last answer."""
    return page.locator("#log p").last.locator("span").last.inner_text()


def test_a_chat_appears_token_by_token(watched: Watched, screenshots: Path) -> None:
    page = watched.page
    page.evaluate("""() => {
        window.lengths = new Set();
        const all = { childList: true, subtree: true, characterData: true };
        new MutationObserver(() => {
            const spans = document.querySelectorAll("#log p:last-child span:last-child");
            if (spans.length) window.lengths.add(spans[0].textContent.length);
        }).observe(document.getElementById("log"), all);
    }""")  # fmt: skip
    page.get_by_label("At most").fill("300")
    page.get_by_label("Your message").fill("Tell me of the river.")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=DEADLINE_MS)
    assert answer(page)
    assert page.evaluate("window.lengths.size") > 3
    row = page.locator("#requests tr").first
    expect(row).to_contain_text("200")
    for part in ("prefill", "decode"):
        assert row.locator(f"rect.{part}").count() >= 1
    expect(page.locator("#reasons li").first).to_contain_text("decode")
    expect(page.locator("#ttft path.p50")).to_have_attribute("d", re.compile("^M"))
    page.screenshot(path=screenshots / "live-light.png", full_page=True)
    assert watched.complaints == []
    assert watched.elsewhere == []


def test_what_a_model_says_is_text(watched: Watched) -> None:
    page, evil = watched.page, "<img src=x onerror=alert(1)><b>bold</b>"
    event = json.dumps({"choices": [{"delta": {"content": evil}}]})
    body = f"data: {event}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    page.get_by_label("Your message").fill(evil)
    page.keyboard.press("Enter")
    expect(page.locator("#log p").last).to_contain_text(evil)
    assert page.locator("#log img, #log b").count() == 0
    assert watched.complaints == []


def test_a_refusal_is_shown(watched: Watched) -> None:
    page = watched.page
    body = json.dumps({"error": {"message": "No usable pair of workers is there."}})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, body=body))
    page.get_by_label("Your message").fill("hi")
    page.keyboard.press("Enter")
    expect(page.locator("#log p.error")).to_contain_text("No usable pair")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_a_key_is_asked_for_where_the_router_wants_one(watched: Watched) -> None:
    page, sent = watched.page, []
    body = json.dumps({"error": {"message": "Give an API key."}})

    def refuse(route: Route) -> None:
        sent.append(route.request.headers.get("authorization"))
        route.fulfill(status=401, body=body)

    page.route("**/v1/chat/completions", refuse)
    field = page.get_by_label("API key")
    expect(field).to_be_hidden()
    for number in (1, 2):
        page.get_by_label("Your message").fill("hi")
        page.keyboard.press("Enter")
        expect(page.locator("#log p.error")).to_have_count(number)
        expect(field).to_be_visible()
        field.fill("sk-1")
    assert sent == [None, "Bearer sk-1"]


def test_a_worker_that_dies_is_seen_to_go_and_another_to_come(
    watched: Watched, cluster: Cluster
) -> None:
    page, victim = watched.page, cluster.pod("decode", 1)
    row = page.locator("#workers tr").filter(has_text=victim.name)
    expect(row.locator("td").nth(1)).to_have_text("ready")
    cluster.kill(victim.pid, signal.SIGKILL)
    expect(row.locator("td").nth(1)).not_to_have_text("ready")
    expect(page.locator("#pools-summary")).to_contain_text("decode 1 of 2")
    expect(row.locator("td").nth(1)).to_have_text("ready", timeout=2 * DEADLINE_MS)
    cluster.until(cluster.all_ready, "the worker is there again")


@pytest.mark.timeout(300)
def test_a_shrunk_pools_row_leaves(watched: Watched, cluster: Cluster) -> None:
    page = watched.page
    expect(page.locator("#workers tr")).to_have_count(3)
    gone = cluster.pod("decode", 1).name

    def size(replicas: int) -> Callable[[dict[str, Any]], None]:
        return lambda document: document["spec"]["decode"].update(replicas=replicas)

    cluster.edit(size(1))
    row = page.locator("#workers tr").filter(has_text=gone)
    expect(row).to_have_count(0, timeout=2 * DEADLINE_MS)
    expect(page.locator("#workers tr")).to_have_count(2)
    expect(page.locator("#pools-summary")).to_contain_text("decode 1 of 1 ready")
    cluster.edit(size(2))
    expect(row).to_have_count(1, timeout=2 * DEADLINE_MS)
    cluster.until(cluster.all_ready, "the worker is there again")
    assert watched.complaints == []


def test_why_pools_have_their_sizes(watched: Watched, cluster: Cluster, screenshots: Path) -> None:
    """As the operator tells a router on Kubernetes; here sizes are fixed, and it tells nothing."""
    page, host = watched.page, cluster.pod("router").ip
    expect(page.locator("#sizes-none")).to_be_visible()
    expect(page.get_by_role("heading", name="Last changes")).to_be_hidden()

    def tell(teller: Teller, pool: str, before: int, after: int, reason: str) -> None:
        numbers = {"needed": 3.0, "needed_burst": 1.0, "needed_before_fall": 3.0, "ceiling": 3.0}
        teller.note(KEY, Told(NOW, "ml/test", pool, before, after, reason, "", numbers))

    async def telling() -> None:
        teller = Teller()
        tell(teller, "decode", 1, 3, "<b>Odd</b>")
        tell(teller, "decode", 3, 3, "AtTarget")
        tell(teller, "prefill", 2, 1, "LessDemand")
        teller.tell(KEY, {"uid/0": host})
        await asyncio.gather(*teller._tasks.values())

    with ThreadPoolExecutor() as threads:  # Playwright's loop runs in this one
        threads.submit(lambda: asyncio.run(telling())).result(DEADLINE_MS / 1000)
    expect(page.locator("#sizes > li")).to_have_count(2)
    expect(page.locator("#sizes > li").first).to_contain_text("prefill from 2 to 1")
    expect(page.locator("#sizes > li").last).to_contain_text("decode stays at 3: that is what it")
    expect(page.locator("#sizes-none")).to_be_hidden()
    expect(page.get_by_role("heading", name="Last changes")).to_be_visible()
    changes = page.locator("#changes > li")
    expect(changes).to_have_count(2)
    expect(changes.last).to_contain_text("decode from 1 to 3: <b>Odd</b>")
    expect(changes.last.locator(".details")).to_contain_text("needed: 3 workers")
    expect(changes.last.locator("time")).to_have_attribute("datetime", NOW)
    assert page.locator("#changes b").count() == 0  # text, whatever it says
    page.screenshot(path=screenshots / "live-sizes.png", full_page=True)
    seen = pdcluster("top", "--once", env=cluster.env).stdout
    assert "decode stays at 3: that is what it needs" in seen
    assert watched.complaints == []


def test_the_theme_is_what_is_chosen(watched: Watched) -> None:
    """Whatever the system has, by the select, and back."""
    page = watched.page
    ground = "getComputedStyle(document.body).backgroundColor"
    chosen: dict[str, str] = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.get_by_label("Theme").select_option("auto")
        chosen[scheme] = page.evaluate(ground)
    assert chosen["light"] != chosen["dark"]
    for scheme, other in (("light", "dark"), ("dark", "light")):
        page.emulate_media(color_scheme=other)
        page.get_by_label("Theme").select_option(scheme)
        assert page.evaluate(ground) == chosen[scheme]


def test_by_keyboard_alone(watched: Watched) -> None:
    page = watched.page
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the chat")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(2):
        page.keyboard.press("Tab")
    expect(page.get_by_label("Your message")).to_be_focused()
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    expect(page.locator("#log p")).to_have_count(2)
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=DEADLINE_MS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_finds_nothing(
    browser: Browser, url: str, scheme: Any, width: int, screenshots: Path
) -> None:
    viewport: Any = {"width": width, "height": 900}
    # axe-core is evaluated in the page, which its policy forbids as it should.
    context = browser.new_context(color_scheme=scheme, viewport=viewport, bypass_csp=True)
    page = context.new_page()
    page.goto(url)
    page.locator("#workers tr").nth(2).wait_for()
    page.locator("#requests tr").first.wait_for()
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) == 0  # tables scroll, the page doesn't
    results = Axe().run(page)
    page.screenshot(path=screenshots / f"live-{scheme}-{width}.png", full_page=True)
    context.close()
    assert results.violations_count == 0, results.generate_report()


_FAKE = """
(() => {
  const state = __STATE__;
  const later = window.setTimeout.bind(window);
  window.looks = 0;
  window.setTimeout = (work, ms) => window.looks < window.until ? later(work, 0) : undefined;
  window.until = 1e9;
  window.fetch = async () => {
    window.looks += 1;
    const now = 1e9 + window.looks;
    const one = structuredClone(state.requests[0]);
    state.requests.unshift(Object.assign(one, { id: `chatcmpl-${now}`, ended_at: now }));
    state.requests.length = Math.min(state.requests.length, 8);
    for (const name of ["ttft", "itl"]) {
      const counts = state.distributions[name].counts;
      for (let i = 10; i < counts.length; i += 1) counts[i] += 1;
    }
    return new Response(JSON.stringify({ ...state, now }));
  };
})();
"""


@pytest.mark.timeout(420)
def test_an_hour_of_looks_leaves_no_more_than_five_minutes(
    watched: Watched, browser: Browser, url: str
) -> None:
    state = watched.page.evaluate("async () => (await fetch('/debug/state')).json()")
    assert state["requests"]
    watched.page.close()
    page = browser.new_page()
    page.add_init_script(_FAKE.replace("__STATE__", json.dumps(state)))
    page.goto(url)
    sizes = []
    session = page.context.new_cdp_session(page)
    for looks in (SHORT_LOOKS, LONG_LOOKS):
        page.wait_for_function("(wanted) => window.looks >= wanted", arg=looks, timeout=180_000)
        session.send("HeapProfiler.collectGarbage")
        nodes = page.evaluate("document.querySelectorAll('*').length")
        sizes.append((nodes, session.send("Runtime.getHeapUsage")["usedSize"]))
    page.close()
    (few, small), (many, large) = sizes
    assert abs(many - few) <= 10
    assert large - small < MOST_GROWTH_BYTES, sizes
