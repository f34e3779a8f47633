"""PURE. What the operator calls a PDCluster by."""

from typing import NamedTuple


class Key(NamedTuple):
    """A PDCluster."""

    namespace: str
    name: str
