"""KV by tcp: the payload follows each push on its connection, from pool to pool."""

import socket
import ssl
from collections.abc import Callable, Sequence

from pd_core.identity import Part
from pd_core.kv import KvLayout
from pd_engine.kv import proving, tcp
from pd_engine.kv.frames import encode_push
from pd_engine.kv.transport import Transport
from pd_engine.transfer import PushHead
from pd_proto.tls import Certificates
from pd_proto.tokens import Tokens


class TcpTransport(Transport):
    """See the module."""

    name = "tcp"

    def __init__(
        self, certificates: Certificates | None = None, tokens: Tokens | None = None
    ) -> None:
        self._certificates = certificates
        self._tokens = tokens

    async def connect(self, address: str, epoch: str) -> socket.socket:
        del epoch
        sock = await tcp.connect(address)
        if self._certificates is not None:
            sock = await self._secured(sock, self._certificates, server=False)
        try:
            await proving.dialled(sock, self._tokens)
        except BaseException:
            sock.close()
            raise
        return sock

    async def push(
        self,
        sock: socket.socket,
        head: PushHead,
        block_ids: Sequence[int],
        slices: Sequence[memoryview],
        scratch: memoryview,
    ) -> None:
        del block_ids
        await tcp.send_all(sock, encode_push(head))
        await tcp.send_payload(sock, slices, scratch)

    async def listen(self, host: str, port: int, epoch: str) -> socket.socket:
        del epoch
        return await tcp.listen(host, port)

    async def greet(self, sock: socket.socket) -> "tuple[socket.socket, TcpTaker]":
        tcp.configure(sock)
        if self._certificates is not None:
            sock = await self._secured(sock, self._certificates, server=True)
        try:
            await proving.accepted(sock, self._tokens)
        except BaseException:
            sock.close()
            raise
        return sock, TcpTaker()

    async def _secured(
        self, sock: socket.socket, certificates: Certificates, *, server: bool
    ) -> ssl.SSLSocket:
        """TLS over it, with another worker of this PDCluster and nobody else. OSError."""
        context = certificates.server_context if server else certificates.client_context
        try:
            secured = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
        try:
            await tcp.handshake(secured)
            certificates.check(secured, Part.WORKER)
        except BaseException:
            secured.close()
            raise
        return secured


class TcpTaker:
    """Reads a push's payload off the socket."""

    def open(self, sender: KvLayout) -> None:
        """A payload's size is in its head."""

    async def take(
        self,
        sock: socket.socket,
        head: PushHead,
        slices: Sequence[memoryview],
        scratch: memoryview,
        progress: Callable[[], None],
    ) -> int:
        del head
        return await tcp.receive_payload(sock, slices, scratch, progress)

    def close(self) -> None:
        """Nothing is held."""
