"""A port on loopback that leads into the cluster's network:
`python -m e2e.cluster.proxy --listen PORT --namespace FILE --to ADDRESS:PORT`.

It listens where it was started, then enters the namespace: a socket belongs to the network
that it was made in, so all that it dials from then on is dialled within.
"""

import argparse
import asyncio
import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_CHUNK = 64 * 1024
_DIAL_DEADLINE_S = 10


def enter(namespace: Path) -> None:
    """This thread is in that network from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"can't enter {namespace}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


async def serve(listener: socket.socket, host: str, port: int) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            dialled = asyncio.open_connection(host, port)
            inner_reader, inner_writer = await asyncio.wait_for(dialled, _DIAL_DEADLINE_S)
        except (OSError, TimeoutError):
            writer.transport.abort()  # a reset tells the client that nobody is there
            return
        try:
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        except OSError:  # one side broke it off: so do we with the other
            writer.transport.abort()
            inner_writer.transport.abort()
        finally:
            writer.close()
            inner_writer.close()

    server = await asyncio.start_server(handle, sock=listener)
    async with server:
        await server.serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction, to its end; the other one goes on."""
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.proxy")
    parser.add_argument("--listen", type=int, required=True)
    parser.add_argument("--namespace", type=Path, required=True)
    parser.add_argument("--to", required=True)
    options = parser.parse_args()
    host, _, port = options.to.rpartition(":")
    listener = socket.create_server(("127.0.0.1", options.listen))
    enter(options.namespace)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(listener, host, int(port)))


if __name__ == "__main__":
    main()
