"""A world: a router and its workers, all of the product's own code, in virtual time.

Everything that happens follows from the seed. `run` raises Wrong, or returns what became
of the requests.
"""

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_core.policies import POLICIES
from pd_engine import announce, core, server, sharing
from pd_engine.kv import frames, plane, tcp
from pd_proto import tls
from pd_router import link, pulling, session, workers
from pd_router.admission import Admission, AdmissionConfig
from pd_router.moves import WalkConfig
from pd_router.pulls import PullRules
from pd_router.routing import Disaggregate, Routing
from pd_router.session import Sessions
from pd_router.workers import Workers, WorkersConfig
from tests.simulation.kvnet import KvNet
from tests.simulation.loop import Clock, VirtualLoop
from tests.simulation.plan import Ask, Plan, Upset, plan
from tests.simulation.rpcnet import RpcNet
from tests.simulation.worker import ROUTER, Worker, Wrong

_BEGIN = 1000.0
_QUIET_S = 45.0  # after the last request all must have come free: longer than any wait
_SLACK_S = 0.2
_FREED_S = 0.25  # a client that leaves frees everything within, while all live
# What a client may be told when things go wrong. Not: that it asked something invalid, or
# that the product broke.
_EXCUSABLE = {
    FailureKind.DEADLINE, FailureKind.NO_WORKERS, FailureKind.NO_CAPACITY, FailureKind.DRAINING,
    FailureKind.WORKER_LOST, FailureKind.WORKER_LATE, FailureKind.TRANSFER_FAILED,
    FailureKind.LEASE_EXPIRED, FailureKind.PREEMPTED, FailureKind.STEP_FAILED,
    FailureKind.OVERLOADED,
}  # fmt: skip


_SPEAKERS = (announce, link, server, tls, workers)
"""Modules that reach gRPC; here they reach the simulated one."""


@dataclass
class Client:
    """Takes one request's output and checks each token as it comes."""

    ask: Ask
    world: "World"
    out: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    end: str = ""  # done, a failure's kind, cancelled, lost
    generation: Any = None
    began: float = 0.0
    ended_at: float | None = None

    @property
    def name(self) -> str:
        return self.ask.request.request_id

    def on_token(
        self, choice: int, index: int, token: int, finish: str | None, logprob: Any, top: Any
    ) -> None:
        del logprob, top
        self.world.note(f"{self.name} choice {choice} index {index}: {token} {finish or ''}")
        out, expected = self.out.setdefault(choice, []), self.ask.expected[choice]
        if self.end or choice in self.finished:
            raise Wrong(f"{self.name}: a token after the end")
        if index != len(out):
            raise Wrong(f"{self.name} choice {choice}: index {index} after {len(out)} tokens")
        if index >= len(expected) or token != expected[index]:
            raise Wrong(f"{self.name} choice {choice} index {index}: a wrong token")
        out.append(token)
        if finish is not None:
            if len(out) != len(expected):
                raise Wrong(f"{self.name} choice {choice}: finished at {index}, {expected}")
            self.finished[choice] = finish

    def on_done(self) -> None:
        self._end("done")
        if len(self.finished) != self.ask.request.choices:
            raise Wrong(f"{self.name}: done with choices {sorted(self.finished)} finished")

    def on_failed(self, failure: Failure) -> None:
        self._end(failure.kind.value)
        if failure.kind not in _EXCUSABLE:
            raise Wrong(f"{self.name}: {failure.kind}: {failure.message}")
        if not self.world.plan.faults and failure.kind is not FailureKind.DEADLINE:
            raise Wrong(f"{self.name} failed in a world without faults: {failure.message}")

    def _end(self, how: str) -> None:
        if self.end:
            raise Wrong(f"{self.name}: ended twice ({self.end}, {how})")
        self.world.note(f"{self.name} ends: {how}")
        self.end = how
        self.ended_at = self.world.clock.now
        timeline = self.generation.timeline
        if timeline.cached_tokens > timeline.prompt_tokens:
            raise Wrong(f"{self.name}: {timeline.cached_tokens} tokens cached")
        late_s = self.world.clock.now - self.began - self.ask.request.deadline_s
        if late_s > _SLACK_S + self.world.router_paused_s:
            raise Wrong(f"{self.name}: ended {late_s:.1f} s after its deadline")

    def leave(self) -> None:
        if not self.end:
            self.world.note(f"{self.name}: the client leaves")
            self.end = "cancelled"
            self.ended_at = self.world.clock.now
            self.generation.cancel()
            if not self.world.plan.faults:
                self.world.at(_FREED_S, self._check_freed)

    def _check_freed(self) -> None:
        for worker in self.world.workers.values():
            if worker.serves(self.name):
                raise Wrong(f"{self.name}: {worker.name} still works for a client that left")


class Router:
    """The router process."""

    def __init__(self, world: "World", number: int) -> None:
        self.loop = VirtualLoop(world.clock, ROUTER)
        self.number = number
        self.sessions: Sessions | None = None
        self.loop.create_task(self._main(world))

    async def _main(self, world: "World") -> None:
        random = world.random
        config = WorkersConfig(model="m", router=f"router/{self.number}", check_s=0.5)
        known = Workers(config)
        await known.start(ROUTER, 7000)
        admission = Admission(AdmissionConfig(max_running=random.choice((1, 3, 100))))
        walk = WalkConfig(
            grant_wait_s=4.0,
            reserve_margin_s=2.0,
            prefill_wait_s=8.0,
            commit_wait_s=4.0,
            decode_wait_s=4.0,
            worker_wait_s=5.0,
        )
        mode: Disaggregate = random.choice(
            ("always", "always", "auto")
        )  # auto often has decode do it all
        routing = Routing(policy=random.choice(POLICIES), disaggregate=mode)
        if world.plan.pulls:
            routing = _copying(world.plan, mode)
        self.sessions = Sessions(known, admission, walk, routing=routing)


def _copying(made: Plan, mode: Disaggregate) -> Routing:
    """Whatever a copy is predicted to gain, and for little time, some, or longer than workers
    wait."""
    limit_s = (0.02, 0.3, 10.0)[made.seed // 3 % 3]
    rules = PullRules(most_of_computing=inf, least_gain_s=-inf, least_limit_s=limit_s)
    return Routing(disaggregate="never" if made.taken_over else mode, pulls=rules)


class World:
    """See the module."""

    def __init__(self, made: Plan, trace: Callable[[str], None] | None = None) -> None:
        self.plan = made
        self.clock = Clock(_BEGIN)
        self.random = Random(made.seed ^ 0x5EED)
        self.digest = 0
        self._trace = trace
        self.loop = VirtualLoop(self.clock, "net")
        self.kv = KvNet(self.loop, self.random, made.kv_fault_rate, self.note)
        self.rpc = RpcNet(self.loop, self.random, made.rpc_fault_rate, self.note)
        self.router = Router(self, 0)
        self.router_paused_s = 0.0
        self.workers = {name: self._start(name, 0) for name in made.hosts}
        self.clients = [Client(ask, self) for ask in made.asks]
        self.paused: dict[str, float] = {}
        self.awake_since: dict[str, float] = {}
        self._dead: list[VirtualLoop] = []
        self.committed = 0  # transfers
        self._restarts: dict[str, int] = {}
        self._errors: list[str] = []
        self._over = False

    def note(self, text: str) -> None:
        """What happened; also into the digest by which two runs are compared."""
        line = f"{self.clock.now - _BEGIN:9.4f}  {text}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        if self._trace is not None:
            self._trace(line)

    def at(self, after_s: float, what: Callable[[], None]) -> None:
        self.loop.call_later(after_s, what)

    def _start(self, name: str, number: int) -> Worker:
        worker = Worker(self.plan, name, number, self.clock, self.random)
        worker.on_committed = self._count_commit
        worker.start()
        return worker

    # ---- running ------------------------------------------------------------------------

    def run(self) -> None:
        """Until all requests have ended and everything came free."""
        Wrong.found.clear()
        for client in self.clients:
            self._ask(client)
        for upset in self.plan.upsets:
            self.loop.call_later(upset.at_s, self._upset, upset)
        try:
            longest = max(c.ask.at_s + c.ask.request.deadline_s for c in self.clients)
            self._run_until(_BEGIN + longest + 10.0, self._all_ended)
            missing = [c.name for c in self.clients if not c.end]
            if missing:
                raise Wrong(f"never ended: {', '.join(missing)}")
            self._run_until(self.clock.now + _QUIET_S, self._all_free)
            self._judge()
        finally:
            self._end()

    def _run_until(self, end: float, done: Callable[[], bool]) -> None:
        rounds = 0
        while self.clock.now < end:
            loops = self._loops()
            due = min(loop.due() for loop in loops)
            if due > end:
                return
            self.clock.now = max(self.clock.now, due)
            ready = [loop for loop in loops if loop.due() <= self.clock.now]
            loop = ready[0] if len(ready) == 1 else self.random.choice(ready)
            loop.run_once()
            rounds += 1
            if Wrong.found or loop.problems or self._errors:
                raise Wrong("; ".join((Wrong.found + loop.problems + self._errors)[:2]))
            if rounds % 8 == 0:
                if rounds % 64 == 0:
                    self._check()
                if done():
                    return

    def _loops(self) -> list[VirtualLoop]:
        all_ = [self.loop, self.router.loop, *(w.loop for w in self.workers.values())]
        all_ = [loop for loop in all_ if not loop.over]
        if not self.paused:
            return all_
        self.paused = {h: t for h, t in self.paused.items() if t > self.clock.now}
        self.loop.call_at(min(self.paused.values(), default=self.clock.now), _nothing)
        return [loop for loop in all_ if loop.host not in self.paused]

    def _ask(self, client: Client) -> None:
        def start() -> None:
            sessions = self.router.sessions
            client.began = self.clock.now
            if sessions is None or self.router.loop.over or ROUTER in self.paused:
                client.end = "lost"
                return
            self.note(f"{client.name}: {len(client.ask.request.token_ids)} tokens")
            router = self.router
            router.loop.call_soon(begin, sessions)
            if client.ask.leaves_s is not None:
                router.loop.call_later(client.ask.leaves_s - client.ask.at_s, client.leave)

        def begin(sessions: Sessions) -> None:
            try:
                client.generation = sessions.start(client.ask.request, client)
            except RequestFailure as refused:
                client.end = refused.failure.kind.value
                self.note(f"{client.name} refused: {refused.failure.message}")
                if refused.failure.kind not in _EXCUSABLE or not self.plan.faults:
                    raise Wrong(f"{client.name}: {refused.failure.message}") from refused

        self.loop.call_later(client.ask.at_s, start)

    def _count_commit(self) -> None:
        self.committed += 1

    # ---- upsets --------------------------------------------------------------------------

    def _upset(self, upset: Upset) -> None:
        if self._over:
            return
        self.note(f"{upset.what} {upset.host} ({upset.seconds:.2f} s)")
        host = upset.host
        match upset.what:
            case "crash" | "vanish":
                self._crash(host, heard=upset.what == "crash")
                self.at(upset.seconds, lambda: self._restart(host))
            case "pause":
                self.paused[host] = self.awake_since[host] = self.clock.now + upset.seconds
                if host == ROUTER:
                    self.router_paused_s += upset.seconds
            case "cut":
                self.rpc.cut_one()
            case "fail":
                self.workers[host].runner.fail_next = True
            case "drain":
                worker = self.workers[host]
                if worker.core is not None and not worker.stopping:
                    worker.stopping = True
                    worker.loop.create_task(worker.core.drain(upset.seconds))
                    self.at(upset.seconds + 1.0, lambda: self._replace(worker))

    def _replace(self, worker: Worker) -> None:
        if self.workers[worker.name] is worker:
            self._crash(worker.name, heard=True)
            self._restart(worker.name)

    def _crash(self, host: str, heard: bool) -> None:
        dead = self.router.loop if host == ROUTER else self.workers[host].loop
        if dead.over:
            return
        dead.over = True
        self._dead.append(dead)
        if host == ROUTER:
            for client in self.clients:
                if not client.end and client.began:
                    client.end = "lost"
                    client.ended_at = self.clock.now
        else:
            self.workers[host] = Worker(self.plan, host, -1, self.clock, self.random)
            self.workers[host].loop.over = True  # a place where nothing runs
        self.kv.crash(host, heard)
        self.rpc.crash(host, heard)

    def _restart(self, host: str) -> None:
        if self._over:
            return
        number = self._restarts[host] = self._restarts.get(host, 0) + 1
        self.note(f"{host} is started again")
        if host == ROUTER:
            if self.router.loop.over:
                self.router = Router(self, number)
        elif self.workers[host].loop.over:
            self.workers[host] = self._start(host, number)

    @property
    def pulled(self) -> list[tuple[str, str]]:
        """From whom and to whom, for each request whose prompt began with a copy."""
        lines = (c.generation.timeline for c in self.clients if c.generation is not None)
        return [
            (line.pulled_from, line.prefill_worker or line.decode_worker)
            for line in lines
            if line.pulled_tokens
        ]

    # ---- judgement ------------------------------------------------------------------------

    def _check(self) -> None:
        for worker in self.workers.values():
            awake_since = self.awake_since.get(worker.name, 0.0)
            if worker.name in self.paused:
                continue
            worker.check_leases(self._ended_at, awake_since)
            try:
                worker.check()
            except AssertionError as error:
                raise Wrong(f"{worker.name}: {error}") from error

    def _ended_at(self, request_id: str) -> float | None:
        return next(c.ended_at for c in self.clients if c.name == request_id)

    def _all_ended(self) -> bool:
        return all(client.end for client in self.clients)

    def _all_free(self) -> bool:
        """And nobody has something to do: to hear of a task that failed, or what was late."""
        if self.clock.now <= _BEGIN + 6.0 or any(w.busy() for w in self.workers.values()):
            return False
        return all(loop.due() > self.clock.now for loop in self._loops())

    def _judge(self) -> None:
        self._check()
        for loop in self._loops():
            failed = loop.failed_tasks()
            if failed:
                raise Wrong(failed[0])
        for worker in self.workers.values():
            if worker.busy() and worker.name not in self.paused:
                raise Wrong(f"{worker.name} still holds {worker.busy()}")
        for client in self.clients:
            deadline_s = client.ask.request.deadline_s
            if not self.plan.faults and deadline_s > 5 and client.end not in ("done", "cancelled"):
                raise Wrong(f"{client.name}: {client.end} in a world without faults")

    def _end(self) -> None:
        self._over = True
        all_ = [*(w.loop for w in self.workers.values()), *self._dead, self.router.loop, self.loop]
        for _ in range(3):  # the end of one gives others something to do
            for loop in all_:
                loop.end_tasks()
        Wrong.found.clear()

    # ---- the product's edges -------------------------------------------------------------------

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Clocks, chance, sockets and gRPC of the product are this world's meanwhile."""
        time = SimpleNamespace(monotonic=self.clock.monotonic, time=self.clock.monotonic)

        async def resolve(name: str, port: int) -> set[str]:
            return {f"{name}:{port}"}

        changes: list[tuple[Any, str, Any]] = [
            (module, "time", time) for module in (core, link, pulling, session, sharing, workers)
        ]
        changes += [(module, "grpc", self.rpc.grpc) for module in _SPEAKERS]
        changes += [
            (core, "ThreadPoolExecutor", lambda *_, **__: SimpleNamespace(shutdown=_nothing)),
            (link, "random", self.random),
            (session, "random", self.random),
            (plane, "os", SimpleNamespace(urandom=lambda n: self.random.randbytes(n))),
            (announce, "resolve", resolve),
            (tcp, "listen", self.kv.listen),
            (tcp, "connect", self.kv.connect),
            (tcp, "configure", _nothing),
            (frames, "refuse", _watched_refusal(frames.refuse)),
        ]
        before = [(module, name, getattr(module, name)) for module, name, _ in changes]
        for module, name, value in changes:
            setattr(module, name, value)
        log = _Errors(self._errors)
        loggers = [logging.getLogger("pd_engine"), logging.getLogger("pd_router")]
        states = [(one.propagate, one.level) for one in loggers]
        for one in loggers:
            one.addHandler(log)
            one.propagate = False
            one.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)
            for one, (propagate, level) in zip(loggers, states, strict=True):
                one.removeHandler(log)
                one.propagate = propagate
                one.setLevel(level)


class _Errors(logging.Handler):
    """What the product logs as an error is one, but for steps that were told to fail."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if "told to fail" not in str(error):
            self._found.append(f"{record.name}: {record.getMessage()}: {error!r}")


def _watched_refusal(real: Any) -> Any:
    """A peer is (address, epoch): nobody takes what was meant for a predecessor."""

    def refuse(hello: Any, worker: str, epoch: str, layout: Any) -> Failure | None:
        failure: Failure | None = real(hello, worker, epoch, layout)
        if failure is None and hello.target_epoch != epoch:
            raise Wrong(f"{worker}: {epoch} takes a connection for {hello.target_epoch}")
        return failure

    return refuse


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


def run(seed: int, trace: Callable[[str], None] | None = None) -> World:
    """Runs the world of a seed. Raises Wrong."""
    world = World.__new__(World)
    made = plan(seed)
    if trace is not None:
        trace(made.describe())
    world.__init__(made, trace)
    with world.in_place():
        world.run()
    return world
