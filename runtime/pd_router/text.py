"""Text to tokens and back: chat template, tokenizer, incremental detokenizer, stop strings."""

import asyncio
import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from pd_router import toolcalls
from pd_router.templates import ChatTemplate, TemplateFailed
from pd_router.types import Bundle

# Below this many characters encoding takes less than a thread's round trip is worth.
INLINE_CHARS = 2048
# A character has at most four bytes: after so many tokens it isn't one that will come.
_MAX_INCOMPLETE = 16
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


# ---- tokens to text ---------------------------------------------------------------------


class Detokenizer(Protocol):
    """One choice's tokens to text, a token at a time.

    Over a whole choice, what push and finish return is what the tokenizer's decode,
    without special tokens, returns for all of them.
    """

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        ...

    def push_json(self, token: int) -> bytes:
        """The same, as it stands between the quotes of a JSON string."""
        ...

    def finish(self) -> str:
        """What is left when no more tokens come."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers: a token is some bytes, whatever stands beside it."""

    def __init__(self, table: "ByteTable") -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._between = True  # no character is incomplete

    def push(self, token: int) -> str:
        raw = self._table.raw
        text = self._utf8.decode(raw[token]) if token < len(raw) else ""
        self._between = not self._utf8.getstate()[0]
        return text

    def push_json(self, token: int) -> bytes:
        if self._between:
            known = self._table.json.get(token)
            if known is None:
                known = self._table.learn(token)
            if known is not None:
                return known
        return _json_inside(self.push(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class ByteTable:
    """The bytes of each token, and the JSON of those that are whole characters: as they come
    up, so that a large vocabulary costs nothing at the start."""

    def __init__(self, raw: Sequence[bytes]) -> None:
        self.raw = raw
        self.json: dict[int, bytes] = {}

    def learn(self, token: int) -> bytes | None:
        """None for a part of a character."""
        raw = self.raw[token] if token < len(self.raw) else b""
        try:
            found = _json_inside(raw.decode())
        except UnicodeDecodeError:
            return None
        self.json[token] = found
        return found


def _json_inside(text: str) -> bytes:
    """The text as it stands between the quotes of a JSON string."""
    return msgspec.json.encode(text)[1:-1]


class WindowDetokenizer:
    """For all other tokenizers: decodes a window of the last tokens again and again.

    `context` is what stands before the first token, for decoders to which that matters
    (some drop the blank at the beginning).
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(context)
        self._done = len(self._window)  # how many of the window have all their text out
        self._before = decode(self._window)

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        incomplete = len(text) <= len(self._before) or text.endswith(_REPLACEMENT)
        if incomplete and len(self._window) - self._done < _MAX_INCOMPLETE:
            return ""
        out = text[len(self._before) :]
        self._window = self._window[self._done :]
        self._done = len(self._window)
        self._before = self._decode(self._window)
        return out

    def push_json(self, token: int) -> bytes:
        return _json_inside(self.push(token))

    def finish(self) -> str:
        out = self._decode(self._window)[len(self._before) :]
        self._before += out
        return out


class StopMatcher:
    """Finds stop strings in text that comes in pieces, wherever the pieces are cut.

    Text that may turn out to begin a stop string is held back. The string whose end
    comes first wins (the longest, where several end together).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._fallbacks = tuple(_fallbacks(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each that the text ends with
        self._first = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may go out, whether a stop string was found: then nothing more may)."""
        if not self._held and self._first.isdisjoint(text):
            return text, False
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            found = self._advance(char)
            if found:
                self._held = ""
                return buffer[: end - found], True
        keep = max(self._matched)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut], False

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Length of the longest stop string that ends with this character, or 0."""
        found = 0
        for number, stop in enumerate(self._stops):
            length, back = self._matched[number], self._fallbacks[number]
            while length and stop[length] != char:
                length = back[length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                found = max(found, length)
                length = back[length - 1]
            self._matched[number] = length
        return found


def _fallbacks(pattern: str) -> tuple[int, ...]:
    """Knuth-Morris-Pratt: for each prefix, its longest border."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return tuple(table)


# ---- a model's tokenizer ------------------------------------------------------------------


class TextStack:
    """All that a model's bundle says about text. Building one takes up to a second."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle_hash = bundle.bundle_hash
        self.eos_token_ids = bundle.eos_token_ids
        text = bundle.tokenizer_json.decode()
        self._tokenizer = Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(bundle.vocab_size, self._tokenizer.get_vocab_size())
        self._special: Mapping[str, str] = dict(bundle.special_tokens)
        self._template = ChatTemplate(bundle.chat_template) if bundle.chat_template else None
        self._knows_developer = "developer" in bundle.chat_template
        self.takes_tools = self._template is not None and "tools" in self._template.variables
        self.call_format = toolcalls.format_of(bundle.chat_template)
        parts = json.loads(text)
        byte_level = _is_byte_level(parts.get("decoder") or {})
        self._bytes = ByteTable(_byte_table(self._tokenizer)) if byte_level else None
        table = self._bytes.raw if self._bytes is not None else None
        self._longest = _longest_token(self._tokenizer, table, parts)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The prompt of a chat. TemplateFailed with the template's message."""
        if self._template is None:
            raise TemplateFailed("This model has no chat template; use /v1/completions.")
        chat = [dict(message) for message in messages]
        if not self._knows_developer:
            for message in chat:
                if message["role"] == "developer":  # the newer name of the same thing
                    message["role"] = "system"
        return self._template.render(
            messages=chat,
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=True,
            **self._special,
        )

    def least_tokens(self, text: str) -> int:
        """Tokens that the text has at the very least, without the cost of encoding it."""
        return -(-len(text) // self._longest) if self._longest else 0

    async def encode(
        self, text: str, pool: ThreadPoolExecutor, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """Token ids. Long texts are encoded in a thread, without holding up the loop."""
        if len(text) <= INLINE_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        work = partial(self.encode_now, text, add_special_tokens=add_special_tokens)
        return await loop.run_in_executor(pool, work)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids, here and now."""
        # Unlike `encode`, the batch form lets go of the GIL.
        found = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(found[0].ids)

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """For one choice. `context`: the last tokens of the prompt that the text continues."""
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes)
        return WindowDetokenizer(self._decode, context[-8:])

    def token_bytes(self, token: int) -> bytes:
        """A token alone, special ones too, for log-probabilities."""
        table: Sequence[bytes] = self._bytes.raw if self._bytes is not None else ()
        if token < len(table) and table[token]:
            return table[token]
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text.encode()

    def decode_all(self, tokens: list[int]) -> str:
        """The text of a whole prompt, special tokens included."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _is_byte_level(decoder: Mapping[str, Any]) -> bool:
    if decoder.get("type") == "Sequence":
        inner = decoder.get("decoders", [])
        return len(inner) == 1 and _is_byte_level(inner[0])
    return decoder.get("type") == "ByteLevel"


def _byte_table(tokenizer: Any) -> list[bytes]:
    """For each token id its bytes; none for special tokens and ids without a token."""
    letters = _byte_letters()
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    special = {
        number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, number in vocab.items():
        if number not in special:
            try:
                table[number] = bytes([letters[letter] for letter in token])
            except KeyError:  # an added token stands for itself
                table[number] = token.encode()
    return table


def _longest_token(tokenizer: Any, table: Sequence[bytes] | None, parts: Mapping[str, Any]) -> int:
    """Bytes of the longest token; 0 where some text could vanish without a token for it."""
    added = tokenizer.get_added_tokens_decoder().values()
    if table is None or parts.get("normalizer"):
        return 0
    if any(token.lstrip or token.rstrip for token in added):
        return 0
    if not {bytes([byte]) for byte in range(256)} <= set(table):
        return 0
    return max(*map(len, table), *(len(token.content.encode()) for token in added), 1)


def _byte_letters() -> dict[str, int]:
    """How byte-level tokenizers write bytes as printable characters (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    letters |= {chr(256 + number): byte for number, byte in enumerate(others)}
    return letters
