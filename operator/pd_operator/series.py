"""PURE. One metric of many PDClusters, written as Prometheus reads it.

With a thousand PDClusters there are tens of thousands of series, and the client library takes
a second to write so many: the operator's loop would stand still at each scrape. Here a line's
beginning is made once, when its series begins, and all of a PDCluster's end with it.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from pd_operator.keys import Key

# Whose a series is. Not `namespace`: scraping gives that name to the operator's own.
OF = ("pdcluster_namespace", "pdcluster")
Kind = Literal["counter", "gauge"]


class Series:
    """`labels` are those beyond the PDCluster's. Their values, and PDClusters' names, are such
    that nothing of them needs to be escaped."""

    def __init__(self, name: str, kind: Kind, text: str, labels: Iterable[str]) -> None:
        self.name = name
        self.kind = kind
        self.text = text
        self.labels = (*OF, *labels)
        self._full = f"{name}_total" if kind == "counter" else name
        self._known: dict[Key, dict[tuple[str, ...], tuple[str, float]]] = {}

    def start(self, key: Key, *values: str) -> None:
        """The series is there from now on, with 0 if it wasn't."""
        self.add(key, *values, amount=0)

    def add(self, key: Key, *values: str, amount: float = 1) -> None:
        self._put(key, values, self._value(key, values) + amount)

    def set(self, key: Key, *values: str, to: float) -> None:
        self._put(key, values, to)

    def of(self, key: Key) -> list[tuple[str, ...]]:
        """The values of the labels that a PDCluster has series of."""
        return list(self._known.get(key, ()))

    def end(self, key: Key, *values: str) -> None:
        """The series that begin with these values are no more; with none, all of a PDCluster."""
        kept = {
            one: line
            for one, line in self._known.pop(key, {}).items()
            if one[: len(values)] != values
        }
        if kept:
            self._known[key] = kept

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self._full} {self.text}\n# TYPE {self._full} {self.kind}\n"
        for series in self._known.values():
            for begin, value in series.values():
                yield f"{begin}{value!r}\n"

    def _value(self, key: Key, values: tuple[str, ...]) -> float:
        return self._known.get(key, {}).get(values, ("", 0.0))[1]

    def _put(self, key: Key, values: tuple[str, ...], value: float) -> None:
        series = self._known.setdefault(key, {})
        known = series.get(values)
        series[values] = (known[0] if known else self._begin(key, values), value)

    def _begin(self, key: Key, values: tuple[str, ...]) -> str:
        pairs = zip(self.labels, (*key, *values), strict=True)
        labels = ",".join(f'{name}="{one}"' for name, one in pairs)
        return f"{self._full}{{{labels}}} "
