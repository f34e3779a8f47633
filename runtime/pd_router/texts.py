"""Holds the model's current TextStack; those who need one wait here until it has come."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from pd_core.failures import FailureKind, RequestFailure
from pd_router.text import TextStack
from pd_router.types import Bundle, WorkersApi

log = logging.getLogger("pd_router.texts")

ENCODER_THREADS = 2


class Texts:
    """Built in the event loop; `close` at the end."""

    def __init__(self, workers: WorkersApi) -> None:
        self._workers = workers
        self._stack: TextStack | None = None
        self._came = asyncio.Event()
        self._building: asyncio.Task[None] | None = None
        self._wanted: Bundle | None = None
        self.pool = ThreadPoolExecutor(ENCODER_THREADS, thread_name_prefix="text")
        # Of /tokenize, behind which nobody's answer is to wait.
        self.side_pool = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        bundle = workers.bundle()
        if bundle is not None:
            self._bundle_came(bundle)
        workers.on_bundle(self._bundle_came)

    @property
    def current(self) -> TextStack | None:
        return self._stack

    async def get(self, wait_s: float) -> TextStack:
        """The current stack. Waits for the first one only if one may come."""
        if self._stack is None:
            if self._building is None and not self._workers.expecting():
                raise RequestFailure(
                    FailureKind.NO_WORKERS, "No worker has announced itself; try again later."
                )
            try:
                async with asyncio.timeout(wait_s):
                    await self._came.wait()
            except TimeoutError:
                raise RequestFailure(
                    FailureKind.NO_WORKERS,
                    f"No worker has brought the model's tokenizer within {wait_s:.0f} s.",
                ) from None
        if self._stack is None:
            raise AssertionError("a stack came and went")
        return self._stack

    async def settled(self) -> None:
        """Returns once every bundle that has come is built, or found unusable."""
        if self._building is not None:
            await asyncio.shield(self._building)

    async def close(self) -> None:
        if self._building is not None:
            self._building.cancel()
            await asyncio.gather(self._building, return_exceptions=True)
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.side_pool.shutdown(wait=False, cancel_futures=True)

    def _bundle_came(self, bundle: Bundle) -> None:
        self._wanted = bundle
        if self._building is None:
            self._building = asyncio.get_running_loop().create_task(self._build())

    async def _build(self) -> None:
        """Builds what is wanted, and again if another came meanwhile."""
        loop = asyncio.get_running_loop()
        try:
            while self._wanted is not None:
                bundle, self._wanted = self._wanted, None
                try:
                    self._stack = await loop.run_in_executor(self.pool, TextStack, bundle)
                except Exception:
                    # Nothing of ours can mend a model's files; the ones before stay in use.
                    log.exception("bundle=%s unusable", bundle.bundle_hash)
                    continue
                self._came.set()
                log.info("bundle=%s vocab=%d", bundle.bundle_hash, self._stack.vocab_size)
        finally:
            self._building = None
