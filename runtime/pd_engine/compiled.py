"""Puts compiled code in the place of a model's linear layers and norms, on a CPU.

Linear layers get their weights packed for it, and lose the original ones. In fp32 a row's
result is then the same, bit by bit, whatever else is in the batch: torch's isn't, and for
few rows it is slower by up to a factor of three.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from pd_engine.attention.library import DTYPES, LinearCall, Native, NormCall

_ALIGN = 64
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class PackedLinear(torch.nn.Module):
    """x w^T + bias, with w in the compiled code's own order."""

    def __init__(self, native: Native, linear: torch.nn.Linear, memory: torch.Tensor) -> None:
        """`memory` takes the packed weights: `packed_elements` of the weight's type."""
        super().__init__()
        weight = linear.weight.detach().contiguous()
        outer, inner = weight.shape
        self.in_features, self.out_features = inner, outer
        self._dtype = weight.dtype
        self._bias = None if linear.bias is None else linear.bias.detach().contiguous()
        self._memory = memory
        self._call = LinearCall(
            dtype=DTYPES[weight.dtype],
            threads=torch.get_num_threads(),
            inner=inner,
            outer=outer,
            packed=memory.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            y_row=outer,
        )
        self._address = ctypes.addressof(self._call)
        self._run = native.library.pd_linear
        native.library.pd_linear_pack(self._address, weight.data_ptr(), memory.data_ptr())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1 or rows.dtype != self._dtype:
            rows = rows.to(self._dtype).contiguous()
        out = rows.new_empty(rows.shape[0], self.out_features)
        call = self._call
        call.threads = torch.get_num_threads()
        call.rows, call.x_row = rows.shape[0], rows.stride(0)
        call.x, call.y = rows.data_ptr(), out.data_ptr()
        self._run(self._address)
        return out.view(*x.shape[:-1], self.out_features)


class CompiledNorm(torch.nn.Module):
    """Root-mean-square normalization of the last dimension."""

    def __init__(
        self, native: Native, weight: torch.Tensor, epsilon: float, one_more: bool
    ) -> None:
        """`one_more`: the factor is 1 + weight."""
        super().__init__()
        self._weight = weight.detach().contiguous()
        self._dtype, self._dim = weight.dtype, weight.shape[0]
        self._call = NormCall(
            dtype=DTYPES[weight.dtype],
            dim=self._dim,
            one_more=one_more,
            epsilon=epsilon,
            weight=self._weight.data_ptr(),
            y_row=self._dim,
        )
        self._address = ctypes.addressof(self._call)
        self._run = native.library.pd_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self._dim)
        if rows.stride(1) != 1 or rows.dtype != self._dtype:
            rows = rows.to(self._dtype).contiguous()
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        call = self._call
        call.threads = torch.get_num_threads()
        call.rows, call.x_row = rows.shape[0], rows.stride(0)
        call.x, call.y = rows.data_ptr(), out.data_ptr()
        self._run(self._address)
        return out.view(x.shape)


@torch.no_grad()
def compile_model(model: torch.nn.Module, native: Native, linears: bool = True) -> tuple[int, int]:
    """Replaces what it can; returns how many (linear layers, norms).

    `linears` False leaves those to torch, for CPUs whose own units it knows how to use.
    """
    norms = 0
    for parent, name, module in list(_children(model)):
        made = _compiled_norm(native, module)
        if made is not None:
            setattr(parent, name, made)
            norms += 1
    return (_pack_linears(model, native) if linears else 0), norms


def _children(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def _pack_linears(model: torch.nn.Module, native: Native) -> int:
    places = [
        (parent, name)
        for parent, name, module in _children(model)
        if type(module) is torch.nn.Linear and module.weight.dtype in DTYPES
    ]
    if not places:
        return 0
    sizes = [_packed_bytes(native, getattr(parent, name).weight) for parent, name in places]
    memory = _huge_memory(sum(sizes))
    at = 0
    for (parent, name), size in zip(places, sizes, strict=True):
        linear = getattr(parent, name)
        place = memory[at : at + size].view(linear.weight.dtype)
        setattr(parent, name, PackedLinear(native, linear, place))
        at += size  # and the original is freed
    return len(places)


def _packed_bytes(native: Native, weight: torch.Tensor) -> int:
    panel = int(native.library.pd_linear_panel())
    size = -(-weight.shape[0] // panel) * panel * weight.shape[1] * weight.element_size()
    return -(-size // _ALIGN) * _ALIGN


def _huge_memory(size: int) -> torch.Tensor:
    """Bytes in large pages where the kernel has them: weights are read from end to end."""
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):
            mapping.madvise(advice)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _compiled_norm(native: Native, module: torch.nn.Module) -> CompiledNorm | None:
    """The same norm compiled, if it is one that is known; models spell them in many ways,
    so a trial decides, not a name.
    """
    parts: Any = module
    weight = getattr(module, "weight", None)
    epsilon = getattr(parts, "variance_epsilon", getattr(parts, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
        return None
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or weight.dtype not in DTYPES:
        return None
    x = torch.linspace(-3, 2, 5 * weight.shape[0], dtype=torch.float32)
    x = x.sin().view(1, 5, -1).to(weight.dtype) * 3
    try:
        wanted = module(x)
    except (RuntimeError, TypeError, ValueError):
        return None
    for one_more in (False, True):
        made = CompiledNorm(native, weight, epsilon, one_more)
        found = made(x)
        if found.dtype == wanted.dtype and torch.allclose(
            found.float(), wanted.float(), rtol=_TOLERANCE[weight.dtype], atol=1e-6
        ):
            return made
    return None
