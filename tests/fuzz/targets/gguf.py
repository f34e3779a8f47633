"""GGUF files: their headers, as the converter's reader parses them.

Whatever the reader raises is told as a ModelError by its caller; what it must not do is take
for ever, or memory that the file doesn't have.
"""

import struct
import tempfile
from pathlib import Path

from pd_engine.gguf_model import _Reader

PACKAGES = ("pd_engine.gguf_model", "gguf")
WORDS = (
    b"GGUF", b"\3\0\0\0", b"\2\0\0\0", b"\x08\0\0\0", b"\x09\0\0\0",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"general.architecture", b"general.alignment", b"llama", b"tokenizer.ggml.tokens",
    b"\x14\0\0\0\0\0\0\0",
)  # fmt: skip
_FILE = Path(tempfile.mkdtemp(prefix="pdcluster-fuzz-")) / "model.gguf"


def one(data: bytes) -> None:
    _FILE.write_bytes(data)
    try:
        _Reader(_FILE, _silent)
    except MemoryError:
        raise
    except Exception as error:
        assert not isinstance(error, RecursionError), error


def _silent(stage: str, done: int, total: int) -> None:
    assert stage
    assert done >= 0
    assert total > 0


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def seeds() -> list[bytes]:
    fields = (
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama"),
        _text("general.alignment") + struct.pack("<II", 4, 32),
        _text("llama.block_count") + struct.pack("<II", 4, 1),
        _text("tokenizer.ggml.tokens")
        + struct.pack("<IIQ", 9, 8, 3)
        + b"".join(_text(token) for token in ("a", "b", "<s>")),
        _text("tokenizer.ggml.scores") + struct.pack("<IIQfff", 9, 6, 3, 0.5, -1, 2),
    )
    tensor = _text("token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields)) + b"".join(fields) + tensor
    whole = head + b"\0" * (-len(head) % 32) + b"\1" * 32
    empty = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
    return [whole, empty, b"GGUF" + struct.pack(">IQQ", 3, 0, 0)]
