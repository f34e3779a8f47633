"""What a request needs before it can be queued, and may have to wait for: the guide of its
grammar, and KV that was moved out of the pool."""

import logging
from dataclasses import dataclass
from typing import Protocol

from pd_core.failures import FailureKind, RequestFailure
from pd_engine.archive import Archive, Refill
from pd_engine.types import Guide, Request

log = logging.getLogger("pd_engine.intake")


class Guides(Protocol):
    """What it needs of `guide.Guides`."""

    def known(self, grammar: str) -> Guide | None: ...

    async def make(self, grammar: str) -> Guide: ...


@dataclass(slots=True)
class Needs:
    """Of one request. It can be queued at once unless it `waits`."""

    request: Request
    hashes: tuple[bytes, ...] = ()
    refill: Refill | None = None
    guide: Guide | None = None
    to_compile: bool = False

    @property
    def waits(self) -> bool:
        return self.refill is not None or self.to_compile


class Intake:
    """`archive` is None where nothing is kept beyond the pool, `guides` where no request may
    have a grammar."""

    def __init__(self) -> None:
        self.archive: Archive | None = None
        self.guides: Guides | None = None

    def needs(self, request: Request) -> Needs:
        """Call `repay` in the end if it `waits`."""
        found = Needs(request)
        if self.archive is not None:
            found.hashes = self.archive.hashes(request)
            found.refill = self.archive.find(
                found.hashes, len(request.token_ids), request.request_id
            )
        if request.sampling.grammar and self.guides is not None:
            found.guide = self.guides.known(request.sampling.grammar)
            found.to_compile = found.guide is None
        return found

    async def fulfil(self, needs: Needs) -> None:
        """RequestFailure when its grammar is of no use, or by a mistake of ours. KV that can't
        be had is computed."""
        try:
            if needs.to_compile and self.guides is not None:
                needs.guide = await self.guides.make(needs.request.sampling.grammar)
            if needs.refill is not None and self.archive is not None:
                await self.archive.bring(needs.refill)
        except RequestFailure:
            raise
        except Exception as error:
            log.exception("request=%s couldn't be prepared", needs.request.request_id)
            message = f"{type(error).__name__}: {error}"
            raise RequestFailure(FailureKind.INTERNAL, message) from error

    def repay(self, needs: Needs) -> None:
        """Gives back what the refill has borrowed; the pool has its KV by now, or never."""
        if needs.refill is not None and self.archive is not None:
            self.archive.repay(needs.refill)
