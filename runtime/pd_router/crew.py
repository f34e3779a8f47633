"""One router of several processes: they share the clients' port, each has a control port of
its own, and the parent keeps them running and answers on the admin port for all.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

import msgspec

from pd_core.failures import FailureKind
from pd_router import live, merged
from pd_router.admin import PAGES, asked_for
from pd_router.errors import ApiError
from pd_router.exchange import Exchange, Receive, Scope, Send
from pd_router.http import HttpServer, bind, listen
from pd_router.metrics import CONTENT_TYPE
from pd_router.page import STATE, LivePage, check_host
from pd_router.relay import Relay
from pd_router.settings import Address, Settings
from pd_router.sizes import PATH as SCALING
from pd_router.sizes import Sizes

log = logging.getLogger("pd_router.crew")

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_GET_DEADLINE_S = 2.0
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_MARGIN_S = 15.0  # what a process needs beyond its drain to end, for the last spans too


def _die_with(parent: int) -> Callable[[], None]:
    """Runs in a process before it becomes the program: the kernel kills it when we end."""

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # we ended before prctl
            os._exit(1)

    return prepare


class Member:
    """One process, started again whenever it ends."""

    def __init__(self, index: int, settings: Settings, arguments: Sequence[str]) -> None:
        self._index = index
        self._settings = settings
        self._arguments = arguments
        self._admin = bind(Address("127.0.0.1", 0))
        self._process: asyncio.subprocess.Process | None = None
        self._served = False
        self._told: signal.Signals | None = None

    async def run(self) -> int:
        """Until it is told to end. Its exit status, where it ended by itself without having
        served."""
        pause_s = _PAUSE_S
        while self._told is None:
            status = await self._once()
            if self._told is not None:
                break
            if not self._served and status >= 0:  # nobody killed it
                return status or 1
            log.error("process=%d ended with %d; started again", self._index, status)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return 0

    async def _once(self) -> int:
        number = self._admin.fileno()
        member = f"{self._index}/{self._settings.processes}:{number}"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pd_router", *self._arguments, f"--member={member}",
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[number],
            preexec_fn=_die_with(os.getpid()),
        )  # fmt: skip
        if self._told is not None:  # while it was being started: nobody has told it
            self.tell(self._told)
        asking = asyncio.create_task(self._notice())
        try:
            return await self._process.wait()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _notice(self) -> None:
        """Once it has answered, its end is no failed start any more."""
        while not self._served:
            self._served = await self.get("/health") is not None
            await asyncio.sleep(0.1)

    def tell(self, number: signal.Signals) -> None:
        """Passes a signal on; after it the process isn't started again."""
        self._told = number
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._admin.close()

    async def get(self, path: str) -> bytes | None:
        """A page of its admin port; None when it doesn't answer."""
        host, port = self._admin.getsockname()[:2]
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_GET_DEADLINE_S):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(
                    f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()
                )
                answer = await reader.read(-1)
        except (OSError, TimeoutError):
            return None
        finally:
            if writer is not None:
                writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return body if head.startswith(b"HTTP/1.1 200") else None


class Crew:
    """All processes of a router, and its admin port's application."""

    def __init__(self, settings: Settings, arguments: Sequence[str]) -> None:
        """`arguments`: of the parent's own command line."""
        self._settings = settings
        self._live_page = LivePage(Relay(settings.http)) if settings.live_page else None
        self._sizes = Sizes()
        self.members = [Member(i, settings, arguments) for i in range(settings.processes)]

    async def run(self) -> int:
        """Serves until told to end; the exit status."""
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()

        def tell(number: signal.Signals) -> None:
            stopping.set()
            for member in self.members:
                member.tell(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, tell, number)
        admin = HttpServer(self, *listen(self._settings.admin))
        runs = [asyncio.create_task(member.run()) for member in self.members]
        told = asyncio.create_task(stopping.wait())
        try:
            async with admin.serving():
                await asyncio.wait({told, *runs}, return_when=asyncio.FIRST_COMPLETED)
                if not told.done():
                    tell(signal.SIGTERM)  # one can't start: no part of a router is one
                limit_s = self._settings.drain_timeout_s + _MARGIN_S
                await asyncio.wait(runs, timeout=limit_s)
        finally:
            told.cancel()
            for task in runs:
                task.cancel()
            ended = await asyncio.gather(*runs, return_exceptions=True)
            for member in self.members:
                member.close()
        return int(any(ended))  # a process that never served, or a mistake in here

    # ---- the admin port -----------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            if self._live_page is not None and self._live_page.has(exchange.path):
                await self._live_page.serve(exchange, scope, receive, send)
                return
            if exchange.path == SCALING:
                await self._sizes.take(exchange)
                return
            if exchange.path not in PAGES:
                pages = ", ".join(PAGES)
                raise ApiError(404, f"Unknown page; there are {pages}.", code="unknown_url")
            exchange.allow("GET", "HEAD")
            await self._page(exchange)
        except ApiError as error:
            await exchange.reply_error(error)

    async def _page(self, exchange: Exchange) -> None:
        if exchange.path == "/metrics":
            texts = [page.decode() for page in await self._pages("/metrics")]
            body = merged.metrics(texts, await self._sketches())
            await exchange.reply(200, body, content_type=CONTENT_TYPE.encode())
            return
        if exchange.path == "/health":
            await exchange.reply(200, msgspec.json.encode({"status": "ok"}))
            return
        check_host(exchange)
        answer: object
        if exchange.path == "/sketches":
            answer = await self._sketches()
        elif exchange.path == "/debug/workers":
            pages = [msgspec.json.decode(page) for page in await self._pages(exchange.path)]
            answer = {"workers": [worker for page in pages for worker in page["workers"]]}
        elif exchange.path == STATE:
            pages = [msgspec.json.decode(page) for page in await self._pages(STATE)]
            answer = live.merged(self._settings.router_name, pages)
            answer["sizes"] = self._sizes.document()  # the operator knows no processes
        else:
            answer = await self._requests(exchange)
        await exchange.reply(200, msgspec.json.encode(answer))

    async def _sketches(self) -> merged.Document:
        pages = [msgspec.json.decode(page) for page in await self._pages("/sketches")]
        return merged.sketches(self._settings.router_name, pages)

    async def _requests(self, exchange: Exchange) -> object:
        _, most = asked_for(exchange.query)
        query = exchange.query.decode("latin-1")
        path = f"{exchange.path}?{query}" if query else exchange.path
        pages = [msgspec.json.decode(page) for page in await self._pages(path)]
        entries = [entry for page in pages for entry in page["requests"]]
        entries.sort(key=lambda entry: float(entry["ended_at"]), reverse=True)
        return {"requests": entries[:most]}

    async def _pages(self, path: str) -> list[bytes]:
        """A page of each process that answers; ApiError where none does."""
        pages = await asyncio.gather(*(member.get(path) for member in self.members))
        found = [page for page in pages if page is not None]
        if not found:
            message = "None of the router's processes answers."
            raise ApiError(503, message, code="starting", kind=FailureKind.INTERNAL)
        return found


def inherited(number: int) -> socket.socket:
    """The admin socket that the parent has bound for this process."""
    os.set_inheritable(number, False)
    return socket.socket(fileno=number)
