"""How large a prompt's KV is, how long it takes to hand over, and what of that anybody sees.

The KV of a chunk's layer leaves as soon as it is computed, so a transfer runs beside the
prefill. It hides when the link carries KV faster than prefill makes it; what is always seen
is the last piece and the way to the other side and back.
"""

import re
from dataclasses import dataclass

from pd_core.geometry import ELEMENT_BYTES, ModelKv

QUANTIZATIONS = ("none", "int8", "int4")
SCALE_BYTES = 4
"""A group's scale and its zero, both fp16."""
KEY_GROUP_TOKENS = 64
"""int4 scales keys by channel: some channels are far larger than others, in all tokens."""

_UNITS = {"b": 1 / 8, "B": 1.0}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_RATE = re.compile(r"([0-9.]+)\s*([kMGT]?)(bit|b|B)(/s|ps)")


@dataclass(frozen=True, slots=True)
class Link:
    """A way for KV from one worker to another. Nominal rates: in one direction, no protocol."""

    name: str
    bytes_s: float
    round_trip_s: float


# Rates as the vendors give them. NVLink: 600 GB/s (A100) and 900 GB/s (H100) both ways;
# PCIe: lanes x GT/s x 128/130. Round trips are orders of magnitude, not promises.
LINKS = {
    link.name: link
    for link in (
        Link("nvlink4", 450e9, 5e-6),
        Link("nvlink3", 300e9, 5e-6),
        Link("pcie5", 63.0e9, 10e-6),
        Link("pcie4", 31.5e9, 10e-6),
        Link("rdma-400g", 50e9, 10e-6),
        Link("rdma-200g", 25e9, 10e-6),
        Link("rdma-100g", 12.5e9, 10e-6),
        Link("tcp-100g", 12.5e9, 200e-6),
        Link("tcp-25g", 3.125e9, 200e-6),
        Link("tcp-10g", 1.25e9, 200e-6),
    )
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """`exposed_s`: after the prompt is computed, until decode has all of its KV."""

    kv_bytes: int
    transfer_s: float
    prefill_s: float
    exposed_s: float

    @property
    def hidden_share(self) -> float:
        return max(0.0, 1.0 - self.exposed_s / self.transfer_s)


def link(text: str) -> Link:
    """A link by its name, or a rate: `12.5GB/s`, `100Gbit/s`. ValueError says what there is."""
    if text in LINKS:
        return LINKS[text]
    match = _RATE.fullmatch(text.strip())
    if match is None or not _is_number(match[1]):
        raise ValueError(
            f"link {text!r}: one of {', '.join(LINKS)}, or a rate like 12.5GB/s or 100Gbit/s"
        )
    unit = _UNITS["B" if match[3] == "B" else "b"]
    bytes_s = float(match[1]) * _PREFIXES[match[2]] * unit
    if not bytes_s > 0:
        raise ValueError(f"link {text!r}: carries nothing")
    return Link(text.strip(), bytes_s, 200e-6)


def _is_number(text: str) -> bool:
    return text.count(".") <= 1 and text != "."


def vector_bytes(width: int, element_bytes: int, quantization: str, *, by_channel: bool) -> float:
    """One vector (K or V of a head of a token) on the wire; by channel: its share of the
    scales of its group of tokens."""
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r}: one of {', '.join(QUANTIZATIONS)}")
    if quantization == "none":
        return width * element_bytes
    bits = 8 if quantization == "int8" else 4
    scales = SCALE_BYTES * width / KEY_GROUP_TOKENS if by_channel else SCALE_BYTES
    return width * bits / 8 + scales


def kv_bytes(kv: ModelKv, tokens: int, quantization: str = "none") -> int:
    """What a prompt of so many tokens is on the wire, without the frames' heads (below 0.1%).
    Latent KV is never quantized."""
    if tokens < 0:
        raise ValueError(f"{tokens} tokens")
    element = ELEMENT_BYTES[kv.dtype]
    quantization = "none" if kv.latent and quantization in QUANTIZATIONS else quantization
    keys_by_channel = quantization == "int4"
    value = vector_bytes(kv.width, element, quantization, by_channel=False)
    key = vector_bytes(kv.width, element, quantization, by_channel=keys_by_channel)
    return round(tokens * kv.vectors * (key + value) / 2)


def estimate(
    kv: ModelKv,
    tokens: int,
    over: Link,
    prefill_tokens_s: float,
    *,
    quantization: str = "none",
    chunk_tokens: int = 512,
) -> Estimate:
    """The hand-over of a prompt that is computed at this speed, in chunks of so many tokens.

    Pieces (a layer of a chunk) become final evenly over the prefill. The last of them can't
    leave before the prompt is computed; the whole can't be there before the first has left
    and the link has carried everything.
    """
    if tokens < 1 or chunk_tokens < 1 or not prefill_tokens_s > 0:
        raise ValueError(
            f"{tokens} tokens in chunks of {chunk_tokens} at {prefill_tokens_s:g} tokens/s"
        )
    size = kv_bytes(kv, tokens, quantization)
    pieces = kv.layers * -(-tokens // chunk_tokens)
    prefill_s = tokens / prefill_tokens_s
    exposed = exposed_s(size, pieces, over, prefill_s)
    return Estimate(size, carry_s(size, over), prefill_s, exposed)


def carry_s(size_bytes: float, over: Link) -> float:
    """So many bytes from one worker to another, with nothing computed beside it."""
    return size_bytes / over.bytes_s + over.round_trip_s


def exposed_s(size_bytes: float, pieces: int, over: Link, prefill_s: float) -> float:
    """What is left to carry when the prompt is computed, and the way there and back."""
    transfer_s = size_bytes / over.bytes_s
    tail_s = transfer_s / pieces
    backlog_s = prefill_s / pieces + transfer_s - prefill_s
    return max(tail_s, backlog_s) + over.round_trip_s
