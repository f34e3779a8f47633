"""Work inside a cluster's own network: its Services' and pods' addresses answer only there.

A network namespace belongs to a thread, so a thread of its own goes in and never comes back.
"""

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000


def enter(namespace_file: Path) -> None:
    """Moves the calling thread into the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace_file, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns {namespace_file}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


def start(namespace_file: Path | None, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
    """Runs a coroutine in an event loop of a thread in there; None: where we are."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            if namespace_file is not None:
                enter(namespace_file)
            future.set_result(asyncio.run(work()))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
