"""Which tokens a step tries beyond those that are due, and which guesses it asks for. Pure."""

from collections.abc import Callable

from pd_engine.limits import SchedulerConfig
from pd_engine.sequence import Sequence, Stage
from pd_engine.speculate import Try


def plan_tries(
    cfg: SchedulerConfig, decoding: list[Sequence], room: Callable[[Sequence, int], int]
) -> dict[int, Try]:
    """By sequence, where it has room that nobody needs: of the step's tokens that decoding
    leaves, half is for prompts. `room` makes it for so many tokens behind the next one, or
    for as many as there is.
    """
    tries: dict[int, Try] = {}
    left = (cfg.max_batch_tokens - len(decoding)) // 2
    for seq in decoding:
        if seq.drafter is None or seq.task.stage is Stage.OVER:
            continue
        until_end = seq.task.final_tokens - len(seq.tokens) - 1
        most = min(cfg.draft_tokens, left, until_end)
        price = cfg.draft_price + cfg.draft_price_per_token * len(seq.tokens)
        guesses = seq.drafter.draft(most, len(decoding), price)
        most = min(cfg.draft_tokens, until_end - 1)
        proposals = seq.drafter.wants(most, len(decoding), price)
        found = room(seq, len(guesses) + proposals)
        guesses = guesses[:found]
        proposals = max(0, min(proposals, found - len(guesses)))
        if guesses or proposals:
            tries[seq.id] = Try(tuple(guesses), proposals)
            left -= len(guesses)
    return tries
