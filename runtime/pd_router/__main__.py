"""`python -m pd_router`: serve the API, take announcements, drain on SIGTERM."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import uvloop

from pd_proto.tls import Certificates
from pd_proto.tokens import Tokens
from pd_router import settings as flags
from pd_router.admin import AdminApp
from pd_router.admission import Admission, AdmissionConfig
from pd_router.app import AppSettings, RouterApp
from pd_router.crew import Crew, inherited
from pd_router.http import HttpServer, listen, raise_descriptor_limit
from pd_router.journal import Journal, Spans
from pd_router.keys import Keyring
from pd_router.metrics import Metrics
from pd_router.page import LivePage
from pd_router.session import Sessions
from pd_router.settings import Settings
from pd_router.texts import Texts
from pd_router.workers import Workers, WorkersConfig

log = logging.getLogger("pd_router")

# After start-up next to nothing dies young in cycles but connections, some thirty objects each:
# collect rarely, and what is old next to never.
_GC_THRESHOLDS = (10_000, 20, 100)
# So long nothing may have come before a draining router ends.
_QUIET_S = 0.5
# For answers that were failed at the end of a drain to reach their clients.
_LAST_WORDS_S = 2.0
# Workers look for routers every two seconds, and may be busy; whoever asks before they have
# found this one waits.
_SETTLE_S = 10.0


async def _run(settings: Settings) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def stop_or_hurry() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_or_hurry)
    async with AsyncExitStack() as closing:
        # Ports first: one that is taken ends the start before workers hear of this router.
        member = settings.member
        shared = settings.reuse_port or member is not None
        http_sockets = listen(settings.http, reuse_port=shared)
        closing.callback(_close, http_sockets)
        admin_sockets = listen(settings.admin) if member is None else [inherited(member.admin_fd)]
        closing.callback(_close, admin_sockets)
        metrics = Metrics(settings.model, promises=settings.promises)
        journal = Journal(metrics, await closing.enter_async_context(_spans(settings, metrics)))
        workers = Workers(_workers_config(settings), _certificates(settings), _tokens(settings))
        if member is None or member.index == 0:  # all processes of a router see the same workers
            workers.on_lost(metrics.worker_lost)
        control_port = settings.control.port + (member.index if member else 0)
        await workers.start(settings.control.host, control_port)
        closing.push_async_callback(workers.close)
        sessions = _sessions(settings, workers, metrics)
        closing.callback(sessions.close)
        texts = Texts(workers)
        closing.push_async_callback(texts.close)
        keyring = await closing.enter_async_context(_keys(settings, metrics))
        app = RouterApp(
            _app_settings(settings), workers, sessions, texts, metrics, journal, keyring
        )
        client = HttpServer(app, *http_sockets)
        page = LivePage(app) if settings.live_page and member is None else None
        pages = AdminApp(
            settings.router_name, workers, metrics, journal, sessions.queued, page,
            clients=lambda: None if keyring is None else keyring.clients,
        )  # fmt: skip
        admin = HttpServer(pages, *admin_sockets)
        await closing.enter_async_context(admin.serving())
        await closing.enter_async_context(client.serving())
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        log.info("serving model=%s http=%s control=%s", *_places(settings, client))
        await stop.wait()
        if settings.reuse_port:
            client.stop_accepting()  # who shares the port takes what comes
        await _drain(app, settings.drain_timeout_s, hurry)


def _close(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def _certificates(settings: Settings) -> Certificates | None:
    if settings.tls_dir is None or settings.tls_cluster is None:
        return None
    return Certificates(settings.tls_dir, settings.tls_cluster)


def _tokens(settings: Settings) -> Tokens | None:
    return None if settings.token_file is None else Tokens(settings.token_file)


def _workers_config(settings: Settings) -> WorkersConfig:
    name, member = settings.router_name, settings.member
    ports: tuple[int, ...] = ()
    if member is not None:
        name, first = f"{name}.{member.index}", settings.control.port
        ports = tuple(range(first, first + member.count))
    return WorkersConfig(
        settings.model,
        name,
        settle_s=_SETTLE_S,
        control_ports=ports,
        started_on_demand=settings.hold_s > 0,
    )


def _sessions(settings: Settings, workers: Workers, metrics: Metrics) -> Sessions:
    admission = AdmissionConfig(
        max_running=settings.max_requests,
        max_queued=settings.max_queued,
        queue_wait_s=settings.queue_wait_s,
        promises=settings.promises,
    )
    return Sessions(workers, Admission(admission), hooks=metrics, routing=settings.routing)


@asynccontextmanager
async def _spans(settings: Settings, metrics: Metrics) -> AsyncIterator[Spans | None]:
    """What makes requests' spans, if anything does."""
    if settings.trace_endpoint is None:
        yield None
        return
    from pd_router.tracing import LOST, SENT, Tracing  # an extra: it needn't be there

    for result in (SENT, LOST):  # so that the first ones are an increase
        metrics.spans(result, 0)
    made = Tracing(
        settings.trace_endpoint, settings.trace_ratio, settings.model, settings.router_name,
        metrics.spans,
    )  # fmt: skip
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def _keys(settings: Settings, metrics: Metrics) -> AsyncIterator[Keyring | None]:
    """The keys of its folder, followed."""
    if settings.api_keys is None:
        yield None
        return
    keyring = Keyring(settings.api_keys, metrics.unauthorized)
    keyring.load()
    task = asyncio.get_running_loop().create_task(keyring.follow())
    try:
        yield keyring
    finally:
        task.cancel()


def _app_settings(settings: Settings) -> AppSettings:
    return AppSettings(
        model=settings.model,
        max_body_bytes=settings.max_body_bytes,
        request_timeout_s=settings.request_timeout_s,
        hold_s=settings.hold_s,
        max_requests=settings.max_requests + settings.max_queued,
        allow_trace=settings.allow_trace,
        class_header=settings.class_header,
        promises=settings.promises,
    )


def _places(settings: Settings, client: HttpServer) -> tuple[str, str, str]:
    return settings.model, str(client.address), str(settings.control)


async def _drain(app: RouterApp, timeout_s: float, hurry: asyncio.Event) -> None:
    """Serves until nobody comes any more, and fails what doesn't end in time."""
    app.drain()
    log.info("draining timeout_s=%.0f running=%d", timeout_s, app.running)
    hurrying = asyncio.create_task(hurry.wait())
    quiet = asyncio.create_task(app.wait_quiet(_QUIET_S))
    await asyncio.wait({hurrying, quiet}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    finished = quiet.done()
    if not finished:
        app.fail_running()
        await asyncio.wait({quiet}, timeout=_LAST_WORDS_S)
        quiet.cancel()
    await asyncio.gather(hurrying, quiet, return_exceptions=True)
    log.info("drained finished=%s", finished)


def main() -> None:
    """Exit status 0 after a drain, 1 when a port, its certificates or its token can't be had."""
    settings = flags.parse(sys.argv[1:])
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
    )
    # Of a line only what it says is asked for.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    raise_descriptor_limit()
    # One text at a time is encoded: handing it to a pool of threads takes longer than it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if settings.processes > 1 and settings.member is None:
                sys.exit(runner.run(Crew(settings, sys.argv[1:]).run()))
            runner.run(_run(settings))
    except OSError as error:
        # The last line is what `kubectl get` and `pdcluster status` show of a crash.
        sys.exit(f"{type(error).__name__}: {error}")
    logging.shutdown()


if __name__ == "__main__":
    main()
