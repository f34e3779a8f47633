"""What of a hand-over anybody waits for: a prefill and a decode worker on an idle machine,
prompts of 512 to 8,000 tokens, by shm, by tcp, and over links of 10 and 25 Gbit/s.

Token 0 comes from prefill, so a transfer never shows in the time to it. What shows is how
much later than token 0 decode has all KV: `exposed_share` is that, over the time to token 0.

`ttft_vs_both`: the time to token 0, against that of one worker that does both, in turn.

The links are scaled: this model makes far less KV a second on this machine than a 70B model
does on an H100 (2.6 GB/s), so the sender is slowed down to the same ratio of link to KV.
"""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from bench.common import Goal, arguments, median, report, table
from bench.models import model_dir
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc
from tests.ports import free_ports

LENGTHS = (512, 2048, 4096, 8000)
GOALS = {
    f"exposed_share_{name}{length}": Goal("<=", 0.05)
    for name in ("", "tcp_", "shm_")
    for length in (4096, 8000)
}
_H100_KV_BYTES_S = 2.6e9
_LINKS = {"10g": 1.25e9, "25g": 3.125e9}
_READY_S = 120.0


@dataclass(frozen=True, slots=True)
class Handed:
    """One prompt's hand-over."""

    ttft_s: float
    exposed_s: float
    kv_bytes: int


class Engine:
    """A worker's process, and a stream to it as a router has one."""

    def __init__(self, role: str, folder: Path, *flags: str) -> None:
        self.port, kv_port, health = free_ports(3)
        command = [
            sys.executable, "-m", "pd_engine", f"--role={role}", f"--model={folder}",
            "--served-name=m", f"--worker-name={role}", "--host=127.0.0.1",
            f"--work-port={self.port}", f"--kv-port={kv_port}", f"--health-port={health}",
            "--threads=1", "--kv-cache-tokens=20000", "--dtype=auto", *flags,
        ]  # fmt: skip
        # The hosts file tells that all workers are on this machine.
        env = {**os.environ, "PD_HOSTS_FILE": os.devnull, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        self.epoch = ""
        self.arrived: asyncio.Queue[tuple[float, pb.Event]] = asyncio.Queue()

    async def connect(self) -> None:
        """Waits until it serves. Its epoch is what it says when it is taken for another."""
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        stub = engine_pb2_grpc.WorkerStub(self._channel)
        async with asyncio.timeout(_READY_S):
            while not self.epoch:
                try:
                    await self._bind(stub, "?")
                except grpc.aio.AioRpcError as error:
                    found = re.search(r"epoch is ([^,]+),", error.details() or "")
                    self.epoch = found[1] if found else ""
                    await asyncio.sleep(0.2)
        self._call = await self._bind(stub, self.epoch)
        self._reading = asyncio.create_task(self._read())

    async def _bind(self, stub: Any, epoch: str) -> Any:
        call = stub.Work()
        bind = pb.Bind(router="bench", router_epoch="bench", worker_epoch=epoch)
        await call.write(pb.WorkRequest(commands=[pb.Command(bind=bind)]))
        reply = await call.read()
        if reply is grpc.aio.EOF:
            await call.code()
            raise grpc.aio.AioRpcError(
                await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details()
            )
        return call

    async def _read(self) -> None:
        while (reply := await self._call.read()) is not grpc.aio.EOF:
            for event in reply.events:
                self.arrived.put_nowait((time.perf_counter(), event))

    async def send(self, **command: Any) -> None:
        await self._call.write(pb.WorkRequest(commands=[pb.Command(**command)]))

    async def event(self, kind: str) -> tuple[float, Any]:
        while True:
            at, event = await self.arrived.get()
            which = event.WhichOneof("event")
            if which == "failed":
                raise RuntimeError(event.failed.message)
            if which == kind:
                return at, getattr(event, kind)

    async def close(self) -> None:
        if hasattr(self, "_reading"):
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            await self._channel.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)


_numbers = iter(range(1, 1_000_000))


def made_up(length: int) -> dict[str, Any]:
    """A prompt that no worker has seen."""
    number = next(_numbers)
    tokens = [(number * 7919 + at * 31) % 40000 + 100 for at in range(length)]
    return {
        "handle": number,
        "id": pb.TransferId(request=f"r{number}", attempt=1),
        "token_ids": tokens,
        "prompt_tokens": length,
        "choices": [0],
        "sampling": pb.Sampling(max_tokens=4, ignore_eos=True),
        "deadline_s": 300.0,
    }


async def hand_over(prefill: Engine, decode: Engine, length: int) -> Handed:
    attempt = made_up(length)
    began = time.perf_counter()
    await decode.send(generate=pb.Generate(**attempt, grant_wait_s=30.0))
    _, granted = await decode.event("granted")
    target = pb.KvTarget(
        worker="decode",
        epoch=decode.epoch,
        kv_address=granted.kv_address,
        grant=granted.grant,
        prefix_tokens=granted.prefix_tokens,
    )
    await prefill.send(prefill=pb.Prefill(**attempt, target=target, lease_s=60.0))
    first_at, _ = await prefill.event("prefilled")
    committed_at, committed = await decode.event("committed")
    while True:
        _, out = await decode.event("tokens")
        if any(token.finish for token in out.tokens):
            break
    exposed_s = max(0.0, committed_at - first_at)
    return Handed(first_at - began, exposed_s, committed.kv_bytes)


async def alone(both: Engine, length: int) -> float:
    """Seconds to token 0 where one worker does both."""
    attempt = made_up(length)
    began = time.perf_counter()
    await both.send(generate=pb.Generate(**attempt, grant_wait_s=30.0, prefill_here=True))
    first_at, out = await both.event("tokens")
    while not any(token.finish for token in out.tokens):
        _, out = await both.event("tokens")
    return first_at - began


async def against_both(folder: Path, lengths: tuple[int, ...], rounds: int) -> dict[int, float]:
    """How much later token 0 is with two workers than with one, by length of the prompt."""
    engines = [
        Engine(role, folder, "--kv-transport=auto") for role in ("prefill", "decode", "both")
    ]
    prefill, decode, both = engines
    found: dict[int, float] = {}
    try:
        for engine in engines:
            await engine.connect()
        await hand_over(prefill, decode, min(lengths))
        await alone(both, min(lengths))
        for length in lengths:
            ratios = []
            for _ in range(rounds):
                apart_s = (await hand_over(prefill, decode, length)).ttft_s
                ratios.append(apart_s / await alone(both, length))
            found[length] = median(ratios)
    finally:
        for engine in engines:
            await engine.close()
    return found


async def measure(
    folder: Path, decode: Engine, lengths: tuple[int, ...], rounds: int, *flags: str
) -> dict[int, list[Handed]]:
    """A prefill worker with these flags hands prompts of each length over."""
    prefill = Engine("prefill", folder, *flags)
    try:
        await prefill.connect()
        await hand_over(prefill, decode, min(lengths))
        return {n: [await hand_over(prefill, decode, n) for _ in range(rounds)] for n in lengths}
    finally:
        await prefill.close()


def share(found: list[Handed]) -> float:
    return median(one.exposed_s / one.ttft_s for one in found)


async def run(folder: Path, quick: bool) -> dict[str, float]:
    lengths = (512,) if quick else LENGTHS
    rounds = 2 if quick else 5
    metrics: dict[str, float] = {}
    rows: list[tuple[object, ...]] = []
    decode = Engine("decode", folder, "--kv-transport=auto")

    async def one(name: str, *flags: str) -> dict[int, list[Handed]]:
        found = await measure(folder, decode, lengths, rounds, *flags)
        for length, handed in found.items():
            metrics[f"exposed_share_{name}{length}"] = share(handed)
            ttft_s = median(h.ttft_s for h in handed)
            exposed_ms = median(h.exposed_s for h in handed) * 1000
            mib = handed[0].kv_bytes / (1 << 20)
            rows.append((name.strip("_") or "auto", length, mib, ttft_s, exposed_ms, share(handed)))
        return found

    try:
        await decode.connect()
        plain = await one("tcp_", "--kv-transport=tcp")
        await one("shm_", "--kv-transport=shm")
        longest = plain[max(lengths)]
        kv_bytes_s = median(h.kv_bytes / h.ttft_s for h in longest)
        for link, bytes_s in _LINKS.items():
            limit = bytes_s * kv_bytes_s / _H100_KV_BYTES_S
            for quantization in ("none",) if quick else ("none", "int8", "int4"):
                name = f"{link}_" if quantization == "none" else f"{link}_{quantization}_"
                wire = f"--kv-quantization={quantization}"
                await one(name, "--kv-transport=tcp", f"--kv-rate-limit={limit}", wire)
    finally:
        await decode.close()
    for length, ratio in (await against_both(folder, lengths, rounds)).items():
        metrics[f"ttft_vs_both_{length}"] = ratio
    head = ("link", "tokens", "KV MiB", "TTFT s", "exposed ms", "share")
    print(table(head, rows), flush=True)
    return metrics


@contextmanager
def _quiet() -> Iterator[None]:
    """grpc's forks of this process are none of its business."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    yield


def main(quick: bool) -> None:
    folder = model_dir()
    with _quiet():
        metrics = asyncio.run(run(folder, quick))
    report("transfer", metrics, GOALS, quick)


if __name__ == "__main__":
    main(arguments(__doc__))
