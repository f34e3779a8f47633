"""A day made of an hour's trace: its requests over and over, thinned by day and night.

The share that stays follows a cosine from 25% at 4 o'clock to 100% at 16, and five bursts a
day let all requests through for ten minutes, at hours that a seed draws.
"""

import math
from dataclasses import replace

from pd_sim.chance import Chance
from pd_sim.trace import Request, Trace

DAY_S = 86_400.0
SEED = 8
_NIGHT = 0.25
_BURSTS = 5
_BURST_S = 600.0


def day(hour: Trace, seed: int = SEED) -> Trace:
    chance = Chance(seed)
    bursts = [chance.uniform() * DAY_S for _ in range(_BURSTS)]
    made: list[Request] = []
    for turn in range(math.ceil(DAY_S / max(hour.seconds, 1.0))):
        begin_s, mark = turn * hour.seconds, bytes([turn % 256])
        for one in hour.requests:
            at_s = begin_s + one.at_s
            if at_s < DAY_S and chance.uniform() < _share(at_s, bursts):
                blocks = tuple(block + mark for block in one.blocks)
                made.append(Request(at_s, one.prompt_tokens, one.output_tokens, blocks))
    return replace(hour, requests=tuple(made))


def _share(at_s: float, bursts: list[float]) -> float:
    if any(begin <= at_s < begin + _BURST_S for begin in bursts):
        return 1.0
    wave = (1 + math.cos(2 * math.pi * (at_s / 3600 - 16) / 24)) / 2
    return _NIGHT + (1 - _NIGHT) * wave
