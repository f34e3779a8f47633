"""The admin port's application: metrics, sketches, debug pages. Not for clients."""

import time
from collections.abc import Callable
from urllib.parse import parse_qs

import msgspec

from pd_router import live
from pd_router.errors import ApiError
from pd_router.exchange import Exchange, Receive, Scope, Send
from pd_router.journal import RING_REQUESTS, Journal
from pd_router.metrics import CONTENT_TYPE, Metrics
from pd_router.page import STATE, LivePage, check_host
from pd_router.signals import Queued
from pd_router.sizes import PATH as SCALING
from pd_router.sizes import Sizes
from pd_router.types import WorkersApi

PAGES = ("/health", "/metrics", "/sketches", "/debug/requests", "/debug/workers", STATE)


def asked_for(query: bytes) -> tuple[str | None, int]:
    """Of /debug/requests?id=…&last=…: whose, and how many at most; ApiError for nonsense."""
    given = parse_qs(query.decode("latin-1"))
    last = given.get("last", [str(RING_REQUESTS)])[0]
    if not (last.isascii() and last.isdigit() and 1 <= int(last[:9]) <= RING_REQUESTS):
        raise ApiError(400, f"last is {last[:20]!r}; write 1 to {RING_REQUESTS}.", code="bad_query")
    return given.get("id", [None])[0], int(last)


class AdminApp:
    def __init__(
        self,
        router: str,
        workers: WorkersApi,
        metrics: Metrics,
        journal: Journal,
        queued: Callable[[], Queued] = Queued,
        live_page: LivePage | None = None,
        clients: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`queued` tells what waits in admission at the moment; `clients` how many have an API
        key, None where nobody needs one."""
        self._router = router
        self._workers = workers
        self._metrics = metrics
        self._journal = journal
        self._queued = queued
        self._live_page = live_page
        self._clients = clients
        self._sizes = Sizes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            if self._live_page is not None and self._live_page.has(exchange.path):
                await self._live_page.serve(exchange, scope, receive, send)
            elif exchange.path == SCALING:
                await self._sizes.take(exchange)
            else:
                await self._route(exchange)
        except ApiError as error:
            await exchange.reply_error(error)

    async def _route(self, exchange: Exchange) -> None:
        if exchange.path not in PAGES:
            pages = ", ".join(PAGES)
            raise ApiError(404, f"Unknown page; there are {pages}.", code="unknown_url")
        exchange.allow("GET", "HEAD")
        if exchange.path == "/metrics":
            self._metrics.ready.set(self._workers.ready())
            self._metrics.gateway(self._workers.signals(), self._queued())
            await exchange.reply(200, self._metrics.expose(), content_type=CONTENT_TYPE.encode())
            return
        await exchange.reply(200, msgspec.json.encode(self._page(exchange)))

    def _page(self, exchange: Exchange) -> object:
        if exchange.path == "/health":
            return {"status": "ok"}
        check_host(exchange)
        if exchange.path == "/sketches":
            signals = self._metrics.signals_json(self._queued(), self._workers.signals())
            return {"router": self._router, "clients": self._clients()} | signals
        if exchange.path == "/debug/workers":
            return {"workers": self._workers.snapshot()}
        if exchange.path == STATE:
            return self._state()
        wanted, most = asked_for(exchange.query)
        return {"requests": self._journal.find(wanted, most)}

    def _state(self) -> dict[str, object]:
        head = {
            "model": self._metrics.model,
            "router": self._router,
            "ready": self._workers.ready(),
            "now": time.time(),
            "sizes": self._sizes.document(),
        }
        latest = self._journal.latest(live.RECENT_REQUESTS)
        distributions = self._metrics.distributions()
        return live.document(head, self._queued(), self._workers.snapshot(), latest, distributions)
