"""What a world is like, drawn from its seed."""

from dataclasses import dataclass, field
from random import Random

from pd_core.kv import prefix_hashes
from pd_router.types import GenerateRequest, Sampling
from tests.simulation.model import LAYOUT, VOCAB, fingerprints, reference

_ALPHABET = 50  # few tokens: prompts share prefixes only where they are meant to


@dataclass(frozen=True)
class Ask:
    """A client's request: when it comes, when the client leaves, what must come out."""

    request: GenerateRequest
    at_s: float
    leaves_s: float | None
    expected: tuple[tuple[int, ...], ...]  # by choice


@dataclass(frozen=True)
class Upset:
    """Something happens to a process: `crash`, `vanish` (nobody is told), `pause`, `cut` (of
    one gRPC stream), `fail` (one step), `drain`."""

    at_s: float
    what: str
    host: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    seed: int
    faults: bool
    prefills: int
    decodes: int
    boths: int
    blocks: dict[str, int] = field(default_factory=dict)  # by role
    block_tokens: dict[str, int] = field(default_factory=dict)  # likewise
    chunk_tokens: int = 0
    max_running: int = 8
    frame_bytes: int = 128
    slow_steps: bool = False
    draft_tokens: int = 0
    kv_fault_rate: float = 0.0
    rpc_fault_rate: float = 0.0
    asks: tuple[Ask, ...] = ()
    upsets: tuple[Upset, ...] = ()
    pulls: bool = False  # whatever a worker lacks of a prompt is copied from one that has it
    taken_over: bool = False  # and decode workers compute prompts themselves

    @property
    def hosts(self) -> dict[str, str]:
        """Workers by name, with their roles."""
        return {
            **{f"p-{i}": "prefill" for i in range(self.prefills)},
            **{f"d-{i}": "decode" for i in range(self.decodes)},
            **{f"b-{i}": "both" for i in range(self.boths)},
        }

    def describe(self) -> str:
        pools = ", ".join(
            f"{role} {blocks} blocks of {self.block_tokens[role]}"
            for role, blocks in self.blocks.items()
        )
        return (
            f"seed {self.seed}: {self.prefills} prefill, {self.decodes} decode, {self.boths} both "
            f"({pools}; chunks of {self.chunk_tokens}, frames of {self.frame_bytes} B, "
            f"{self.draft_tokens} guesses a step); "
            f"{len(self.asks)} requests; faults {self.kv_fault_rate:g} a KV frame, "
            f"{self.rpc_fault_rate:g} a message, {len(self.upsets)} upsets"
            f"{'; prefixes are copied' if self.pulls else ''}"
            f"{', also between decode workers' if self.taken_over else ''}"
        )


def blocks_by_hash(made: Plan, block_tokens: int) -> dict[bytes, list[int]]:
    """What each whole block of its conversations holds."""
    found: dict[bytes, list[int]] = {}
    for ask in made.asks:
        for said in ask.expected:
            tokens = (*ask.request.token_ids, *said)
            prints = fingerprints(tokens)
            names = prefix_hashes(tokens, block_tokens, ask.request.cache_salt)
            for number, name in enumerate(names):
                found[name] = prints[number * block_tokens : (number + 1) * block_tokens]
    return found


def plan(seed: int) -> Plan:
    random = Random(seed)
    faults = random.random() < 0.85
    prefills, decodes = random.choice(((1, 1), (1, 2), (2, 1), (2, 2), (3, 2)))
    boths = int(random.random() < 0.15)
    asks = tuple(_asks(random))
    pulls, taken_over = seed % 3 == 1, seed % 9 == 4
    if taken_over:
        decodes = 2
    if pulls:
        asks = _with_next_turns(Random(seed ^ 0x70), asks, named=taken_over)
    block_tokens = dict.fromkeys(("prefill", "decode", "both"), LAYOUT.block_tokens)
    if seed % 5 == 2:  # hand-overs are converted
        block_tokens |= {"prefill": random.choice((2, 3, 4, 8)), "decode": random.choice((3, 8))}
    longest = max(len(ask.request.token_ids) for ask in asks)
    room = {
        "prefill": _pool(random, -(-longest // block_tokens["prefill"])),
        "decode": _pool(random, max(_blocks(ask, block_tokens["decode"]) for ask in asks)),
        "both": _pool(random, max(_blocks(ask, block_tokens["both"]) for ask in asks)),
    }
    made = Plan(
        seed=seed,
        faults=faults,
        prefills=prefills,
        decodes=decodes,
        boths=boths,
        blocks=room,
        block_tokens=block_tokens,
        chunk_tokens=random.choice((0, 3, 4, 7, 16)),
        max_running=random.choice((3, 8)),
        frame_bytes=random.choice((1, 64, 128, 1024)),
        slow_steps=random.random() < 0.3,
        draft_tokens=3 if seed % 4 == 3 else 0,
        kv_fault_rate=random.choice((0.0, 0.03, 0.15, 0.5)) if faults else 0.0,
        rpc_fault_rate=random.choice((0.0, 0.0, 0.05, 0.25)) if faults else 0.0,
        asks=asks,
        pulls=pulls,
        taken_over=taken_over,
    )
    if not faults:
        return made
    hosts = (*made.hosts, "router")
    count = random.choice((0, 0, 1, 2, 4))
    upsets = tuple(_upset(random, hosts, asks) for _ in range(count))
    return Plan(**{**made.__dict__, "upsets": upsets})


def _pool(random: Random, least: int) -> int:
    """Often just enough for one request."""
    return least if random.random() < 0.4 else least + random.randrange(1, 4 * least)


def _blocks(ask: Ask, block_tokens: int) -> int:
    """All that one request may hold at its end."""
    tokens = len(ask.request.token_ids) + ask.request.sampling.max_tokens
    return -(-tokens // block_tokens) * ask.request.choices + 1


def _asks(random: Random) -> list[Ask]:
    common = tuple(random.randrange(_ALPHABET) for _ in range(30))
    return [_ask(random, number, common) for number in range(random.choice((1, 2, 3, 5, 8)))]


def _with_next_turns(random: Random, asks: tuple[Ask, ...], named: bool) -> tuple[Ask, ...]:
    """Most conversations go on, when routers may have heard of what workers keep of them.
    `named`: they have a session by then, whose worker needn't be the one that knows them."""
    more: list[Ask] = []
    for ask in asks[:3]:  # a world that is too full says little
        old = ask.request
        said = ask.expected[0]
        if random.random() < 0.2 or len(old.token_ids) + len(said) > 60:
            continue
        own = tuple(random.randrange(_ALPHABET, VOCAB - 2) for _ in range(random.choice((1, 4, 9))))
        prompt = (*old.token_ids, *said, *own)
        request = GenerateRequest(
            request_id=f"{old.request_id}b",
            token_ids=prompt,
            choices=1,
            sampling=Sampling(max_tokens=5, temperature=0.0),
            deadline_s=12.0,
            cache_salt=old.cache_salt,
            session=old.request_id.encode() if named else b"",
        )
        at_s = ask.at_s + random.choice((0.5, 1.2, 2.5)) + random.random()
        more.append(Ask(request, at_s, None, (reference(prompt, 5, 0),)))
    return (*asks, *more)


def _ask(random: Random, number: int, common: tuple[int, ...]) -> Ask:
    shared = random.choice((0, 0, 4, 8, 12, 16)) if random.random() < 0.6 else 0
    own = random.choice((1, 3, 4, 5, 8, 13, 20)) if random.random() < 0.9 or not shared else 0
    prompt = (*common[:shared], *(random.randrange(_ALPHABET, VOCAB - 2) for _ in range(own)))
    choices = random.choice((1, 1, 1, 2, 3))
    leaves = random.random() < 0.15
    max_tokens = 40 if leaves else random.choice((1, 1, 2, 3, 5, 9))
    expected, stops = _expected(random, prompt, choices, max_tokens)
    request = GenerateRequest(
        request_id=f"r{number}",
        token_ids=prompt,
        choices=choices,
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stops),
        deadline_s=random.choice((1.5, 12.0, 20.0)),
        priority=random.choice((0, 0, 0, 1)),
        cache_salt=random.choice((b"", b"", b"tenant")),
    )
    at_s = random.uniform(0.5, 3.0)
    leaves_s = at_s + random.choice((0.02, 0.1, 0.3, 2.0)) * random.random() if leaves else None
    return Ask(request, at_s, leaves_s, expected)


def _expected(
    random: Random, prompt: tuple[int, ...], choices: int, max_tokens: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Each choice's right tokens, and the tokens that stop one of them early."""
    whole = [reference(prompt, max_tokens, choice) for choice in range(choices)]
    stops: tuple[int, ...] = ()
    if random.random() < 0.3:
        stops = (random.choice(whole[random.randrange(choices)]),)
    return tuple(_until(tokens, stops) for tokens in whole), stops


def _until(tokens: tuple[int, ...], stops: tuple[int, ...]) -> tuple[int, ...]:
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1]
    return tokens


def _upset(random: Random, hosts: tuple[str, ...], asks: tuple[Ask, ...]) -> Upset:
    what = random.choice(("crash", "crash", "vanish", "pause", "pause", "cut", "fail", "drain"))
    host = random.choice(hosts)
    if host == "router" and what in ("fail", "drain"):
        what = "cut"
    seconds = random.uniform(0.0, 0.1) if random.random() < 0.3 else random.uniform(0.1, 8.0)
    at_s = random.uniform(0.6, 4.0)
    if random.random() < 0.6:  # in the midst of a request
        at_s = random.choice(asks).at_s + random.uniform(0.0, 0.15)
    return Upset(at_s, what, host, seconds)
