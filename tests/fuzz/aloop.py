"""An event loop that lives over many inputs and hides nothing: what a task or a callback
raises, and what is logged as an error, is a finding."""

import asyncio
import logging
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

DEADLINE_S = 8.0
"""Of one input. Shorter than libFuzzer's own, which would say nothing of where."""
T = TypeVar("T")


class Finding(AssertionError):
    """Something that no input may bring about."""


class _Errors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


class FuzzLoop:
    """One for each target, made when its first input comes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._failed)
        self._errors = _Errors()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """To its end; raises Finding for whatever went wrong beside it."""

        async def bounded() -> T:
            async with asyncio.timeout(DEADLINE_S):
                return await work

        root = logging.getLogger()
        root.addHandler(self._errors)
        try:
            return self._loop.run_until_complete(bounded())
        finally:
            root.removeHandler(self._errors)
            found, self._errors.found = self._errors.found, []
            if found:
                raise Finding("\n".join(found))

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        told = "".join(traceback.format_exception(error)) if error is not None else ""
        self._errors.found.append(f"{context['message']}\n{told}")


def pieces(data: bytes) -> list[bytes]:
    """An input as several: each is led by its length in two bytes."""
    found = []
    while len(data) >= 2:
        size = int.from_bytes(data[:2])
        found.append(data[2 : 2 + size])
        data = data[2 + size :]
    return found


def joined(*parts: bytes) -> bytes:
    """The input whose `pieces` are these."""
    return b"".join(len(part).to_bytes(2) + part for part in parts)
