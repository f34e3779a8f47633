"""Structured output with the real scheduler, runner and llguidance: what is written keeps to its
grammar, from the first token on, on two workers, resumed, with guesses, for several choices.
"""

import asyncio
import json
import re
import threading
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from pd_core.failures import FailureKind, RequestFailure
from pd_engine.bundle import make_bundle
from pd_engine.guide import KEPT, MAX_GRAMMAR_CHARS, MAX_WAITING, Guides
from pd_engine.types import Finish, Guide, Sampling
from tests.pd_engine.worker_rig import Worker, handed_over
from tests.tiny_model import tiny_model_dir

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

EOS = 2
REGEX = LLMatcher.grammar_from_regex("(in|out) [0-9]{2,4}(, [0-9]+)*!")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["river", "mill"]},
        "boats": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["kind", "boats", "open"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_pattern": " "})


@pytest.fixture(scope="module")
def guides() -> Guides:
    bundle = make_bundle(tiny_model_dir())
    return Guides(bundle.tokenizer_json, bundle.vocab_size, bundle.eos_token_ids)


@pytest.fixture
def fresh() -> Guides:
    bundle = make_bundle(tiny_model_dir())
    return Guides(bundle.tokenizer_json, bundle.vocab_size, bundle.eos_token_ids)


@pytest.fixture(scope="module")
def worker(guides: Guides) -> Worker:
    return Worker(guides=guides)


def sampling(grammar: str, seed: int = 0, **more: Any) -> Sampling:
    options: dict[str, Any] = {"max_tokens": 120, "temperature": 1.0, "seed": seed, **more}
    return Sampling(grammar=grammar, stop_token_ids=(EOS,), **options)


def text(tokens: list[int]) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model_dir() / "tokenizer.json"))
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def allowed(guide: Guide, ahead: tuple[int, ...] = ()) -> set[int]:
    mask = guide.mask(ahead)
    assert mask is not None
    return {token for token in range(512) if mask[token // 8] >> token % 8 & 1}


def ids(said: str) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model_dir() / "tokenizer.json"))
    return list(tokenizer.encode(said, add_special_tokens=False).ids)


def test_a_guide_looks_ahead_and_stays_where_it_is(guides: Guides) -> None:
    guide = asyncio.run(guides.make(REGEX))
    before, said = allowed(guide), ids("in 12!")
    after = allowed(guide, tuple(said))
    assert after == {EOS}
    assert allowed(guide) == before
    assert guide.mask((EOS,)) is None
    assert guide.mask((*said, *said)) is None
    fork = guide.fork()
    for token in said:
        fork.note(token)
    assert (allowed(fork), allowed(guide), fork.problem) == (after, before, "")
    fork.note(said[0])
    assert "grammar" in fork.problem


@pytest.mark.parametrize("grammar", ["{", "", 'start: "a', "x" * (MAX_GRAMMAR_CHARS + 1)])
def test_what_is_no_grammar_is_refused(guides: Guides, worker: Worker, grammar: str) -> None:
    with pytest.raises(RequestFailure) as caught:
        asyncio.run(guides.make(grammar))
    assert caught.value.failure.kind is FailureKind.INVALID_REQUEST
    if grammar:
        with pytest.raises(RequestFailure):
            worker.add(sampling(grammar))
    worker.run()


def test_without_llguidance_a_grammar_is_refused() -> None:
    with pytest.raises(RequestFailure, match="log says why"):
        Worker().add(sampling(REGEX))


def test_a_grammar_is_compiled_once_and_the_least_used_is_forgotten(
    fresh: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    real = fresh._compile
    monkeypatch.setattr(fresh, "_compile", lambda one: (compiled.append(one), real(one))[1])
    many = [LLMatcher.grammar_from_regex(f"{n}") for n in range(KEPT)]

    async def ask() -> None:
        first, second = await asyncio.gather(fresh.make(REGEX), fresh.make(REGEX))
        assert compiled == [REGEX]
        for token in ids("in 12!"):
            first.note(token)
        assert allowed(first) == {EOS}
        known = fresh.known(REGEX)
        assert known is not None
        assert allowed(known) == allowed(second) != {EOS}
        for one in many[:-1]:
            await fresh.make(one)
        assert fresh.known(REGEX) is not None
        await fresh.make(many[-1])
        assert (fresh.known(REGEX) is None, fresh.known(many[0]) is None) == (False, True)

    asyncio.run(ask())
    assert compiled == [REGEX, *many]


def test_one_that_is_wrong_is_known_to_be_wrong(fresh: Guides) -> None:
    async def ask() -> None:
        for _ in range(2):
            with pytest.raises(RequestFailure, match="the grammar"):
                await fresh.make("{")
            assert fresh.known("{") is None

    asyncio.run(ask())


def test_the_loop_goes_on_while_a_grammar_is_compiled(
    fresh: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is bounded in number and in time; what was compiled too late is kept."""
    hold, real = threading.Event(), fresh._compile
    monkeypatch.setattr(fresh, "_compile", lambda one: (hold.wait(60), real(one))[1])
    monkeypatch.setattr("pd_engine.guide._COMPILE_S", 0.05)

    async def ask() -> None:
        waiting = [asyncio.create_task(fresh.make(f"start: /{n}/")) for n in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(RequestFailure) as one_too_many:
            await fresh.make(REGEX)
        assert one_too_many.value.failure.kind is FailureKind.NO_CAPACITY
        late = await asyncio.gather(*waiting, return_exceptions=True)
        kinds = {one.failure.kind for one in late if isinstance(one, RequestFailure)}
        assert (len(late), kinds) == (MAX_WAITING, {FailureKind.NO_CAPACITY})
        compiling = list(fresh._waiting.values())
        hold.set()
        await asyncio.gather(*compiling)
        assert fresh.known("start: /0/") is not None
        assert await fresh.make(REGEX) is not None

    asyncio.run(ask())


@pytest.mark.parametrize("seed", range(6))
def test_answers_keep_to_their_grammar(worker: Worker, seed: int) -> None:
    keys = {
        grammar: worker.add(sampling(grammar, seed, temperature=1.0 if seed else 0.0))
        for grammar in (REGEX, JSON)
    }
    free = worker.add(Sampling(max_tokens=30, temperature=1.0, seed=seed))
    worker.run()
    assert worker.out[free], "a neighbour without one"
    for grammar, key in keys.items():
        outs = worker.out[key]
        said = text(worker.tokens(key))
        if outs[-1].finish is not Finish.STOP:
            assert len(outs) == 120, said
            continue
        if grammar is REGEX:
            assert re.fullmatch(r"(in|out) [0-9]{2,4}(, [0-9]+)*!", said)
        else:
            found = json.loads(said)
            assert found.keys() == set(SCHEMA["properties"])
            assert found["kind"] in ("river", "mill")
            assert all(isinstance(n, int) and n <= 99 for n in found["boats"])
            assert isinstance(found["open"], bool)


def test_choices_go_their_own_ways(worker: Worker) -> None:
    key = worker.add(sampling(JSON, 3), choices=(0, 1, 2))
    worker.run()
    said = [text(worker.tokens(key, choice)) for choice in (0, 1, 2)]
    assert len(set(said)) > 1
    assert all(one.startswith("{") for one in said)


@pytest.mark.parametrize("grammar", [REGEX, JSON])
@pytest.mark.parametrize("written", [0, 2])
def test_on_two_workers_and_resumed(
    worker: Worker, guides: Guides, grammar: str, written: int
) -> None:
    asked = sampling(grammar, 7)
    whole = worker.write(asked)
    prefill, decode = Worker(guides=guides), Worker(draft_tokens=4, guides=guides)
    assert handed_over(prefill, decode, asked, whole[:written]) == whole[written:]


def test_guesses_change_nothing(worker: Worker, guides: Guides) -> None:
    guessing = Worker(draft_tokens=5, guides=guides)
    many = LLMatcher.grammar_from_regex("(in|out| [0-9])+!")
    for seed in range(4):
        asked = sampling(many, seed, repetition_penalty=0.5)
        assert guessing.write(asked) == worker.write(asked)
    assert guessing.guessed > 0
