"""A real Chromium, and a cluster whose live page it opens. `make browser-test` brings both."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from e2e.cluster import packages
from tests.cluster import Cluster, pdcluster, serving, spec
from tests.tiny_model import tiny_model_dir

CHROMIUM = "/usr/bin/chromium"
DEADLINE_MS = 30_000
SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
# As root there is no sandbox to be had; the page is our own.
_FLAGS = ["--no-sandbox"] if os.geteuid() == 0 else []


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    packages.need({CHROMIUM: "chromium"})
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield made
        made.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = spec(tiny_model_dir(), prefill={"replicas": 1}, decode={"replicas": 2})
    with serving(made, tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="session")
def url(cluster: Cluster) -> str:
    """As `pdcluster status -o json` tells it."""
    said = pdcluster("status", "-o", "json", env=cluster.env).stdout
    [one] = json.loads(said)["clusters"]
    return str(one["live_page"])


class Watched:
    """An open page, and what it complained of or asked elsewhere."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        page.set_default_timeout(DEADLINE_MS)
        page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "request",
            lambda r: None if r.url.startswith(url) else self.elsewhere.append(r.url),
        )


@pytest.fixture
def watched(browser: Browser, url: str) -> Iterator[Watched]:
    """The live page, open and showing its workers."""
    page = browser.new_page(viewport={"width": 1280, "height": 1400})
    made = Watched(page, url)
    page.goto(url)
    page.locator("#workers tr").nth(2).wait_for()
    yield made
    page.close()


@pytest.fixture(scope="session")
def screenshots() -> Path:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    return SCREENSHOTS
