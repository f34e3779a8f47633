"""`python -m pd_operator`: flags -> settings -> lease -> kopf. A lost lease ends the process."""

import asyncio
import gc
import logging
import os
import signal
import sys

import uvloop
from prometheus_client import disable_created_metrics

from pd_operator import flags, kube, metrics, web
from pd_operator.flags import Flags
from pd_operator.handlers import Life
from pd_operator.lease import LeaseLost
from pd_operator.metrics import Metrics
from pd_operator.service import Operator
from pd_operator.web import Page

log = logging.getLogger("pd_operator")

CLOSE_S = 5.0


async def serve(given: Flags) -> int:
    """Until a signal comes (0), or the operator may or can act no more (1)."""
    if given.kubeconfig:
        os.environ["KUBECONFIG"] = given.kubeconfig  # kopf looks nowhere else
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)  # kopf puts its own in place later
    measured = Metrics()
    transport = await kube.connect(given.kubeconfig)
    operator = Operator(transport, given.options, measured)
    async with web.serving(_places(given, operator, measured)) as ports:
        log.info("serving ports=%s identity=%s", ports, given.options.identity)
        try:
            if await _lead(operator, stop):
                await Life(operator, stop).run(given.options.namespace)
        except LeaseLost as error:
            log.error("%s", error)
            return 1
        finally:
            async with asyncio.timeout(CLOSE_S):
                await operator.close()
    return 0


async def _lead(operator: Operator, stop: asyncio.Event) -> bool:
    """Whether this operator is the one that acts; False when it is told to end before."""
    leading = asyncio.create_task(operator.lead())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((leading, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in (leading, stopping):
        task.cancel()
    if not leading.done() or stop.is_set():
        return False
    leading.result()
    return True


def _places(
    given: Flags, operator: Operator, measured: Metrics
) -> dict[tuple[str, int], web.Pages]:
    def readyz() -> Page:
        why = operator.unready()
        return Page(f"{why}\n".encode(), 503) if why else Page(b"ok\n")

    health: web.Pages = {"/livez": lambda: Page(b"ok\n"), "/readyz": readyz}
    numbers: web.Pages = {
        "/metrics": lambda: Page(measured.render(), content_type=metrics.CONTENT_TYPE)
    }
    if given.metrics_port == given.health_port:
        return {(given.host, given.health_port): {**health, **numbers}}
    return {
        (given.host, given.health_port): health,
        (given.host, given.metrics_port): numbers,
    }


def main() -> int:
    given = flags.parse()
    disable_created_metrics()
    # What is kept in memory has no cycles, and there is a lot of it to look through in vain.
    # What has cycles is kopf's, and lives for one event: small collections find it soon, and
    # none of them holds the loop up for long.
    gc.freeze()
    gc.set_threshold(10_000, 10, 500)
    logging.basicConfig(
        level=given.log_level,
        format="%(asctime)s %(levelname).1s %(name)s %(message)s",
        stream=sys.stderr,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(given))


if __name__ == "__main__":
    sys.exit(main())
