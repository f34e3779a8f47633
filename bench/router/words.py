"""What the synthetic engines say: words of the model's own vocabulary.

Each has exactly one blank. The events around them have one more (`data: `), and exactly one
bracket that opens. So whoever reads a stream counts tokens byte by byte, however many came
in one event, and wherever the network cuts.
"""

from pathlib import Path

from bench.models import load_tokenizer

COUNT = 500
_BLANK = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # how byte-level vocabularies write it


def words(model: Path) -> list[tuple[int, str]]:
    """(token id, text), the same for all engines. Both are used in turn."""
    vocabulary: dict[str, int] = load_tokenizer(model).get_vocab(with_added_tokens=False)
    found = sorted(
        (number, " " + token[1:])
        for token, number in vocabulary.items()
        if token[0] == _BLANK and token[1:].isascii() and token[1:].isalpha()
    )
    if len(found) < COUNT:
        raise ValueError(f"{model}: only {len(found)} words in its vocabulary")
    return found[:COUNT]
