"""How far a worker is with its model: told by who loads it, asked by probes meanwhile. Pure."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total); the total is 0 where nobody knows it."""


def unheard(what: str, done: int, total: int) -> None:
    """For who loads a model and has nobody to tell."""
    del what, done, total


class Loading:
    """The last report. One thread writes it, another reads it."""

    def __init__(self) -> None:
        self._last = ("libraries", 0, 0)

    def report(self, what: str, done: int, total: int) -> None:
        self._last = (what, done, total)

    def __str__(self) -> str:
        """As `pdcluster up` reads it (pd_cli.console)."""
        what, done, total = self._last
        counted = f", {done} of {total}" if total else ""
        return f"loading the model: {what}{counted}"
