"""Deliberate defects: each makes some world go wrong, so the worlds would notice a real one.

The seeds are those that found a defect when this was written; where a change of the worlds
has made them useless, more are tried.
"""

import pytest

from tests.simulation.batch import failing
from tests.simulation.mutants import MUTANTS, defect

_MORE = 300
KNOWN: dict[str, tuple[int, ...]] = {
    "copy_without_quarantine": (1336, 6316, 7513),
    "ignore_epoch": (618, 1184),
    "no_lease": (349, 446),
    "skip_frame_checksum": (13, 141),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_is_found(name: str) -> None:
    seeds = (*KNOWN.get(name, ()), *range(_MORE))
    with defect(name):
        assert failing(seeds) is not None, f"{name}: {MUTANTS[name].__doc__}"
