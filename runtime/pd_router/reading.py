"""How a client reads what is sent to it, by the bytes that haven't reached it yet. Pure."""

LEAST_BYTES = 4 * 1024
"""Less than this in all the time that a client has is next to nothing. Far less than slow
clients read: their systems tell of it in steps of several KiB."""


class Reading:
    """Of one client that is behind. Times in seconds, of any clock."""

    __slots__ = ("_left", "_read", "_started", "moved_at")

    def __init__(self, left: int, now: float) -> None:
        """`left`: the bytes that it hasn't got yet."""
        self.moved_at = now
        self._left = left
        self._started = now
        self._read = 0

    def look(self, left: int, now: float) -> bool:
        """Whether it has read anything since the last look. What was written meanwhile may
        hide that once: nothing is, as a rule, for one that is behind."""
        fell, self._left = self._left - left, left
        if fell <= 0:
            return False
        self.moved_at = now
        self._read += fell
        if self._read >= LEAST_BYTES:
            self._started, self._read = now, 0
        return True

    def gives_up(self, now: float, limit_s: float) -> bool:
        """Whether it has read next to nothing for so long."""
        return now - self._started >= limit_s
