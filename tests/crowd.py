"""Clients by the thousand in a process of its own: `python -m tests.crowd HOST PORT COUNT HEX`.

Each connects, sends the bytes and never reads. It prints a line when all have sent theirs and
then lives until its standard input ends. A process of its own has its own descriptors.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

AT_ONCE = 200


async def _join(place: tuple[str, int], data: bytes, turns: asyncio.Semaphore) -> socket.socket:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    async with turns:
        with contextlib.suppress(ConnectionError):  # turned away: it was one too many
            await loop.sock_connect(sock, place)
            await loop.sock_sendall(sock, data)
    return sock


async def _stand(host: str, port: int, count: int, data: bytes) -> None:
    turns = asyncio.Semaphore(AT_ONCE)
    crowd = await asyncio.gather(*(_join((host, port), data, turns) for _ in range(count)))
    print("all are there", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for one in crowd:
        one.close()


@asynccontextmanager
async def crowd(host: str, port: int, count: int, data: bytes = b"") -> AsyncIterator[None]:
    """So many clients that have sent the bytes and read nothing, while the body runs."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.crowd", host, str(port), str(count), data.hex(),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    try:
        assert running.stdout is not None
        assert await running.stdout.readline(), "the crowd didn't come"
        yield
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


if __name__ == "__main__":
    _host, _port, _count, *_data = sys.argv[1:]
    asyncio.run(_stand(_host, int(_port), int(_count), bytes.fromhex("".join(_data))))
