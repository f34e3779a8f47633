"""The worker's plain HTTP port: probes and metrics."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from pd_engine.core import EngineCore
from pd_engine.loading import Loading

log = logging.getLogger("pd_engine.health")

_METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"


class Health:
    """`/livez`: the loop turns and steps end. `/readyz`: loaded and registered once.

    The port answers while the model loads, so that "not ready" is an answer and not a
    refused connection.
    """

    def __init__(self) -> None:
        self.core: EngineCore | None = None
        self.loading = Loading()
        self.registered = False  # latched: a router's restart doesn't make a worker unready

    def not_ready(self) -> str | None:
        if self.core is None:
            return str(self.loading)
        if not self.registered:
            return "no router has taken the announcement yet"
        return None

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            return
        del receive
        status, body, content_type = self._answer(scope["path"])
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, path: str) -> tuple[int, bytes, bytes]:
        plain = b"text/plain; charset=utf-8"
        if path == "/metrics" and self.core is not None:
            return 200, self.core.metrics.scrape(), _METRICS_TYPE
        if path == "/livez":
            problem = self.core.unhealthy() if self.core is not None else None
        elif path == "/readyz":
            problem = self.not_ready()
        else:
            return 404, b"no such page: try /livez, /readyz or /metrics\n", plain
        if problem is None:
            return 200, b"ok\n", plain
        return 503, problem.encode() + b"\n", plain


class HealthServer:
    """Serves a Health until `close`."""

    def __init__(self, health: Health, host: str, port: int) -> None:
        config = uvicorn.Config(
            health,
            host=host,
            port=port,
            http="httptools",
            loop="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """OSError when the port is taken."""
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        try:
            await self._server.startup()
        except SystemExit as error:
            config = self._server.config
            raise OSError(f"cannot listen on {config.host}:{config.port}") from error
        self._task = asyncio.create_task(self._server.main_loop())

    async def close(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
            await self._server.shutdown()


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM means drain here."""

    def install_signal_handlers(self) -> None:
        pass
