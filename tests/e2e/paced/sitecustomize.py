"""Python imports this first in workers that have this folder on their path (`test_scaling.py`,
`test_pulls.py`): their steps then take as long as those of an engine whose speed is known,
whatever else the machine does. PD_TEST_PACE: seconds of a step, of a sequence in it, of a
prompt's token.
"""

import os
import time
from typing import Any

from pd_engine.runner import Runner

STEP_S, SEQUENCE_S, TOKEN_S = map(float, os.environ["PD_TEST_PACE"].split(","))
_step = Runner.step


def step(self: Any, batch: Any, on_layers: Any = None) -> Any:
    """As the engine computes it, then the rest of the time."""
    began = time.monotonic()
    output = _step(self, batch, on_layers)
    sequences = sum(row.decodes for row in batch.rows)
    tokens = sum(len(row.token_ids) for row in batch.rows if not row.decodes)
    takes_s = STEP_S + SEQUENCE_S * sequences + TOKEN_S * tokens
    time.sleep(max(began + takes_s - time.monotonic(), 0.0))
    return output


Runner.step = step
