"""What the scheduler keeps of a request: a Task, with a Sequence for each chain of tokens. Pure."""

from dataclasses import dataclass, field, replace
from enum import Enum

from pd_core.failures import Failure, FailureKind
from pd_core.kv import next_prefix_hash, prefix_root
from pd_engine.speculate import Drafter, Try
from pd_engine.types import Finish, Guide, Mode, Request, Row, Sampled, SampleSpec, TokenOut

Rank = tuple[int, int, int]
"""(-priority, arrival, place among the choices): whose blocks are whose, when they are few."""
Turn = tuple[int, float, int, int]
"""(-priority, due, arrival, place): the smaller one is admitted and prefilled first."""


class Stage(Enum):
    WAITING = "waiting"  # holds nothing, has never been admitted
    GRANTED = "granted"  # an IMPORT whose blocks are set aside while its KV is on the way
    ADMITTED = "admitted"  # its sequences run, or wait to run again after a preemption
    OVER = "over"


@dataclass(slots=True, eq=False)
class Task:
    """One request. `limit` is the most tokens (prompt and output) that a sequence may reach."""

    req: Request
    added: float
    limit: int
    due: float  # shorter prompts that come later go first as long as they are due earlier
    stage: Stage = Stage.WAITING
    admitted: float = 0.0
    cached_tokens: int = 0  # of the prompt, found in the cache when it was admitted
    prefilled: bool = False  # token 0 of each choice is drawn
    prefix_blocks: int = 0  # an IMPORT's leading blocks that this worker had
    sequences: list["Sequence"] = field(default_factory=list)  # those that haven't ended
    final_tokens: int = field(init=False)  # of a sequence that nothing stops early

    def __post_init__(self) -> None:
        req = self.req
        self.final_tokens = min(req.prompt_tokens + req.sampling.max_tokens, self.limit)

    @property
    def exports(self) -> bool:
        return self.req.mode is Mode.EXPORT

    def token_out(self, choice: int, length: int, drawn: Sampled) -> TokenOut:
        """A drawn token as it leaves, which makes its sequence `length` tokens long."""
        index = length - 1 - self.req.prompt_tokens
        finish = self._finish(index, length, drawn.token)
        return TokenOut(choice, index, drawn.token, finish, drawn.logprob, drawn.top)

    def wrong_first_tokens(self, first: tuple[TokenOut, ...]) -> Failure | None:
        """Why an IMPORT can't go on behind these tokens, or None."""
        if tuple(out.choice for out in first) != self.req.choices or any(
            out.index != self.req.first_index for out in first
        ):
            wanted = f"index {self.req.first_index} of choices {self.req.choices}"
            return Failure(FailureKind.TRANSFER_FAILED, f"expected {wanted}, got {first}")
        length = len(self.req.token_ids) + 1
        if length >= self.final_tokens and any(out.finish is None for out in first):
            message = f"{length} tokens fill this worker's limit of {self.final_tokens}"
            return Failure(FailureKind.CONTEXT_TOO_LONG, message)
        return None

    def _finish(self, index: int, length: int, token: int) -> Finish | None:
        sampling = self.req.sampling
        if (
            token in sampling.stop_token_ids
            and not sampling.ignore_eos
            and index >= sampling.min_tokens
        ):
            return Finish.STOP
        return Finish.LENGTH if length >= self.final_tokens else None


def seen_tokens(req: Request) -> dict[int, int] | None:
    """`Sequence.seen` of a request as it comes: tokens behind the client's prompt were
    generated, wherever that was."""
    if not req.sampling.penalizes:
        return None
    seen = dict.fromkeys(req.token_ids[: req.prompt_tokens], 0)
    for token in req.token_ids[req.prompt_tokens :]:
        seen[token] = seen.get(token, 0) + 1
    return seen


@dataclass(slots=True, eq=False)
class Sequence:
    """One chain of tokens and the blocks with its KV.

    All choices of a request are one sequence until their first tokens are drawn. `table`
    holds the KV of positions below `computed`, and room for what is computed next; `spare`
    are blocks that are reserved for later positions.
    """

    id: int
    task: Task
    rank: Rank
    choices: tuple[int, ...]
    tokens: list[int]
    seen: dict[int, int] | None = None  # where the sampling penalizes: see SampleSpec
    hashes: list[bytes] = field(default_factory=list)  # of the first whole blocks of `tokens`
    table: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    computed: int = 0
    registered: int = 0  # blocks of the table that the prefix cache knows
    stalled: bool = False  # it found no block for its next token
    drafter: Drafter | None = None
    guide: Guide | None = None

    @property
    def turn(self) -> Turn:
        priority, arrival, place = self.rank
        return priority, self.task.due, arrival, place

    @property
    def pending(self) -> int:
        """Tokens whose KV isn't computed; 1 means that it decodes."""
        return len(self.tokens) - self.computed

    @property
    def slots(self) -> int:
        """Rows that it takes, or will take, in a step."""
        return 1 if self.task.exports else len(self.choices)

    @property
    def awaits_grant(self) -> bool:
        return self.task.stage is Stage.WAITING and self.task.req.mode is Mode.IMPORT

    def append(self, token: int) -> None:
        """A token was generated, and more follow."""
        self.tokens.append(token)
        if self.seen is not None:
            self.seen[token] = self.seen.get(token, 0) + 1
        if self.drafter is not None:
            self.drafter.note()
        if self.guide is not None:
            self.guide.note(token)

    def outgrows(self, block_tokens: int) -> bool:
        """It will need another block than those it has, if nothing stops it early."""
        if self.spare or self.task.exports:
            return False
        return len(self.table) * block_tokens < self.task.final_tokens - 1

    def hash_blocks(self, count: int, block_tokens: int) -> list[bytes]:
        """Chained hashes of the first `count` whole blocks; each is computed once."""
        hashes = self.hashes
        while len(hashes) < count:
            parent = hashes[-1] if hashes else prefix_root(self.task.req.cache_salt)
            start = len(hashes) * block_tokens
            hashes.append(next_prefix_hash(parent, self.tokens[start : start + block_tokens]))
        return hashes[:count]

    def row(self, count: int, tried: Try) -> Row:
        """Its next `count` tokens, with draws when they are the last ones, and behind each
        of the guesses that are tried too.

        The row refers to the table and the tokens themselves: nothing changes those while a
        step runs.
        """
        start, end = self.computed, self.computed + count
        tokens = self.tokens[start:end]
        samples: list[SampleSpec] = []
        if end == len(self.tokens):
            sampling, seen, guide = self.task.req.sampling, self.seen, self.guide
            index = end - self.task.req.prompt_tokens
            samples = [SampleSpec(choice, index, sampling, seen, guide) for choice in self.choices]
            for guess in tried.guesses:
                tokens.append(guess)
                index += 1
                if seen is not None:
                    seen = {**seen, guess: seen.get(guess, 0) + 1}
                ahead = tuple(tokens[count:]) if guide is not None else ()
                choice = self.choices[0]
                samples.append(SampleSpec(choice, index, sampling, seen, guide, ahead))
        row = Row(self.id, tokens, start, self.table, tuple(samples), len(tokens) - count)
        if tried.proposals:
            row = replace(row, proposals=tried.proposals, text=self.tokens)
        return row

    def fork(self, number: int, place: int, first: TokenOut) -> "Sequence":
        """The sequence of one choice after its first token. The caller shares the blocks."""
        priority, arrival, _ = self.rank
        made = Sequence(
            id=number,
            task=self.task,
            rank=(priority, arrival, place),
            choices=(first.choice,),
            tokens=self.tokens.copy(),
            seen=None if self.seen is None else self.seen.copy(),
            guide=None if self.guide is None else self.guide.fork(),
            hashes=self.hashes.copy(),
            table=self.table.copy(),
            computed=self.computed,
            registered=self.registered,
        )
        made.append(first.token)
        return made

    def forget(self) -> None:
        """Its blocks are gone: all is to be computed again. Rows in flight keep their table."""
        self.table, self.spare = [], []
        self.computed = self.registered = 0
        self.stalled = False
