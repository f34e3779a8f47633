"""gRPC's two bidirectional streams in a world: as much of grpc.aio as the product uses.

Messages are delayed, dropped, repeated and swapped; streams break. gRPC itself would only
delay and break.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio

from pd_proto.v1 import engine_pb2 as pb
from tests.simulation.loop import VirtualLoop

_END = object()
_FAULTS = ("drop", "repeat", "swap", "stall", "stall")
# A command that came twice would be answered as a mistake of the router's, and rightly so.
_COMMAND_FAULTS = ("drop", "stall")


class _Queue:
    """Messages on their way in one direction, and who waits for them."""

    def __init__(self, net: "RpcNet") -> None:
        self._net = net
        self._arrived: deque[Any] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._clear_at = 0.0
        self._held: Any = None

    def put(self, message: Any, *, faults: bool, replies: bool = True) -> None:
        net = self._net
        if not faults or net.random.random() >= net.fault_rate:
            self._send(message)
            return
        fault = net.random.choice(_FAULTS if replies else _COMMAND_FAULTS)
        net.note(f"rpc fault: {fault} ({type(message).__name__})")
        match fault:
            case "drop":
                return
            case "repeat":
                self._send(message)
                self._send(message)
            case "swap":
                self._held = message
                net.loop.call_later(0.5, self._release)
            case "stall":
                # Several don't add up: who waits is never more than this behind.
                self._clear_at = max(self._clear_at, net.now + net.random.uniform(0.1, 5.0))
                self._send(message)

    def end(self, *, at_once: bool = False) -> None:
        if at_once:
            self._arrive(_END)
        else:
            self._send(_END)

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._send(held)

    def _send(self, message: Any) -> None:
        net = self._net
        self._clear_at = max(self._clear_at, net.now + net.random.uniform(0.0001, 0.01))
        net.loop.call_at(self._clear_at, self._arrive, message)
        held, self._held = self._held, None
        if held is not None:
            net.loop.call_at(self._clear_at, self._arrive, held)

    def _arrive(self, message: Any) -> None:
        self._arrived.append(message)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def take(self) -> Any:
        while not self._arrived:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            await future
        if self._arrived[0] is _END:
            return _END
        return self._arrived.popleft()


class Stream:
    """One call: the client's end is what `channel.stream_stream()` gives."""

    def __init__(self, net: "RpcNet", client: str, server: str, faults: bool) -> None:
        self.net = net
        self.client = client
        self.server = server
        self.up, self.down = _Queue(net), _Queue(net)
        self.faults = faults
        self.broken = ""
        self.task: asyncio.Task[None] | None = None  # the server's handler
        self.over = False

    # ---- the client's end ---------------------------------------------------------------

    async def write(self, message: Any) -> None:
        if self.broken:
            raise self._error()
        bind = isinstance(message, pb.WorkRequest) and message.commands[0].HasField("bind")
        self.up.put(message, faults=self.faults and not bind, replies=False)

    async def read(self) -> Any:
        message = await self.down.take()
        if message is not _END:
            return message
        if self.broken:
            raise self._error()
        return grpc.aio.EOF

    def cancel(self) -> bool:
        if not self.over:
            self.over = True
            self.net.loop.call_later(0.005, self._end_server)
        return True

    async def code(self) -> Any:
        return grpc.StatusCode.OK

    async def details(self) -> str:
        return "ended"

    def _error(self) -> grpc.aio.AioRpcError:
        empty = grpc.aio.Metadata()
        code = grpc.StatusCode.UNAVAILABLE
        return grpc.aio.AioRpcError(code, empty, empty, details=self.broken)

    # ---- the server's end: request_iterator and context -------------------------------------

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        message = await self.up.take()
        if message is _END:
            raise StopAsyncIteration
        return message

    async def abort(self, code: Any, details: str) -> None:
        self.break_off(f"{code}: {details}")
        raise grpc.aio.AbortError(details)

    async def serve(self, handler: Callable[..., Any]) -> None:
        context = SimpleNamespace(write=self._write_down, abort=self.abort)
        try:
            await handler(self, context)
        except grpc.aio.AbortError:
            pass
        finally:
            if not self.broken:
                self.down.end()

    async def _write_down(self, message: Any) -> None:
        self.down.put(message, faults=self.faults)

    # ---- what happens to it -----------------------------------------------------------------

    def break_off(self, reason: str, *, server_hears: bool = True) -> None:
        if self.broken:
            return
        self.broken = reason
        self.down.end(at_once=True)
        if server_hears:
            self._end_server()

    def _end_server(self) -> None:
        self.over = True
        if self.task is not None:
            self.task.cancel()


class _Channel:
    def __init__(self, net: "RpcNet", address: str) -> None:
        self._net = net
        self._address = address

    async def __aenter__(self) -> "_Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def stream_stream(self, path: str, *_: Any, **__: Any) -> Callable[[], Stream]:
        return lambda: self._net.dial(self._address.rpartition(":")[0], path)


class _Server:
    def __init__(self, net: "RpcNet", loop: VirtualLoop) -> None:
        self._net = net
        self.loop = loop
        self.methods: dict[str, Callable[..., Any]] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered methods below are the same ones."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self.methods[f"/{service}/{name}"] = handler.stream_stream

    def add_insecure_port(self, address: str) -> int:
        return int(address.rpartition(":")[2]) or 7001

    async def start(self) -> None:
        self._net.servers[self.loop.host] = self

    async def stop(self, grace: float) -> None:
        del grace
        self._net.servers.pop(self.loop.host, None)


class RpcNet:
    """All gRPC streams of a world; one server a host."""

    def __init__(self, loop: VirtualLoop, random: Random, fault_rate: float, note: Any) -> None:
        self.loop = loop
        self.random = random
        self.fault_rate = fault_rate
        self.note = note
        self.servers: dict[str, _Server] = {}
        self.streams: list[Stream] = []
        aio = SimpleNamespace(
            insecure_channel=lambda address, **_: _Channel(self, address),
            server=lambda **_: _Server(self, _running()),
            EOF=grpc.aio.EOF,
            AioRpcError=grpc.aio.AioRpcError,
            UsageError=grpc.aio.UsageError,
            Channel=grpc.aio.Channel,
            Server=grpc.aio.Server,
            StreamStreamCall=grpc.aio.StreamStreamCall,
        )
        self.grpc = SimpleNamespace(aio=aio, StatusCode=grpc.StatusCode, RpcError=grpc.RpcError)

    @property
    def now(self) -> float:
        return self.loop.clock.now

    def dial(self, host: str, path: str) -> Stream:
        server = self.servers.get(host)
        stream = Stream(self, _running().host, host, faults=path.endswith("/Work"))
        if server is None or path not in server.methods:
            self.loop.call_later(0.001, stream.break_off, "nobody is there")
            return stream
        stream.task = server.loop.create_task(stream.serve(server.methods[path]))
        self.streams = [s for s in self.streams if not s.over]
        self.streams.append(stream)
        return stream

    def crash(self, host: str, heard: bool) -> None:
        self.servers.pop(host, None)
        delay_s = self.random.uniform(0.001, 0.05) if heard else 10.0
        for stream in self.streams:
            if stream.server == host:
                stream.task = None  # it is never run again
                self.loop.call_later(delay_s, stream.break_off, "the process died")
            elif stream.client == host:
                self.loop.call_later(delay_s, stream.break_off, "the process died")

    def cut_one(self) -> None:
        """A connection between a router and a worker breaks."""
        live = [s for s in self.streams if not s.over and not s.broken]
        if live:
            stream = self.random.choice(live)
            self.note(f"stream {stream.client} -> {stream.server} is cut")
            stream.break_off("connection reset")


def _running() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop
