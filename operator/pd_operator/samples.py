"""Reads what routers measured from their admin ports."""

import asyncio
import time
from collections.abc import Callable, Iterable

from pd_operator import httpget, measured
from pd_operator.measured import Samples
from pd_operator.podspec import ADMIN_PORT

_TIMEOUT_S = 2.0


async def read(
    routers: Iterable[str], port: int = ADMIN_PORT, clock: Callable[[], float] = time.monotonic
) -> Samples:
    """The samples of the routers at these addresses; one that doesn't answer is silent."""
    every = await asyncio.gather(*(_read_one(host, port, clock) for host in routers))
    return measured.merge(every)


async def _read_one(host: str, port: int, clock: Callable[[], float]) -> Samples:
    try:
        response = await httpget.get(host, port, "/sketches", timeout_s=_TIMEOUT_S)
    except httpget.GetFailed:
        return Samples(silent=1)
    return measured.parse(response.body, clock()) if response.ok else Samples(silent=1)
