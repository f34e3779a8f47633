"""Covers pd_router.text and texts: chat templates as transformers renders them, tokens to
text in pieces as the tokenizer decodes them whole, stop strings wherever they are cut, and
the wait for the first bundle."""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pd_core.failures import FailureKind, RequestFailure
from pd_router.text import (
    ByteDetokenizer,
    Detokenizer,
    StopMatcher,
    TemplateFailed,
    TextStack,
    WindowDetokenizer,
)
from pd_router.texts import Texts
from pd_router.types import Bundle
from tests.pd_router.http_rig import PlayedWorkers, go, tiny_bundle
from tests.tiny_model import tiny_model_dir

CHAT = [
    {"role": "system", "content": "You are <b>helpful</b>."},
    {"role": "user", "content": "What's 'up'? ü\n\n"},
    {"role": "assistant", "content": "  Nothing & none.  "},
    {"role": "user", "content": '{"a": "é"}'},
]

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    "blocks": """
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}
        {{- 'no system\\n' }}
    {%- endif %}
    {{- bos_token if loop.first else '' }}
    {%- generation %}
    {{- m.content | trim }}
    {%- endgeneration %}
    {%- if m.role == 'assistant' %}{% continue %}{% endif %}
    {{- eos_token }}
{% endfor %}
{% if add_generation_prompt %}
    >>> {{ messages | length }}
{% endif %}
""",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools }}",
    "namespace": """{% set ns = namespace(found=false, n=0) %}
{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if m.role == 'assistant' %}
{% set ns.found = true %}{% break %}{% endif %}{% endfor %}{{ ns.n }} {{ ns.found }}
{{ dict(a=1) }}{{ documents is none }}{{ strftime_now('%Y') | length }}""",
}


def stack(**changes: Any) -> TextStack:
    return TextStack(tiny_bundle(**changes))


# ---- templates -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir())
    theirs = tokenizer.apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False
    )
    ours = stack(chat_template=TEMPLATES[name], special_tokens=dict(tokenizer.special_tokens_map))
    assert ours.render(CHAT) == theirs


@pytest.mark.slow
def test_chat_tokens_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir())
    theirs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    ours = stack()
    assert list(ours.encode_now(ours.render(CHAT), add_special_tokens=False)) == theirs


def test_a_template_may_refuse() -> None:
    source = "{{ raise_exception('Roles must alternate') }}"
    with pytest.raises(TemplateFailed, match="Roles must alternate"):
        stack(chat_template=source).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content + 'x' }}",
        "{{ 1 + 'x' }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set x = messages.append(1) %}",
        "{{ strftime_now(5) }}",
    ],
)
def test_a_failing_template_is_a_typed_failure(source: str) -> None:
    with pytest.raises(TemplateFailed):
        stack(chat_template=source).render(CHAT)


LONG = "more than 16,777,216 characters or items"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ 'x' * 99999999 }}", LONG),
        ("{{ [1] * 99999999 }}", LONG),
        ("{{ 9 ** (9 ** 9) }}", LONG),
        ("{{ 'x'.ljust(99999999) }}", LONG),
        ("{{ 'x' | center(99999999) }}", LONG),
        ("{{ 'a\nb' | indent(99999999) }}", LONG),
        ("{{ '%99999999d' % 1 }}", "width"),
        ("{{ '%*d' % (99999999, 1) }}", "width"),
        ("{{ '{:99999999}'.format(1) }}", "width"),
        ("{{ '{:{}}'.format(1, 9999999) }}", "width"),
        ("{{ 'x'.__class__ }}{{ ('x' * 9999999).join(['a'] * 9999999) }}", LONG),
        ("{{ ('x' * 99999) | replace('', 'y' * 99999) }}", LONG),
        ("{{ ('x' * 99999).replace('x', 'y' * 99999) }}", LONG),
        (
            "{% set n = namespace(t='x') %}{% for i in range(99) %}"
            "{% set n.t = n.t + n.t %}{% endfor %}", LONG,
        ),
        (
            "{% set n = namespace(t='x') %}{% for i in range(99) %}"
            "{% set n.t = n.t ~ n.t %}{% endfor %}", LONG,
        ),
        ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", LONG),
        ("{{ messages | tojson(indent=99999999) }}", "indent"),
    ],
)  # fmt: skip
def test_a_template_ends_and_stays_small(source: str, says: str) -> None:
    with pytest.raises(TemplateFailed, match=says):
        stack(chat_template=source).render(CHAT)


def test_what_is_no_template_is_said() -> None:
    with pytest.raises(jinja2.TemplateError, match="can't be compiled"):
        stack(chat_template="{% continue %}")


def test_what_templates_do_is_within_bounds() -> None:
    source = (
        "{% for m in messages * 50 %}{{ loop.index ~ ': ' ~ m.content | trim }}"
        "{{ '%05.1f' % 1.25 }}{{ '{:>4}'.format(loop.index) }}{{ '-' * 20 }}\n{% endfor %}"
        "{{ messages | tojson(indent=2) | indent(4) | replace('a', 'b') }}"
    )
    assert "1: " in stack(chat_template=source).render(CHAT)


def test_a_model_without_a_template() -> None:
    with pytest.raises(TemplateFailed, match="/v1/completions"):
        stack(chat_template="").render(CHAT)


def test_developer_is_system_where_the_template_knows_no_developer() -> None:
    chat = [{"role": "developer", "content": "x"}]
    assert stack(chat_template="{{ messages[0].role }}").render(chat) == "system"
    knows = "{% if messages[0].role == 'developer' %}d{% endif %}"
    assert stack(chat_template=knows).render(chat) == "d"
    assert chat[0]["role"] == "developer"


# ---- encoding --------------------------------------------------------------------------


def test_long_texts_are_encoded_in_a_thread_to_the_same_tokens() -> None:
    async def scenario() -> None:
        ours = stack()
        with ThreadPoolExecutor(1) as pool:
            for text in ("", "hi", "What is the sum? ü🙂 " * 2000):
                found = await ours.encode(text, pool, add_special_tokens=True)
                assert found == ours.encode_now(text, add_special_tokens=True)

    go(scenario())


@given(st.text())
def test_no_text_has_fewer_tokens_than_least_tokens(text: str) -> None:
    ours = _tiny()
    assert ours.least_tokens(text) <= len(ours.encode_now(text, add_special_tokens=False))


def test_least_tokens_says_nothing_where_text_can_vanish() -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model_dir() / "tokenizer.json"))
    assert stack().least_tokens("a" * 10_000) > 100
    tokenizer.normalizer = normalizers.Strip()
    assert stack(tokenizer_json=tokenizer.to_str().encode()).least_tokens(" " * 10_000) == 0
    tokenizer = Tokenizer.from_file(str(tiny_model_dir() / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert stack(tokenizer_json=tokenizer.to_str().encode()).least_tokens(" " * 10_000) == 0


def test_a_tokenizer_that_truncates_is_told_not_to() -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model_dir() / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    ours = stack(tokenizer_json=tokenizer.to_str().encode())
    text = "one two three four five six"
    assert ours.encode_now(text, add_special_tokens=False) == _tiny().encode_now(
        text, add_special_tokens=False
    )


# ---- detokenizing ------------------------------------------------------------------------

_cache: dict[str, Any] = {}


def _tiny() -> TextStack:
    found: TextStack = _cache.setdefault("tiny", None) or stack()
    _cache["tiny"] = found
    return found


def _whole(tokenizer_json: bytes) -> Callable[[Sequence[int]], str]:
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def _in_pieces(detokenizer: Detokenizer, tokens: Sequence[int]) -> str:
    return "".join([*map(detokenizer.push, tokens), detokenizer.finish()])


@given(st.lists(st.integers(0, 515), max_size=40))
def test_byte_level_pieces_add_up_to_the_whole(tokens: list[int]) -> None:
    """Any tokens: halves of characters, bytes that are none, special ones, unknown ids."""
    ours = _tiny()
    assert isinstance(ours.detokenizer(), ByteDetokenizer)
    assert _in_pieces(ours.detokenizer(), tokens) == _whole(tiny_bundle().tokenizer_json)(tokens)


def test_added_tokens_that_are_not_special_are_text() -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model_dir() / "tokenizer.json"))
    tokenizer.add_tokens(["<tool>", "<日>", "<ö>"])
    data = tokenizer.to_str().encode()
    ours = stack(tokenizer_json=data)
    tokens = ours.encode_now("a<tool><日> b", add_special_tokens=False)
    assert _in_pieces(ours.detokenizer(), tokens) == "a<tool><日> b" == _whole(data)(tokens)
    # tokenizers takes an added token of letters that stand for bytes for these bytes.
    tokens = ours.encode_now("a<ö>", add_special_tokens=False)
    assert _in_pieces(ours.detokenizer(), tokens) == _whole(data)(tokens)


def _pieces_tokenizer() -> bytes:
    """In the manner of SentencePiece: ▁ for blanks, a byte fallback, no blank at the start."""
    words = ["▁Hello", "▁wor", "ld", "▁", "é", "!", "▁the"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    text: str = tokenizer.to_str()
    return text.encode()


def _bytes_of(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


@given(
    st.lists(
        st.one_of(
            st.integers(259, 265).map(lambda token: [token]),
            st.characters(exclude_categories=["Cs"], min_codepoint=1).map(_bytes_of),
            st.just([2]),
        ),
        max_size=20,
    )
)
def test_other_tokenizers_pieces_add_up_too(groups: list[list[int]]) -> None:
    data = _pieces_tokenizer()
    ours = _cache.get("pieces") or stack(tokenizer_json=data)
    _cache["pieces"] = ours
    tokens = [token for group in groups for token in group]
    assert isinstance(ours.detokenizer(), WindowDetokenizer)
    assert _in_pieces(ours.detokenizer(), tokens) == _whole(data)(tokens)


def test_a_completion_keeps_the_blank_before_its_first_word() -> None:
    ours = stack(tokenizer_json=_pieces_tokenizer())
    hello, wor, ld = 259, 260, 261
    assert _in_pieces(ours.detokenizer(), [wor, ld]) == "world"
    assert _in_pieces(ours.detokenizer([hello]), [wor, ld]) == " world"


def test_broken_bytes_do_not_pile_up() -> None:
    detokenizer = stack(tokenizer_json=_pieces_tokenizer()).detokenizer()
    texts = [detokenizer.push(3 + 0xFF) for _ in range(100)]
    assert sum(map(bool, texts)) >= 5


def test_token_bytes() -> None:
    ours = _tiny()
    text = "ü the"
    tokens = ours.encode_now(text, add_special_tokens=False)
    assert b"".join(map(ours.token_bytes, tokens)) == text.encode()
    assert ours.token_bytes(2) == b"<|im_end|>"
    assert ours.token_bytes(100_000) == b""


# ---- stop strings --------------------------------------------------------------------------


def _reference(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """By definition: the stop string whose end comes first, the longest of these."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def _fed(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    matcher, out = StopMatcher(stops), ""
    for piece in pieces:
        text, found = matcher.push(piece)
        out += text
        if found:
            return out, True
    return out + matcher.finish(), False


_few = st.text(alphabet="ab", max_size=6)


@given(
    st.lists(_few, max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_stop_strings_do_not_depend_on_the_cuts(pieces: list[str], stops: list[str]) -> None:
    assert _fed(pieces, stops) == _reference("".join(pieces), stops)


@given(st.lists(_few, max_size=12), st.lists(_few.filter(bool), min_size=1, max_size=3))
def test_nothing_is_held_back_without_need(pieces: list[str], stops: list[str]) -> None:
    matcher, seen, out = StopMatcher(stops), "", ""
    for piece in pieces:
        text, found = matcher.push(piece)
        seen, out = seen + piece, out + text
        if found:
            return
        held = seen[len(out) :]
        assert seen == out + held
        longest = next(
            (n for n in range(len(seen), 0, -1) if any(s.startswith(seen[-n:]) for s in stops)), 0
        )
        assert len(held) == longest


def test_text_that_begins_no_stop_string_passes_at_once() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("abc") == ("abc", False)
    assert matcher.push("xE") == ("x", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("x") == ("ENx", False)
    assert matcher.push("yENDz") == ("y", True)


# ---- texts: the wait for a bundle ------------------------------------------------------------


def test_those_who_came_early_get_the_first_bundle() -> None:
    async def scenario() -> None:
        workers = PlayedWorkers(None)
        texts = Texts(workers)
        waiting = [asyncio.create_task(texts.get(20)) for _ in range(3)]
        await asyncio.sleep(0)
        workers.bring(tiny_bundle())
        stacks = await asyncio.gather(*waiting)
        assert {id(found) for found in stacks} == {id(texts.current)}
        await texts.close()

    go(scenario())


def test_no_worker_no_wait_and_a_worker_but_no_bundle() -> None:
    async def scenario() -> None:
        workers = PlayedWorkers(None)
        texts = Texts(workers)
        workers.is_expecting = False
        with pytest.raises(RequestFailure) as caught:
            await texts.get(20)
        assert caught.value.failure.kind is FailureKind.NO_WORKERS
        workers.is_expecting = True
        with pytest.raises(RequestFailure) as caught:
            await texts.get(0.01)
        assert caught.value.failure.kind is FailureKind.NO_WORKERS
        await texts.close()

    go(scenario())


def test_an_unusable_bundle_leaves_the_last_good_one() -> None:
    async def scenario() -> None:
        workers = PlayedWorkers(tiny_bundle())
        texts = Texts(workers)
        first = await texts.get(20)
        workers.bring(Bundle("broken", b"{}"))
        workers.bring(Bundle("broken", json.dumps([]).encode(), "{% if %}"))
        await texts.settled()
        assert texts.current is first
        workers.bring(tiny_bundle(bundle_hash="second"))
        await texts.settled()
        assert texts.current is not None
        assert texts.current.bundle_hash == "second"
        await texts.close()

    go(scenario())
