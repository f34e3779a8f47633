"""The worker's gRPC side: one bidirectional stream a router."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from pd_core.identity import Part
from pd_core.proof import Purpose
from pd_engine.core import EngineCore
from pd_engine.outbox import Outbox
from pd_proto import tls
from pd_proto.tokens import Tokens, admit, challenge
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc

log = logging.getLogger("pd_engine.server")

_BIND_DEADLINE_S = 10.0
_MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A router that vanished without a FIN is noticed, and its requests freed.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class WorkerService(engine_pb2_grpc.WorkerServicer):
    """`Work`: Bind first, then commands in and events out until either side ends it."""

    def __init__(
        self,
        core: EngineCore,
        epoch: str,
        certificates: tls.Certificates | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self._core = core
        self._epoch = epoch
        self._certificates = certificates
        self._tokens = tokens

    async def Work(self, request_iterator: AsyncIterator[pb.WorkRequest], context: Any) -> None:
        if self._certificates is not None:
            await self._certificates.admit(context, Part.ROUTER)
        iterator = aiter(request_iterator)
        asked = await challenge(self._tokens, context)
        bind, rest = await self._first(iterator, context)
        confirmation = await admit(self._tokens, Purpose.WORK, asked, bind.proof, context)
        await self._meant(bind, context)
        number, outbox = self._core.open_stream()
        bound = pb.Bound(worker_epoch=self._epoch, confirmation=confirmation)
        outbox.put(pb.Event(bound=bound))
        outbox.flush()
        reader = asyncio.create_task(self._read(iterator, rest, number, outbox))
        try:
            while (reply := await outbox.take()) is not None:
                await context.write(reply)
            if outbox.overflowed:
                log.error("stream=%d the router doesn't read: closed", number)
        finally:
            reader.cancel()
            self._core.close_stream(number)

    async def _first(
        self, iterator: AsyncIterator[pb.WorkRequest], context: Any
    ) -> tuple[pb.Bind, list[pb.Command]]:
        """The Bind, and what came with it."""
        try:
            async with asyncio.timeout(_BIND_DEADLINE_S):
                message = await anext(iterator, None)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Bind came")
        commands = list(message.commands) if message is not None else []
        if not commands or commands[0].WhichOneof("command") != "bind":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "Bind must come first")
        return commands[0].bind, commands[1:]

    async def _meant(self, bind: pb.Bind, context: Any) -> None:
        """Ends the call of a router that means another process."""
        wanted = bind.worker_epoch
        if wanted != self._epoch:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this worker's epoch is {self._epoch}, not {wanted}: it restarted",
            )
        log.info("bound router=%s", bind.router)

    async def _read(
        self,
        iterator: AsyncIterator[pb.WorkRequest],
        rest: list[pb.Command],
        number: int,
        outbox: Outbox,
    ) -> None:
        try:
            self._carry_out(number, rest)
            async for message in iterator:
                self._carry_out(number, message.commands)
        except grpc.RpcError as error:
            log.info("stream=%d ended: %s", number, error)
        finally:
            # The router said that it is done, or is gone; either way nobody reads on.
            outbox.close()

    def _carry_out(self, number: int, commands: Any) -> None:
        for command in commands:
            self._core.handle(number, command)
        self._core.commands_done()


async def serve(
    core: EngineCore,
    epoch: str,
    host: str,
    port: int,
    certificates: tls.Certificates | None = None,
    tokens: Tokens | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Starts the Worker service; returns it with the port it got. OSError when it is taken."""
    server = grpc.aio.server(options=_OPTIONS)
    service = WorkerService(core, epoch, certificates, tokens)
    engine_pb2_grpc.add_WorkerServicer_to_server(service, server)
    bound = tls.listen(certificates, server, f"{host}:{port}")
    await server.start()
    return server, bound
