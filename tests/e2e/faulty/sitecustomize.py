"""Python imports this first in workers of `test_random_faults.py`, where the folder is on their
path: their KV port then is behind a proxy that cuts, stalls, delays, repeats and corrupts.
"""

import asyncio
import os
import random
from typing import Any

from pd_engine.kv import frames
from pd_engine.kv.plane import KvPlane
from tests.pd_engine.kv_proxy import Do, Proxy

RATE = float(os.environ["PD_TEST_KV_FAULTS"])
"""Of frames."""
LONGEST_S = 2.0
_chance = random.Random(int(os.environ["PD_TEST_SEED"]) * 1000 + os.getpid() % 1000)
_start = KvPlane.start


def plan(_number: int, _frame: frames.Frame) -> Do:
    return _chance.choice([do for do in Do if do is not Do.PASS]) if chosen() else Do.PASS


def chosen() -> bool:
    return _chance.random() < RATE


class Faulty(Proxy):
    async def _forward(
        self, do: Do, prefix: bytes, body: bytes, payload: bytearray, up: asyncio.StreamWriter
    ) -> bool:
        if chosen():
            await asyncio.sleep(_chance.uniform(0, LONGEST_S / 10))
        if do is not Do.HOLD:
            return await super()._forward(do, prefix, body, payload, up)
        whole = prefix + body + bytes(payload)
        middle = _chance.randrange(len(whole))
        up.write(whole[:middle])
        await up.drain()
        await asyncio.sleep(_chance.uniform(0, LONGEST_S))
        up.write(whole[middle:])
        await up.drain()
        return True


async def start(self: Any, host: str, port: int) -> str:
    self.faulty = await Faulty(await _start(self, host, port), plan).__aenter__()
    address: str = self.faulty.address
    return address


KvPlane.start = start
