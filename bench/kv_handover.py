"""A prefill and a decode worker's cores in one loop, with a model that takes no time."""

import asyncio
import time
from typing import Any

from pd_proto.v1 import engine_pb2 as pb
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
    attempt: dict[str, Any] = {
        "handle": number,
        "id": pb.TransferId(request=f"r{number}", attempt=1),
        "token_ids": prompt,
        "prompt_tokens": len(prompt),
        "choices": [0],
        "sampling": pb.Sampling(max_tokens=2),
        "deadline_s": 10.0,
    }
    decode.send(generate=pb.Generate(**attempt, grant_wait_s=5.0))
    granted = await decode.event("granted", number)
    started = time.perf_counter()
    target = pb.KvTarget(
        worker="decode-0",
        epoch="epoch-decode",
        kv_address=granted.kv_address,
        grant=granted.grant,
        prefix_tokens=granted.prefix_tokens,
    )
    prefill.send(prefill=pb.Prefill(**attempt, target=target, lease_s=10.0))
    await decode.tokens(number, 0, 1)
    return (time.perf_counter() - started) * 1000
