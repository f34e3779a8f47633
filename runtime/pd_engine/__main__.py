"""`python -m pd_engine`: load, announce, serve, drain on SIGTERM."""

import asyncio
import gc
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from pd_engine import settings as flags
from pd_engine.health import Health, HealthServer
from pd_engine.loading import Progress
from pd_engine.settings import Settings

if TYPE_CHECKING:
    from pd_engine.assembly import Worker

log = logging.getLogger("pd_engine")

# What no restart makes better: Kubernetes starts again whatever the status, `pdcluster serve`
# ends with this one.
HOPELESS = os.EX_CONFIG

# The step's thread holds the GIL in bursts; the loop, which moves KV and tokens, must not
# wait Python's default 5 ms for it.
_SWITCH_INTERVAL_S = 0.0005


class _Hopeless(Exception):
    """Its cause, a ValueError, says what is wrong with the model or the settings."""


async def _run(settings: Settings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    health = Health()
    server = HealthServer(health, settings.host, settings.health_port)
    await server.start()
    try:
        return await _load_and_serve(settings, health, stop)
    finally:
        await server.close()


def _load(settings: Settings, progress: Progress) -> "Callable[[str], Worker]":
    """In a thread: importing torch takes seconds, in which probes want their answers."""
    from pd_engine import assembly

    try:
        return partial(assembly.Worker, settings, assembly.load(settings, progress))
    except ValueError as error:
        raise _Hopeless from error


async def _load_and_serve(settings: Settings, health: Health, stop: asyncio.Event) -> int:
    began = time.monotonic()
    loading = asyncio.create_task(asyncio.to_thread(_load, settings, health.loading.report))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.info("stopped while loading")
        return 0
    worker = loading.result()(str(uuid.uuid4()))
    await worker.start(health)
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    log.info("serving role=%s load_s=%.1f", settings.role, time.monotonic() - began)
    running = asyncio.create_task(worker.core.run())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():  # the step loop never ends by itself: a bug, told by its traceback
        running.result()
        return 1
    log.info("draining timeout_s=%.0f", settings.drain_timeout_s)
    finished = await worker.drain(settings.drain_timeout_s)
    await worker.stop()
    await running
    log.info("stopped finished=%s", finished)
    return 0


def main() -> None:
    """Exit status 0 after a drain, 78 when the model or a setting has to be another, 1 when
    something can't be had that may be there later: a file, a port, memory."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"
    )
    settings = flags.parse(sys.argv[1:])
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(_run(settings))
    except _Hopeless as hopeless:
        _last_words(hopeless.__cause__ or hopeless)
        sys.exit(HOPELESS)
    except (OSError, ValueError, RuntimeError) as error:
        _last_words(error)
        sys.exit(1)
    logging.shutdown()
    sys.stdout.flush()
    # Without the interpreter's teardown: torch's extensions print their leaks there, and
    # those would be the log's last lines, which is where an operator looks.
    os._exit(status)


def _last_words(error: BaseException) -> None:
    """The last line is what `kubectl get` and `pdcluster status` show of a crash."""
    log.error("the worker can't go on", exc_info=error)
    print(f"{type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
