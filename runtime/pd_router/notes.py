"""What a walk writes into its request's timeline. Pure."""

from pd_router.legs import Leg
from pd_router.moves import Committed, Prefilled
from pd_router.policy import Placement
from pd_router.types import Timeline


class Notes:
    """See the module."""

    def __init__(self, timeline: Timeline) -> None:
        self._line = timeline
        self._counted_cached = False

    def placed(self, leg: Leg, placement: Placement) -> None:
        """Of several attempts the last one counts; of two at once the one that wins."""
        line = self._line
        line.decode_worker = placement.decode.name
        line.prefill_worker = (placement.prefill or placement.decode).name
        line.reason = placement.reason
        line.considered = placement.considered
        if leg.failure is not None:
            line.reason += f"; attempt {leg.attempt} after {leg.failure.kind}"

    def hedged(self, winner: Leg, loser: Leg) -> None:
        """Two prefills ran, and it is decided whose answer goes out."""
        if winner.placement is not None:
            self.placed(winner, winner.placement)
        hedge, first = (winner, loser) if winner.hedges else (loser, winner)
        names = [one.prefill_at.name if one.prefill_at else "nobody" for one in (hedge, first)]
        self._line.reason += (
            f"; {names[0]} computed it too from {hedge.began - first.asked:.3f} s on, "
            f"{'ahead of' if winner.hedges else 'behind'} {names[1]}"
        )

    def prefilled(self, event: Prefilled, *, from_prefill: bool) -> None:
        line = self._line
        line.prefill_queue_s += event.queue_s
        line.prefill_s += event.prefill_s
        if from_prefill:
            line.transport = event.transport or line.transport
        self._cached(event.cached_tokens)

    def committed(self, leg: Leg, event: Committed, now: float) -> None:
        line = self._line
        line.kv_bytes += event.kv_bytes
        line.transfer_s += event.transfer_s
        line.transport = event.transport or line.transport
        if leg.prefilled is not None:
            line.exposed_s += now - leg.prefilled
        self._cached(event.cached_tokens)

    def _cached(self, cached_tokens: int) -> None:
        """The first attempt's count: a resumed one has the client's own output cached too."""
        if not self._counted_cached:
            self._counted_cached = True
            self._line.cached_tokens = min(cached_tokens, self._line.prompt_tokens)
