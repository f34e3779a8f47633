"""Imports and Exports together over a network that drops, repeats, reorders, misroutes, alters
and cuts, in every interleaving that hypothesis finds: each grant and each export ends exactly
once, nothing is written to a block after its release, blocks have one owner, a commit means
that every byte is the sender's, and after any fault all comes free by time alone."""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pd_core.failures import Failure, FailureKind
from pd_engine import exports as ex
from pd_engine import imports as im
from pd_engine.transfer import (
    AbortHead,
    ExportLimits,
    ImportLimits,
    KvRange,
    PushHead,
    SealHead,
    TransferId,
    Verdict,
)
from pd_engine.types import TokenOut
from tests.pd_engine.transfer_rig import LAYOUT, SLICE, Digest

Key = tuple[int, int]
Cell = tuple[int, int]  # (pool block, layer)
Content = tuple[bytes, int, int]  # whose bytes: (grant, block of the request, layer)

POOL = 12
LEASE_S = 30.0
LONGEST_S = 200.0  # longer than any lease or deadline
FIRST = (TokenOut(0, 0, 5), TokenOut(1, 0, 6))
NOISE: Content = (b"noise", 0, 0)


def checksum(contents: Sequence[Content]) -> int:
    return int.from_bytes(hashlib.sha256(repr(list(contents)).encode()).digest()[:8])


def payload(grant: bytes, r: KvRange) -> list[Content]:
    """Slices in the order of the wire: block after block, in it layer after layer."""
    return [
        (grant, block, layer)
        for block in range(r.block_start, r.block_end)
        for layer in range(r.layer_start, r.layer_end)
    ]


@dataclass
class Message:
    head: PushHead | SealHead | AbortHead
    payload: list[Content] = field(default_factory=list)


@dataclass
class Wire:
    """A connection: messages to D, verdicts to P, what P sends and D receives on it now."""

    key: Key
    out: deque[Message] = field(default_factory=deque)
    back: deque[Verdict] = field(default_factory=deque)
    job: ex.PushJob | ex.SealJob | None = None
    accept: im.Accept | None = None
    todo: deque[tuple[Cell, Content]] = field(default_factory=deque)
    got: list[Content] = field(default_factory=list)
    cut: bool = False  # nothing more can be sent on it
    dismissed: bool = False  # D ends it when its receive has returned
    closed: bool = False  # D has ended it


@dataclass
class Grant:
    """What the test knows of an import; states: open, quarantined, committed, free."""

    secret: bytes
    blocks: tuple[int, ...]
    prefix: int
    tokens: int
    state: str = "open"
    failed: bool = False
    sealed: bool = False
    tainted: bool = False  # a frame of another attempt came for it
    outcome: ex.ExportDone | ex.ExportFailed | None = None


class World:
    """Two state machines, a pool with owners, and the wires between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.imports = im.Imports(LAYOUT, Digest, ImportLimits(lease_s=LEASE_S))
        self.exports = ex.Exports(LAYOUT, Digest, ExportLimits(frame_bytes=7 * SLICE))
        self.free = list(range(POOL))
        self.memory: dict[Cell, Content] = {}
        self.grants: dict[Key, Grant] = {}
        self.wires: list[Wire] = []

    # ---- owners ----------------------------------------------------------------------------

    def open(self, tokens: int, prefix: int) -> Key | None:
        count = LAYOUT.blocks_for(tokens)
        if count > len(self.free):
            return None
        prefix = min(prefix, tokens // LAYOUT.block_tokens)
        key = (0, len(self.grants))
        grant = Grant(
            bytes([len(self.grants) % 256]) * 16, tuple(self.free[:count]), prefix, tokens
        )
        del self.free[:count]
        self.grants[key] = grant
        id = TransferId("r", key[1])
        self.imports.open(
            key,
            grant.secret,
            id,
            block_ids=grant.blocks,
            prefix_blocks=prefix,
            choices=(0, 1),
            token_count=tokens,
            now=self.now,
        )
        opened = self.exports.open(
            key,
            id,
            ex.Target("d:1", "epoch", grant.secret, prefix * LAYOUT.block_tokens),
            block_ids=tuple(range(count)),
            token_count=tokens,
            lease_s=LEASE_S,
            now=self.now,
        )
        self.apply_exports(opened)
        return key

    def progress(self, key: Key, part: float, layers: tuple[int, int]) -> None:
        tokens = round(part * self.grants[key].tokens)
        self.apply_exports(self.exports.progress(key, tokens, *layers, now=self.now))

    def seal(self, key: Key) -> None:
        if not self.grants[key].sealed:
            self.grants[key].sealed = True
            self.apply_exports(self.exports.seal(key, FIRST, 0, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.apply_imports(self.imports.tick(self.now))
        self.apply_exports(self.exports.tick(self.now))

    # ---- the sender's edge ---------------------------------------------------------------

    def sender_takes(self, wire: Wire) -> None:
        """Takes its next job, or learns that all is over and stops."""
        grant = self.grants[wire.key]
        if grant.outcome is not None or wire.job is not None:
            return
        job = self.exports.next_job(wire.key, self.now)
        if isinstance(job, ex.StopJob):
            self.sender_stops(wire)
        else:
            wire.job = job

    def sender_sends(self, wire: Wire) -> None:
        """Its job is out whole."""
        job, wire.job = wire.job, None
        grant = self.grants[wire.key]
        match job:
            case ex.PushJob(range=r):
                assert grant.outcome is None
                contents = payload(grant.secret, r)
                head = PushHead(
                    grant.secret, self.id(wire), r, job.payload_bytes, checksum(contents)
                )
                self.put(wire, Message(head, contents))
                self.exports.pushed(wire.key, head.checksum, self.now)
            case ex.SealJob(head=seal):
                self.put(wire, Message(seal))
                self.apply_exports(self.exports.sealed(wire.key, self.now))
            case None:
                pass

    def sender_stops(self, wire: Wire) -> None:
        """Only what has ended, or lost its connection, makes a sender stop."""
        reason = self.exports.abort_reason(wire.key)
        if wire.job is not None:
            wire.cut = True  # a frame is out in part
            wire.job = None
        self.apply_exports(self.exports.stopped(wire.key))
        if reason:
            self.put(wire, Message(AbortHead(self.grants[wire.key].secret, self.id(wire), reason)))

    def sender_hears(self, wire: Wire) -> None:
        if wire.back:
            v = wire.back.popleft()
            if v.grant == self.grants[wire.key].secret:
                self.apply_exports(self.exports.verdict(wire.key, v.committed, v.reason, self.now))
        elif wire.closed or wire.cut:
            lost = Failure(FailureKind.TRANSFER_FAILED, "lost")
            self.apply_exports(self.exports.broken(wire.key, lost))

    def put(self, wire: Wire, message: Message) -> None:
        if not wire.cut and not wire.closed:
            wire.out.append(message)

    def id(self, wire: Wire) -> TransferId:
        return TransferId("r", wire.key[1])

    # ---- the receiver's edge ---------------------------------------------------------------

    def receiver_steps(self, wire: Wire) -> None:
        if wire.closed:
            return
        if wire.accept is not None:
            self.receive(wire)
        elif wire.dismissed or (wire.cut and not wire.out):
            wire.closed = True
            self.apply_imports(self.imports.connection_closed(self.number(wire)))
        elif wire.out:
            self.take(wire, wire.out.popleft())

    def take(self, wire: Wire, message: Message) -> None:
        conn = self.number(wire)
        for key, grant in self.grants.items():
            if message.head.grant == grant.secret and message.head.id.attempt != key[1]:
                grant.tainted = True
        match message.head:
            case PushHead() as head:
                begun = self.imports.push_begin(conn, head, self.now)
                if isinstance(begun, im.Reject):
                    self.apply_imports(begun.actions)
                    assert wire.dismissed
                    return
                wire.accept = begun
                layers = range(begun.layer_start, begun.layer_start + begun.layer_count)
                targets = [(b, layer) for b in begun.block_ids for layer in layers]
                wire.todo = deque(zip(targets, message.payload, strict=False))
                wire.got = []
            case SealHead() as head:
                self.apply_imports(self.imports.seal(conn, head, self.now))
            case AbortHead() as head:
                self.apply_imports(self.imports.abort(conn, head))

    def receive(self, wire: Wire) -> None:
        """One more slice, or the receive's end."""
        assert wire.accept is not None
        grant = self.grants[wire.accept.key]
        if wire.todo:
            (block, layer), content = wire.todo.popleft()
            assert grant.state in ("open", "quarantined")
            assert block in grant.blocks
            assert block not in grant.blocks[: grant.prefix]
            self.memory[block, layer] = content
            wire.got.append(content)
            self.imports.push_progress(self.number(wire), self.now)
        if wire.todo and not wire.dismissed and not wire.cut:
            return
        whole = not wire.todo
        wire.todo.clear()
        wire.accept = None
        seen = checksum(wire.got) if whole else None
        self.apply_imports(self.imports.push_end(self.number(wire), seen, self.now))
        wire.dismissed |= not whole

    def number(self, wire: Wire) -> int:
        return self.wires.index(wire)

    # ---- what the machines say -----------------------------------------------------------

    def apply_imports(self, actions: Sequence[im.ImportAction]) -> None:
        for action in actions:
            match action:
                case im.Committed(key, first):
                    assert first == FIRST
                    self.committed(self.grants[key])
                case im.ImportFailed(key):
                    assert self.grants[key].state in ("open", "quarantined")
                    assert not self.grants[key].failed
                    self.grants[key].failed = True
                case im.Quarantined(key):
                    assert self.grants[key].state == "open"
                    self.grants[key].state = "quarantined"
                case im.Released(key):
                    assert self.grants[key].state in ("open", "quarantined")
                    self.release(self.grants[key])
                case im.Answer(conn, verdict, close):
                    self.wires[conn].back.append(verdict)
                    self.wires[conn].dismissed |= close

    def committed(self, grant: Grant) -> None:
        assert grant.state == "open"
        assert grant.sealed
        assert not grant.tainted
        for index in range(grant.prefix, len(grant.blocks)):
            for layer in range(LAYOUT.layers):
                assert self.memory[grant.blocks[index], layer] == (grant.secret, index, layer)
        grant.state = "committed"

    def release(self, grant: Grant) -> None:
        grant.state = "free"
        self.free += grant.blocks

    def apply_exports(self, actions: Sequence[ex.ExportAction]) -> None:
        for action in actions:
            match action:
                case ex.Engage(key):
                    self.wires.append(Wire(key))
                case ex.ExportDone(key) | ex.ExportFailed(key):
                    assert self.grants[key].outcome is None
                    self.grants[key].outcome = action
                case ex.ExportSealed(key):
                    assert self.grants[key].sealed
                case ex.Cut() | ex.Wake():
                    pass

    def check(self) -> None:
        held = [g for g in self.grants.values() if g.state != "free"]
        owned = [b for g in held for b in g.blocks]
        assert sorted(owned + self.free) == list(range(POOL))
        quarantined = sum(g.state == "quarantined" for g in held)
        assert self.imports.quarantined_count == quarantined
        assert len(self.imports.open_keys) == sum(g.state == "open" for g in held)
        for grant in self.grants.values():
            if isinstance(grant.outcome, ex.ExportDone) and grant.outcome.committed:
                assert not grant.failed


FAULTS = ("drop", "repeat", "reorder", "misroute", "payload", "attempt", "range", "seal")


def altered(message: Message, what: str, by: int) -> Message:
    """The message with one slice, or one field of its head, changed."""
    head, contents = message.head, list(message.payload)
    match what, head:
        case "payload", PushHead():
            contents[by % len(contents)] = NOISE
        case "attempt", _:
            head = replace(head, id=TransferId("r", head.id.attempt + 1))
        case "range", PushHead(range=r):
            head = replace(head, range=replace(r, block_start=r.block_start + (by % 3) - 1))
        case "seal", SealHead():
            head = replace(head, token_count=head.token_count - 1)
    return Message(head, contents)


class Faults(RuleBasedStateMachine):
    """Any of it, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(tokens=st.integers(1, 20))
    def begin(self, tokens: int) -> None:
        self.world.open(tokens, 0)

    def wire(self, pick: int) -> Wire:
        return self.world.wires[self.key(pick)[1]]

    def key(self, pick: int) -> Key:
        """0 is the latest transfer."""
        count = len(self.world.grants)
        return (0, (count - 1 - pick) % count)

    picks = st.sampled_from([0, 0, 1, 2])

    faults = st.tuples(st.sampled_from(FAULTS), st.integers(0, 9), picks)

    @rule(tokens=st.integers(1, 20), prefix=st.integers(0, 5))
    def open(self, tokens: int, prefix: int) -> None:
        self.world.open(tokens, prefix)

    @rule(
        tokens=st.integers(1, 20),
        prefix=st.integers(0, 2),
        fault=faults,
        received=st.sampled_from([0, 9, 1000]),
    )
    def a_transfer_with_a_fault(
        self, tokens: int, prefix: int, fault: tuple[str, int, int], received: int
    ) -> None:
        """All of a prompt is sent at once, and one thing goes wrong on its way."""
        if self.world.open(tokens, prefix) is not None:
            self.compute(0, 1.0, 0, 6, True)
            self.go_on(0, 40, 0)
            self.fault(0, fault)
            self.go_on(0, 0, received)

    @rule(
        pick=picks,
        part=st.floats(0, 1),
        start=st.integers(0, 5),
        count=st.integers(1, 6),
        seal=st.booleans(),
    )
    def compute(self, pick: int, part: float, start: int, count: int, seal: bool) -> None:
        self.world.progress(self.key(pick), part, (start, min(6, start + count)))
        if seal:
            self.world.seal(self.key(pick))

    @rule(pick=picks, sent=st.integers(0, 12), received=st.integers(0, 60))
    def go_on(self, pick: int, sent: int, received: int) -> None:
        for _ in range(sent):
            self.world.sender_takes(self.wire(pick))
            if self.world.grants[self.key(pick)].outcome is None:
                self.world.sender_sends(self.wire(pick))
        for _ in range(received):
            self.world.receiver_steps(self.wire(pick))

    @rule(pick=picks)
    def sender_takes(self, pick: int) -> None:
        self.world.sender_takes(self.wire(pick))

    @rule(pick=picks)
    def sender_hears(self, pick: int) -> None:
        self.world.sender_hears(self.wire(pick))

    @rule(pick=picks, what=st.sampled_from(["use", "cancel import", "cancel export", "renew"]))
    def owners_act(self, pick: int, what: str) -> None:
        world, key = self.world, self.key(pick)
        match what:
            case "use" if world.grants[key].state == "committed":
                world.release(world.grants[key])
            case "cancel import":
                world.apply_imports(world.imports.cancel(key))
                assert world.grants[key].state != "open"
            case "cancel export":
                world.apply_exports(world.exports.cancel(key))
            case "renew":
                world.imports.renew(key, world.now)
                world.exports.renew(key, world.now)

    @rule(seconds=st.sampled_from([0.1, 5.0, 9.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(pick=picks, lose=st.booleans())
    def cut(self, pick: int, lose: bool) -> None:
        self.wire(pick).cut = True
        if lose:
            self.wire(pick).out.clear()

    @rule(pick=picks, fault=faults)
    def fault(self, pick: int, fault: tuple[str, int, int]) -> None:
        """Something happens to one message under way."""
        what, at, other = fault
        out = self.wire(pick).out
        if not out:
            return
        at %= len(out)
        match what:
            case "drop":
                del out[at]
            case "repeat":
                out.insert(at, out[at])
            case "reorder":
                out[at], out[at - 1] = out[at - 1], out[at]
            case "misroute":
                if not self.wire(other).closed:
                    self.wire(other).out.append(out[at])
                    del out[at]
            case _:
                out[at] = altered(out[at], what, other)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Nobody does anything any more, but time passes: all comes free."""
        world = self.world
        if not world.wires:
            return
        world.tick(LONGEST_S)
        assert world.imports.open_keys == ()
        for wire in world.wires:
            if world.grants[wire.key].outcome is None:
                # The edge stops the sender because it was cut; its next job says so too.
                if wire.job is None:
                    assert world.exports.next_job(wire.key, world.now) == ex.StopJob()
                world.sender_stops(wire)
            wire.cut = True
            while not wire.closed:
                world.receiver_steps(wire)
        assert world.exports.open_keys == ()
        assert all(g.outcome is not None for g in world.grants.values())
        assert all(g.state in ("committed", "free") for g in world.grants.values())
        world.check()


TestFaults = pytest.mark.slow(Faults.TestCase)
TestFaults.settings = settings(max_examples=4 * settings().max_examples)


@given(
    tokens=st.integers(1, 40),
    prefix=st.integers(0, 10),
    frame_slices=st.integers(0, 20),
    calls=st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 5), st.integers(1, 6), st.integers(0, 3)),
        max_size=12,
    ),
)
def test_without_faults_all_arrives_once(
    tokens: int, prefix: int, frame_slices: int, calls: list[tuple[float, int, int, int]]
) -> None:
    world = World()
    world.exports = ex.Exports(LAYOUT, Digest, ExportLimits(frame_bytes=frame_slices * SLICE))
    key = world.open(tokens, prefix)
    assert key is not None
    (wire,) = world.wires
    for part, start, count, steps in calls:
        world.progress(key, part, (start, min(6, start + count)))
        for _ in range(steps):
            world.sender_takes(wire)
            world.sender_sends(wire)
    world.seal(key)
    grant = world.grants[key]
    for _ in range(1000):
        world.sender_takes(wire)
        world.sender_sends(wire)
        world.receiver_steps(wire)
        world.sender_hears(wire)
    assert grant.state == "committed"
    assert grant.outcome == ex.ExportDone(key, committed=True)
    largest = max(SLICE, frame_slices * SLICE)
    assert all(m.head.payload_bytes <= largest for m in wire.out if isinstance(m.head, PushHead))
