"""What sessions tell those who count."""

from typing import Protocol

from pd_core.failures import Failure
from pd_router.types import GenerateRequest, Timeline


class MetricsHooks(Protocol):
    """Told of what timelines alone don't count. Called in the loop; must not raise."""

    def on_arrival(self, request: GenerateRequest) -> None:
        """A request came that could be served, though there may be no room for it."""
        ...

    def on_retry(self, failure: Failure) -> None:
        """An attempt failed and another follows."""
        ...

    def on_hedge(self, *, won: bool) -> None:
        """A prompt was computed twice at once; whether the second prefill was first."""
        ...

    def on_end(self, timeline: Timeline, failure: Failure | None) -> None:
        """A request ended: done (None), failed, or CLIENT_GONE after `cancel`."""
        ...


class NoHooks:
    """Nobody counts."""

    def on_arrival(self, request: GenerateRequest) -> None:
        """Says nothing."""

    def on_retry(self, failure: Failure) -> None:
        """Says nothing."""

    def on_hedge(self, *, won: bool) -> None:
        """Says nothing."""

    def on_end(self, timeline: Timeline, failure: Failure | None) -> None:
        """Says nothing."""
