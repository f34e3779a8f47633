"""Alerts of a PDCluster on the real cluster, looked at all the time, and whether they told the
truth about what clients saw."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import table
from e2e import prometheus, truth
from e2e.prometheus import SPEED
from e2e.site import Site
from e2e.truth import Rule, Seen
from tests.prometheus import Prometheus

_LOOK_S = 1.0
_SLACK_S = 20.0
"""For an answer to end, be counted, scraped and looked at, on a busy machine."""
_FAST = ((3600.0 / SPEED, 300.0 / SPEED), (21600.0 / SPEED, 1800.0 / SPEED))
_BURN_S, _FAIL_S = 120.0 / SPEED, 600.0 / SPEED


def rules(ttft_s: float, tpot_s: float, budget: float) -> list[Rule]:
    """As `pd_operator.alerts` makes them, in the times of `e2e.prometheus`."""
    limit = min(6.0 * budget, (1 + budget) / 2)
    return [
        Rule("PDClusterTTFTBurnsFast", "ttft", limit, _FAST, _BURN_S, ttft_s),
        Rule("PDClusterTPOTBurnsFast", "tpot", limit, _FAST, _BURN_S, tpot_s),
        Rule("PDClusterRequestsFail", "error", 0.05, (_FAST[0][1:] * 2,), _FAIL_S),
    ]


@dataclass
class Watch:
    """What fired, look by look. Where Prometheus can't be asked, nothing is said."""

    site: Site
    namespace: str
    folder: Path
    found: Prometheus
    fired: list[tuple[float, frozenset[str]]] = field(default_factory=list)

    def follow(self) -> None:
        """After pods have changed."""
        prometheus.follow(self.site, self.namespace, self.folder)

    def look(self) -> None:
        try:
            names = frozenset(self.found.firing())
        except (OSError, LookupError):
            return
        self.fired.append((time.monotonic(), names))

    def told(
        self, rules: Sequence[Rule], seen: Sequence[Seen]
    ) -> Mapping[str, tuple[int, list[float], list[float]]]:
        return truth.told(rules, seen, self.fired, _SLACK_S)


def shown(told: Mapping[str, tuple[int, list[float], list[float]]]) -> str:
    rows = [(name, fired, len(a), len(b)) for name, (fired, a, b) in told.items()]
    return table(("alert", "looks that saw it", "false", "missing"), rows)


@contextmanager
def watching(site: Site, namespace: str, folder: Path) -> Iterator[Watch]:
    """Looks once a second, in a thread, until the block ends."""
    over = threading.Event()
    with prometheus.watching(site, namespace, folder) as found:
        made = Watch(site, namespace, folder, found)

        def looks() -> None:
            while not over.wait(_LOOK_S):
                made.look()

        thread = threading.Thread(target=looks, name="alerts")
        thread.start()
        try:
            yield made
        finally:
            over.set()
            thread.join()
