"""PURE. One request on its way through the simulated cluster."""

from pd_router.policy import Exclusions, Need
from pd_router.prefixes import PromptHashes
from pd_sim.trace import Request


class Prompt(PromptHashes):
    """A prompt of which the trace tells the blocks' hashes, not the tokens."""

    def __init__(self, tokens: int, blocks: tuple[bytes, ...]) -> None:
        super().__init__(())
        self._tokens = tokens
        self.blocks = blocks

    def __len__(self) -> int:
        return self._tokens

    def at(self, block_tokens: int, block: int) -> bytes | None:
        del block_tokens
        return self.blocks[block] if block < len(self.blocks) else None


class Job:
    """A request and what has become of it. Times are simulated seconds; -1: not yet."""

    __slots__ = (
        "admitted_s", "arrived_s", "attempt", "blocks", "compute_tokens", "decode", "done_s",
        "emitted", "end_step", "exclusions", "first_s", "granted_s", "key", "output",
        "placed_s", "prefill", "prompt", "prompt_began_s", "reserved", "start_step", "tokens",
    )  # fmt: skip

    def __init__(self, key: str, request: Request) -> None:
        self.key = key
        self.prompt = Prompt(request.prompt_tokens, request.blocks)
        self.output = request.output_tokens
        self.arrived_s = request.at_s
        self.admitted_s = self.placed_s = self.granted_s = self.prompt_began_s = -1.0
        self.first_s = self.done_s = -1.0
        self.tokens = request.prompt_tokens  # to hold when an attempt begins
        self.emitted = 0  # tokens out before this attempt
        self.attempt = 0
        self.blocks = 0  # of the decode worker, as the policy counts them
        self.compute_tokens = 0
        self.reserved = 0  # KV tokens on the decode worker
        self.start_step = self.end_step = 0.0
        self.decode: object = None
        self.prefill: object = None
        self.exclusions = Exclusions()

    @property
    def need(self) -> Need:
        return Need(self.tokens, self.left)

    @property
    def left(self) -> int:
        """Tokens still to come."""
        return self.output - self.emitted

    def again(self, emitted: int) -> None:
        """What it had is lost; the tokens that are out stay out."""
        self.attempt += 1
        self.emitted = emitted
        self.tokens = len(self.prompt) + emitted
        self.reserved = 0
        self.decode = self.prefill = None
        self.granted_s = self.prompt_began_s = -1.0
