"""`python -m tests.pd_engine.one_worker REQUESTS`: short requests through one engine with the
real scheduler and runner; prints its memory after a tenth of them and after all, as JSON."""

import asyncio
import json
import sys
from pathlib import Path

import torch

from pd_engine.blocks import BlockPool
from pd_engine.core import EngineCore
from pd_engine.metrics import Metrics
from pd_engine.runner import Runner
from pd_engine.scheduler import Scheduler, SchedulerConfig
from pd_engine.settings import parse
from pd_proto.v1 import engine_pb2 as pb
from tests.tiny_model import tiny_model_dir

_AT_A_TIME = 32
_DEADLINE_S = 60.0


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def request(number: int) -> pb.Generate:
    """Prompts differ from the first token on, so that the prefix cache turns over."""
    tokens = [3 + number % 500, 3 + number // 500 % 500, *range(5, 5 + number % 13)]
    return pb.Generate(
        handle=number + 1,
        id=pb.TransferId(request=f"r{number}", attempt=1),
        token_ids=tokens,
        prompt_tokens=len(tokens),
        choices=[0],
        sampling=pb.Sampling(max_tokens=1 + number % 3, temperature=1.0, seed=number),
        deadline_s=60.0,
        grant_wait_s=10.0,
        prefill_here=True,
    )


async def serve(count: int) -> dict[str, int]:
    torch.set_num_threads(1)
    flags = "--role both --model x --served-name m --worker-name w --host 127.0.0.1"
    runner = Runner(tiny_model_dir(), dtype="float32", kv_cache_tokens=2048)
    config = SchedulerConfig(
        max_batch_tokens=512,
        chunk_tokens=64,
        max_running=_AT_A_TIME,
        max_queued=2 * _AT_A_TIME,
        max_model_tokens=512,
        recompute_max_tokens=512,
    )
    scheduler = Scheduler(config, BlockPool(runner.num_blocks, runner.layout.block_tokens))
    core = EngineCore(parse(flags.split()), scheduler, runner, Metrics("m", "both", "w"))
    running = asyncio.create_task(core.run())
    stream, outbox = core.open_stream()
    sent = done = early = 0
    while done < count:
        while sent < count and sent - done < _AT_A_TIME:
            core.handle(stream, pb.Command(generate=request(sent)))
            sent += 1
        core.commands_done()
        reply = await asyncio.wait_for(outbox.take(), _DEADLINE_S)
        if reply is None:
            raise RuntimeError("the stream ended")
        for event in reply.events:
            if event.HasField("failed"):
                raise RuntimeError(f"a request failed: {event.failed}")
            outs = [*event.prefilled.first, *event.tokens.tokens]
            done += sum(out.finish != pb.FINISH_UNSPECIFIED for out in outs)
        if not early and done >= count // 10:
            early = rss_bytes()
    await core.stop()
    await running
    return {"requests": done, "early_bytes": early, "late_bytes": rss_bytes()}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(serve(int(sys.argv[1])))))
