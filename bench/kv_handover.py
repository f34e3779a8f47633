"""A prefill and a decode worker's cores in one loop, with a model that takes no time."""

import asyncio
import time

from pd_proto.v1 import engine_pb2 as pb
from tests.pd_engine import core_rig
from tests.pd_engine.core_rig import Engine

_PROMPT = 16


async def run(count: int) -> list[float]:
    """Milliseconds from each grant to the token of the first decode step."""
    prefill, decode = Engine("prefill", 64, 512), Engine("decode", 64, 512)
    await asyncio.gather(prefill.start(), decode.start())
    found = []
    try:
        for number in range(1, count + 1):
            prompt = [number * 31 % 5000 + at for at in range(_PROMPT)]
            found.append(await _once(prefill, decode, number, prompt))
            prefill.events.clear()
            decode.events.clear()
    finally:
        await prefill.close()
        await decode.close()
    return found


async def _once(prefill: Engine, decode: Engine, number: int, prompt: list[int]) -> float:
    asked = core_rig.generate(number, prompt, sampling=pb.Sampling(max_tokens=2))
    decode.send(generate=asked)
    granted = await decode.event("granted", number)
    started = time.perf_counter()
    prefill.send(prefill=core_rig.prefill(asked, granted, transport=""))
    await decode.tokens(number, 0, 1)
    return (time.perf_counter() - started) * 1000
