"""The live page: its files, and the way from it to the API, on one origin."""

import ipaddress
from collections.abc import Awaitable, Callable
from importlib.resources import files
from urllib.parse import urlsplit

from pd_router.errors import ApiError
from pd_router.exchange import Exchange, Receive, Scope, Send

CHAT = "/v1/chat/completions"
STATE = "/debug/state"
_TYPES = {
    "index.html": b"text/html; charset=utf-8",
    "style.css": b"text/css; charset=utf-8",
    "logic.js": b"text/javascript; charset=utf-8",
    "page.js": b"text/javascript; charset=utf-8",
    "icon.svg": b"image/svg+xml",
}
# Nothing but what comes from here runs, is shown or is asked; nobody may frame it.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class LivePage:
    """`api`: the client port's application; the page chats as any client does."""

    def __init__(self, api: App) -> None:
        self._api = api
        folder = files("pd_router") / "web"
        read = {name: (folder / name).read_bytes() for name in _TYPES}
        self._files = {f"/live/{name}": (_TYPES[name], read[name]) for name in _TYPES}
        self._files["/"] = self._files.pop("/live/index.html")

    def has(self, path: str) -> bool:
        return path == CHAT or path in self._files

    async def serve(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """One of its files, or an answer of the API."""
        check_host(exchange)
        if exchange.path == CHAT:
            check_origin(exchange)
            await self._api(scope, receive, send)
            return
        exchange.allow("GET", "HEAD")
        kind, data = self._files[exchange.path]
        await exchange.reply(200, data, HEADERS, content_type=kind)


def check_host(exchange: Exchange) -> None:
    """ApiError for a name that anybody could make resolve to here: a foreign page that is
    open in the reader's browser could read and use this one by it."""
    host = _host(exchange)
    if host == "localhost" or _is_ip(host):
        return
    message = "Open the live page by localhost or an IP address, such as by `kubectl port-forward`."
    raise ApiError(403, message, code="wrong_host")


def check_origin(exchange: Exchange) -> None:
    """ApiError where a browser says that a page of somewhere else asks."""
    site = exchange.header(b"sec-fetch-site") or b"same-origin"
    origin = exchange.header(b"origin")
    host = exchange.header(b"host") or b""
    foreign = origin is not None and origin.partition(b"://")[2] != host
    if foreign or site not in (b"same-origin", b"none"):
        raise ApiError(403, "Only the live page itself may ask here.", code="wrong_origin")


def _host(exchange: Exchange) -> str:
    given = (exchange.header(b"host") or b"").decode("latin-1")
    try:
        return urlsplit(f"//{given}").hostname or ""
    except ValueError:
        return ""


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
