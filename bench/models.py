"""The model of the benches as a folder, converted once, and its tokenizer."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.common import OUT
from pd_engine.convert import BUILTINS

NAME = "smollm2-135m-instruct"
_WORDS = (
    "The tide went out before dawn, and the harbour lay quiet under a grey sky. Marta "
    "counted {} crates on the quay, wrote the number down, and looked for the ship that "
    "was to bring them north. A gull took a crust from her hand. In the warehouse, clerk "
    "number {} argued about the price of salt, rope and lamp oil, as clerks do. "
)


def model_dir() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format; converts it at the first call."""
    out = OUT / NAME
    command = [sys.executable, "-m", "pd_engine.convert", "--source", f"builtin:{NAME}"]
    subprocess.run([*command, "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
    return out


def builtin_gguf() -> Path:
    """The file that the model comes in."""
    package, file = BUILTINS[NAME]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise RuntimeError(f"{package} isn't installed")
    return Path(found.origin).parent / file


def load_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def story(number: int, paragraphs: int) -> str:
    """Text that differs from the first words on for every number: no prefix is shared."""
    opening = f"Story {number}. "
    return opening + "".join(_WORDS.format(number + i, number * 7 + i) for i in range(paragraphs))


def prompt_of(tokenizer: Any, tokens: int, number: int) -> str:
    """A text that encodes to exactly so many tokens."""
    text = story(number, tokens // 60 + 2)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for start in range(len(ids) - tokens):
        candidate = tokenizer.decode(ids[start : start + tokens], skip_special_tokens=False)
        if len(tokenizer.encode(candidate, add_special_tokens=False).ids) == tokens:
            return str(candidate)
    raise ValueError(f"no text of exactly {tokens} tokens in story {number}")
