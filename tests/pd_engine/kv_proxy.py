"""A proxy on a KV connection that knows where frames begin, and can hurt them."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from pd_core.proof import PROOF_BYTES
from pd_engine.kv import frames
from pd_engine.transfer import PushHead


class Do(Enum):
    """What happens to one frame from the sender."""

    PASS = "pass"
    FLIP = "flip one bit of the payload"
    CUT_BEFORE = "cut before the frame"
    CUT_IN_LENGTH = "cut within its length"
    CUT_IN_HEAD = "cut within its head"
    CUT_AFTER_HEAD = "cut before the payload"
    CUT_IN_PAYLOAD = "cut within the payload"
    CUT_AFTER = "cut after the frame"
    HOLD = "hold back half of the payload"
    REPEAT = "send it twice"


Plan = Callable[[int, frames.Frame], Do]


@dataclass
class Proxy:
    """Forwards to `upstream`; `plan` decides by the frame's number (hello is 0) and content.

    After a cut, and while a frame is held, later frames are not forwarded. Replies always are.
    """

    upstream: str
    plan: Plan
    address: str = ""
    connections: int = 0
    held: asyncio.Event = field(default_factory=asyncio.Event)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    server: asyncio.Server | None = None

    async def __aenter__(self) -> "Proxy":
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        host, port = self.server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.server is not None
        self.server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections += 1
        host, port = self.upstream.rsplit(":", 1)
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        back = asyncio.ensure_future(self._replies(up_reader, writer))
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._frames(reader, up_writer)
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            for end in (up_writer, writer):
                end.close()
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await end.wait_closed()
            back.cancel()
            await asyncio.wait({back})
            self.tasks.discard(task)

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def _frames(self, reader: asyncio.StreamReader, up: asyncio.StreamWriter) -> None:
        number = 0
        while True:
            prefix = await reader.readexactly(frames.PREFIX_BYTES)
            if prefix.startswith(frames.PROOF_MARK):  # of a token, before any frame
                more = len(frames.PROOF_MARK) + PROOF_BYTES - len(prefix)
                up.write(prefix + await reader.readexactly(more))
                await up.drain()
                continue
            body = await reader.readexactly(frames.frame_length(prefix))
            frame = frames.parse_frame(body)
            size = frame.payload_bytes if isinstance(frame, PushHead) else 0
            payload = bytearray(await reader.readexactly(size))
            if not await self._forward(self.plan(number, frame), prefix, body, payload, up):
                return
            number += 1

    async def _forward(
        self, do: Do, prefix: bytes, body: bytes, payload: bytearray, up: asyncio.StreamWriter
    ) -> bool:
        """False: the connection is to be cut."""
        whole = prefix + body + bytes(payload)
        middle = len(prefix) + len(body) + len(payload) // 2
        parts = {
            Do.CUT_BEFORE: b"",
            Do.CUT_IN_LENGTH: prefix[:2],
            Do.CUT_IN_HEAD: whole[: len(prefix) + len(body) // 2],
            Do.CUT_AFTER_HEAD: prefix + body,
            Do.CUT_IN_PAYLOAD: whole[:middle],
            Do.CUT_AFTER: whole,
        }
        match do:
            case Do.PASS:
                up.write(whole)
            case Do.FLIP:
                payload[len(payload) // 3] ^= 0x10
                up.write(prefix + body + bytes(payload))
            case Do.REPEAT:
                up.write(whole * 2)
            case Do.HOLD:
                up.write(whole[:middle])
                await up.drain()
                self.held.set()
                await self.let_go.wait()
                up.write(whole[middle:])
            case _:
                up.write(parts[do])
                await up.drain()
                return False
        await up.drain()
        return True
