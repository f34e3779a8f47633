"""PURE. Chance that is the same each time: splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""

import math

_MASK = (1 << 64) - 1


class Chance:
    """Numbers from a seed."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def uniform(self) -> float:
        """In [0, 1)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        value = self._state
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((value ^ (value >> 31)) >> 11) / (1 << 53)

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1 - self.uniform())

    def whole(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return low + int(self.uniform() * (high - low + 1))
