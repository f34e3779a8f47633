"""GPUs as their vendors' data sheets give them: for estimates where nothing was measured."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """Dense 16-bit operations, one direction of memory."""

    name: str
    flops: float
    memory_bytes: float
    bandwidth_bytes_s: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 989e12, 80e9, 3.35e12),
        Gpu("h200", 989e12, 141e9, 4.8e12),
        Gpu("a100", 312e12, 80e9, 2.04e12),
        Gpu("l40s", 362e12, 48e9, 0.864e12),
        Gpu("l4", 121e12, 24e9, 0.3e12),
    )
}


def of_product(product: str) -> Gpu | None:
    """Which GPU a device's own name means, such as `NVIDIA A100-SXM4-80GB`; None: no known one.
    A card of less power or memory than its sheet's is taken for the one in the sheet."""
    words = re.split(r"[^a-z0-9]+", product.lower())
    return next((GPUS[word] for word in words if word in GPUS), None)
