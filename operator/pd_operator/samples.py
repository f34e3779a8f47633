"""Reads what routers measured from their admin ports."""

import asyncio
from collections.abc import Iterable

from pd_operator import httpget, measured
from pd_operator.measured import Samples
from pd_operator.podspec import ADMIN_PORT

_TIMEOUT_S = 2.0


async def read(routers: Iterable[str], port: int = ADMIN_PORT) -> Samples:
    """The samples of the routers at these addresses; one that doesn't answer has none."""
    return measured.merge(await asyncio.gather(*(_read_one(host, port) for host in routers)))


async def _read_one(host: str, port: int) -> Samples:
    try:
        response = await httpget.get(host, port, "/sketches", timeout_s=_TIMEOUT_S)
    except httpget.GetFailed:
        return Samples()
    return measured.parse(response.body) if response.ok else Samples()
