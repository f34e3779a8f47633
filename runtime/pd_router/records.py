"""What is kept of an announced worker, and one side of a request at it."""

import time
from dataclasses import dataclass, field

from pd_proto.v1 import engine_pb2 as pb
from pd_router.breaker import Breaker, Progress, State
from pd_router.fleet import WorkerView
from pd_router.link import Link


@dataclass(slots=True)
class Record:
    """One announced process."""

    hello: pb.Hello
    view: WorkerView
    link: Link
    progress: Progress
    breaker: Breaker = field(default_factory=Breaker)
    stream: object | None = None  # the announcement that counts; None: it ended
    heard: float = 0.0
    draining: bool = False
    lapsed: bool = False
    heartbeats: int = 0
    routers: int = 0  # that it counts; 0: it doesn't

    @property
    def why_unusable(self) -> str | None:
        """None when it may get new work."""
        return "it drains" if self.draining else self.why_unreachable

    @property
    def shares(self) -> bool:
        """It may be asked for a copy, though it may drain. One that gets a probe at a time isn't:
        the probe is a request's."""
        return self.why_unreachable is None and self.breaker.state is State.CLOSED

    @property
    def why_unreachable(self) -> str | None:
        """None when it does what it's asked to, though it may drain."""
        if self.stream is None:
            return "its announcement has ended"
        if self.lapsed:
            return "its heartbeats have ceased"
        if not self.heartbeats:
            return "no heartbeat yet"
        if not self.link.bound:
            return "no work stream"
        if not self.breaker.lets_through:
            return f"breaker {self.breaker.state.value}: {self.breaker.reason}"
        return None


class Promise:
    """A prompt that goes to a prefill worker once decode has granted. It counts there from now
    on: else a burst would choose the same one, or all of it one that gets a probe at a time."""

    __slots__ = ("_tokens", "probe", "record")

    def __init__(self, record: Record, tokens: int) -> None:
        self.record = record
        self._tokens = tokens
        record.view.assign_prefill(tokens)
        self.probe = record.breaker.chosen()

    def over(self) -> None:
        """It's sent, or it never will be. Once."""
        self.record.view.end_prefill(self._tokens)
        self.record.breaker.over(self.probe)


class Work:
    """One side of a request at a worker: its handle, and its share in the load's books."""

    __slots__ = (
        *("_blocks", "_expecting", "_holds_since", "_sequences", "_tokens"),
        *("handle", "probe", "record"),
    )

    def __init__(
        self, record: Record, handle: int, tokens: int, blocks: int, sequences: int
    ) -> None:
        self.record = record
        self.handle = handle
        self._tokens = tokens
        self._blocks = blocks
        self._sequences = sequences
        self._expecting = False
        self._holds_since: float | None = None
        record.view.assign_prefill(tokens)
        record.view.assign_decode(blocks, sequences)
        self.probe = record.breaker.chosen()

    def send(self, command: pb.Command) -> None:
        self.record.link.send(command)

    def expect_steps(self) -> None:
        """From now on the worker has something to compute for this request."""
        if not self._expecting:
            self._expecting = True
            self.record.progress.expect(time.monotonic())

    def holds(self, now: float) -> None:
        """It has its room there, from now on at the latest."""
        if self._holds_since is None:
            self._holds_since = now

    def carried(self, kv_bytes: int, transfer_s: float) -> None:
        """KV has come to this worker: how fast its link is."""
        self.record.view.carried(kv_bytes, transfer_s)

    def prefill_over(self) -> None:
        self.record.view.end_prefill(self._tokens)
        self._tokens = 0

    def expect_no_steps(self) -> None:
        if self._expecting:
            self._expecting = False
            self.record.progress.expect_no_more()

    def release(self, *, cancel: bool) -> None:
        """The side is over; `cancel` tells the worker. Once."""
        self.record.link.release(self.handle, cancel=cancel)
        self.expect_no_steps()
        self.prefill_over()
        self.record.view.end_decode(self._blocks, self._sequences)
        if self._holds_since is not None:
            self.record.view.stayed(time.monotonic() - self._holds_since)
        self.record.breaker.over(self.probe)
