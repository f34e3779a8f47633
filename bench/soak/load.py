"""Users who ask without a pause, and a tally of what they got."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.soak.cases import Case, Failed, Wrong
from bench.soak.client import Broken, Client

_MOST_NOTES = 20
_LEAVES_AFTER_S = 0.06
_AFTER_A_FAILURE_S = 0.2


@dataclass(slots=True)
class Tally:
    """How requests ended. Each counts once."""

    right: int = 0
    wrong: int = 0
    failed: int = 0
    left: int = 0  # by clients that hung up before the answer
    notes: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        return self.right + self.wrong + self.failed + self.left

    def note(self, what: object) -> None:
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(f"{type(what).__name__}: {what}"[:600])


@dataclass(frozen=True, slots=True)
class Mix:
    """How often a kind of request is drawn; `leaving` of them, the client hangs up."""

    weights: Mapping[str, float]
    leaving: float = 0.0


class User:
    """Draws a request, asks, judges the answer, again and again."""

    def __init__(
        self, number: int, port: int, mix: Mix, cases: Mapping[str, Sequence[Case]], tally: Tally
    ) -> None:
        self._chance = random.Random(number)
        self._client = Client("127.0.0.1", port)
        self._mix = mix
        self._kinds = list(mix.weights)
        self._weights = list(mix.weights.values())
        self._cases = cases
        self._tally = tally

    async def run(self, over: asyncio.Event) -> None:
        try:
            while not over.is_set():
                [kind] = self._chance.choices(self._kinds, self._weights)
                self._tally.kinds[kind] += 1
                case = self._chance.choice(self._cases[kind])
                if self._chance.random() < self._mix.leaving:
                    await self._leave(case)
                else:
                    await self._ask(case)
        finally:
            self._client.hang_up()

    async def _ask(self, case: Case) -> None:
        tally = self._tally
        try:
            case.judge(await self._client.ask(case.request))
        except Wrong as wrong:
            tally.wrong += 1
            tally.note(wrong)
        except (Failed, Broken, OSError, ValueError) as failure:
            tally.failed += 1
            tally.note(failure)
            await asyncio.sleep(_AFTER_A_FAILURE_S)
        else:
            tally.right += 1

    async def _leave(self, case: Case) -> None:
        """Hangs up at any stage of it, or before the request is whole."""
        try:
            if self._chance.random() < 0.1:
                await self._client.write(case.request[: self._chance.randrange(len(case.request))])
            else:
                after_s = self._chance.random() * _LEAVES_AFTER_S
                await self._client.leave(case.request, after_s)
        except (Broken, OSError) as failure:
            self._tally.failed += 1
            self._tally.note(failure)
        else:
            self._tally.left += 1
