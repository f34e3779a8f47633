"""The prefill worker's sending side: one task an export, from the pool into a channel."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_engine.exports import ExportAction, Exports, PushJob, SealJob, StopJob, Target
from pd_engine.kv import frames
from pd_engine.kv.channels import Channel, Channels
from pd_engine.kv.checksum import checksum
from pd_engine.kv.codec import Codec, Part
from pd_engine.kv.memory import KvMemory
from pd_engine.transfer import AbortHead, PushHead, TransferId, Verdict
from pd_engine.types import RequestKey

log = logging.getLogger(__name__)


class Pacer:
    """Spaces the frames of all transfers so that together they keep to a rate (0: none)."""

    CREDIT_S = 0.005
    """A sleep that took too long is made up for, up to this."""

    def __init__(self, bytes_s: float, clock: Callable[[], float]) -> None:
        self.bytes_s = bytes_s
        self._clock = clock
        self._free_at = 0.0

    async def passed(self, size: int) -> None:
        """Until a link of that rate had carried `size` bytes. Yields in any case: a socket
        that takes all at once would let one transfer keep the loop to itself."""
        delay = 0.0
        if self.bytes_s:
            now = self._clock()
            self._free_at = max(self._free_at, now - self.CREDIT_S) + size / self.bytes_s
            delay = max(0.0, self._free_at - now)
        await asyncio.sleep(delay)


class KvSender:
    """Drives Exports: what they want sent is sent."""

    def __init__(
        self,
        exports: Exports,
        memory: KvMemory,
        channels: Channels,
        apply: Callable[[Sequence[ExportAction]], None],
        clock: Callable[[], float],
        bytes_s: float,
        quantization: str = "",
    ) -> None:
        """`quantization` of what goes over a network; in memory it would gain nothing."""
        self.exports = exports
        self.memory = memory
        self.channels = channels
        self.apply = apply
        self.clock = clock
        self.pacer = Pacer(bytes_s, clock)
        self.quantization = quantization
        self._codec = Codec(memory) if quantization else None
        self._carriers: dict[RequestKey, _Carrier] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def encode(self, job: PushJob, quantization: str) -> bytes | None:
        """A push's payload in fewer bits; None where that isn't possible."""
        if self._codec is None:
            return None
        r = job.range
        return self._codec.encode(Part(job.block_ids, r.layer_start, r.layer_count), quantization)

    def engage(self, key: RequestKey, id: TransferId, target: Target) -> None:
        carrier = _Carrier(self, key, id, target)
        self._carriers[key] = carrier
        task = asyncio.get_running_loop().create_task(carrier.run())
        carrier.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def wake(self, key: RequestKey) -> None:
        carrier = self._carriers.get(key)
        if carrier is not None:
            carrier.awake.set()

    def cut(self, key: RequestKey) -> None:
        carrier = self._carriers.get(key)
        if carrier is not None:
            carrier.cut()

    def transport_of(self, key: RequestKey) -> str:
        """By which an export goes; "" while it has no connection."""
        carrier = self._carriers.get(key)
        return carrier.transport if carrier is not None else ""

    def forget(self, key: RequestKey) -> None:
        self._carriers.pop(key, None)

    async def close(self) -> None:
        """Waits for the last senders (bounded: their exports were cancelled before)."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.channels.close()


class _Carrier:
    """Carries one export over one channel."""

    def __init__(self, sender: KvSender, key: RequestKey, id: TransferId, target: Target) -> None:
        self.awake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._sender = sender
        self._key = key
        self._id = id
        self._target = target
        self._channel: Channel | None = None
        self._running = False
        self._cut = False
        self._spent = False  # the target closes the channel by itself

    @property
    def transport(self) -> str:
        return self._channel.transport.name if self._channel is not None else ""

    def cut(self) -> None:
        """End whatever is going on. (A task that never ran must run, to report.)"""
        self._cut = True
        if self.task is not None and self._running and asyncio.current_task() is not self.task:
            self.task.cancel()

    def on_verdict(self, verdict: Verdict) -> None:
        if verdict.grant != self._target.grant:
            return  # a late word on the channel's last transfer
        self._spent = not verdict.committed
        sender = self._sender
        sender.apply(
            sender.exports.verdict(self._key, verdict.committed, verdict.reason, sender.clock())
        )

    def on_lost(self, reason: str) -> None:
        self._broken(reason)

    async def run(self) -> None:
        """Send until told to stop; report, and only then part from the channel."""
        self._running = not self._cut
        try:
            if self._running:
                await self._carry()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._cut or task is None:
                raise
            task.uncancel()
        finally:
            self._running = False
            abort = self._sender.exports.abort_reason(self._key)
            self._sender.forget(self._key)
            self._sender.apply(self._sender.exports.stopped(self._key))
        await self._part(abort)

    async def _carry(self) -> None:
        try:
            target = self._target
            peer = (target.address, target.epoch)
            self._channel = await self._sender.channels.borrow(peer, target.transports, self)
            await self._send_all(self._channel)
        except RequestFailure as e:
            self._end(e.failure)
        except frames.FrameError as e:
            self._end(Failure(FailureKind.INTERNAL, f"transfer {self._id}: {e}"))
        except OSError as e:
            if self._channel is not None:
                await self._channel.heard_out(self._sender.channels.abort_s)
            self._broken(f"sending to {self._target.address}: {e}")
        except Exception as e:
            log.exception("transfer %s", self._id)
            self._end(Failure(FailureKind.INTERNAL, f"transfer {self._id}: {e!r}"))

    async def _send_all(self, channel: Channel) -> None:
        sender, key = self._sender, self._key
        while True:
            self.awake.clear()
            match sender.exports.next_job(key, sender.clock()):
                case None:
                    await self.awake.wait()
                case PushJob() as job:
                    head = await self._push(channel, job)
                    size = head.payload_bytes
                    sender.exports.pushed(key, head.checksum, sender.clock(), size)
                    await sender.pacer.passed(size)
                case SealJob() as job:
                    await channel.send(frames.encode_seal(job.head))
                    sender.apply(sender.exports.sealed(key, sender.clock()))
                case StopJob():
                    return

    async def _push(self, channel: Channel, job: PushJob) -> PushHead:
        r = job.range
        quantization = self._sender.quantization if channel.transport.name == "tcp" else ""
        payload = self._sender.encode(job, quantization) if quantization else None
        if payload is None:
            quantization = ""
            slices = self._sender.memory.slices(job.block_ids, r.layer_start, r.layer_count)
        else:
            slices = [memoryview(payload)]
        head = PushHead(
            self._target.grant,
            self._id,
            r,
            sum(len(piece) for piece in slices),
            checksum(slices),
            quantization=quantization,
        )
        await channel.push(head, job.block_ids, slices)
        return head

    async def _part(self, abort: str) -> None:
        """The blocks are free already; all this waits for is the peer."""
        channel = self._channel
        if channel is None:
            return
        if abort and not channel.dirty and not channel.lost:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._sender.channels.abort_s):
                    head = AbortHead(self._target.grant, self._id, abort)
                    await channel.send(frames.encode_abort(head))
        await self._sender.channels.give_back(channel, reuse=not self._spent)

    def _broken(self, reason: str) -> None:
        message = f"transfer {self._id}: {reason}"
        self._end(Failure(FailureKind.TRANSFER_FAILED, message))

    def _end(self, failure: Failure) -> None:
        self._sender.apply(self._sender.exports.broken(self._key, failure))
