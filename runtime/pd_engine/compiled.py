"""Puts compiled code in the place of a model's linear layers, norms, rotations, on a CPU.

Linear layers get their weights packed for it, and lose the original ones. In fp32 a row's
result is then the same, bit by bit, whatever else is in the batch: torch's isn't, and for
few rows it is slower by up to a factor of three.
"""

import ctypes
import inspect
import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch

from pd_engine.attention.library import DTYPES, LinearCall, Native, NormCall, RotaryCall

_ALIGN = 64
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class PackedLinear(torch.nn.Module):
    """x w^T + bias, with w in the compiled code's own order."""

    def __init__(self, native: Native, linear: torch.nn.Linear, memory: torch.Tensor) -> None:
        """`memory` takes the packed weights: `_packed_bytes` of it, in the weight's type."""
        super().__init__()
        weight = linear.weight.detach().contiguous()
        outer, inner = weight.shape
        self.in_features, self.out_features = inner, outer
        self._dtype = weight.dtype
        self._bias = None if linear.bias is None else linear.bias.detach().contiguous()
        self._memory = memory
        self._call = LinearCall(
            dtype=DTYPES[weight.dtype],
            inner=inner,
            outer=outer,
            packed=memory.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            x_row=inner,
            y_row=outer,
        )
        self._address = ctypes.addressof(self._call)
        self._run = native.library.pd_linear
        native.library.pd_linear_pack(self._address, weight.data_ptr(), memory.data_ptr())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self._dtype or not x.is_contiguous():
            x = x.to(self._dtype).contiguous()
        *shape, inner = x.shape
        if inner != self.in_features:
            raise ValueError(f"{inner} inputs where {self.in_features} are expected")
        out = x.new_empty((*shape, self.out_features))
        call = self._call
        call.rows, call.x, call.y = x.numel() // inner, x.data_ptr(), out.data_ptr()
        self._run(self._address)
        return out

    # Without the hooks of Module.__call__, which nobody registers here: they cost as much as
    # a small layer.
    __call__ = forward


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
            x_row=self._dim,
            y_row=self._dim,
        )
        self._address = ctypes.addressof(self._call)
        self._run = native.library.pd_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self._dtype or not x.is_contiguous():
            x = x.to(self._dtype).contiguous()
        if x.shape[-1] != self._dim:
            raise ValueError(f"{x.shape[-1]} values where {self._dim} are expected")
        out = torch.empty_like(x)
        call = self._call
        call.rows, call.x, call.y = x.numel() // self._dim, x.data_ptr(), out.data_ptr()
        self._run(self._address)
        return out

    __call__ = forward


Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class CompiledRotary:
    """`apply_rotary_pos_emb` of transformers' models for a flattened batch."""

    def __init__(self, native: Native, original: Rotary) -> None:
        self._run, self._original = native.library.pd_rotary, original
        self._call = RotaryCall()
        self._address = ctypes.addressof(self._call)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k [1, heads, T, dim], cos, sin [1, T, at most dim] -> q, k turned."""
        _, q_heads, tokens, dim = q.shape
        k_heads, rotary = k.shape[1], cos.shape[-1]
        if (
            unsqueeze_dim != 1
            or q.shape[0] != 1
            or k.shape != (1, k_heads, tokens, dim)
            or not cos.shape == sin.shape == (1, tokens, rotary)
            or rotary > dim
            or rotary % 2
            or not q.dtype == k.dtype == cos.dtype == sin.dtype
            or q.dtype not in DTYPES
        ):
            return self._original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
        cos, sin = cos.contiguous(), sin.contiguous()
        q_out, k_out = q.new_empty(1, tokens, q_heads, dim), k.new_empty(1, tokens, k_heads, dim)
        call = self._call
        call.dtype, call.tokens, call.dim, call.rotary = DTYPES[q.dtype], tokens, dim, rotary
        call.q_heads, call.k_heads = q_heads, k_heads
        call.q, call.k, call.cosines, call.sines = (x.data_ptr() for x in (q, k, cos, sin))
        call.q_out, call.k_out = q_out.data_ptr(), k_out.data_ptr()
        _, call.q_head, call.q_token, _ = q.stride()
        _, call.k_head, call.k_token, _ = k.stride()
        self._run(self._address)
        return q_out.transpose(1, 2), k_out.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Compiled:
    """How many of each were replaced."""

    linears: int
    norms: int
    rotaries: int


@torch.no_grad()
def compile_model(model: torch.nn.Module, native: Native, linears: bool = True) -> Compiled:
    """Replaces what it can.

    `linears` False leaves those to torch, for CPUs whose own units it knows how to use.
    """
    norms = 0
    for parent, name, module in list(_children(model)):
        made = _compiled_norm(native, module)
        if made is not None:
            setattr(parent, name, made)
            norms += 1
    rotaries = sum(_compile_rotary(native, module) for module in model.modules())
    return Compiled(_pack_linears(model, native) if linears else 0, norms, rotaries)


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


_ROTARY = "apply_rotary_pos_emb"


def _compile_rotary(native: Native, module: torch.nn.Module) -> bool:
    """Gives a module that turns its queries and keys a forward of its own, which differs
    from its class's in that one name: other models in this process keep theirs.
    """
    forward = inspect.unwrap(type(module).forward)
    original = forward.__globals__.get(_ROTARY) if inspect.isfunction(forward) else None
    if original is None or _ROTARY not in forward.__code__.co_names:
        return False
    made = CompiledRotary(native, original)
    if not _same_rotary(original, made):
        return False
    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTARY: made},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    replaced: Any = module
    replaced.forward = MethodType(own, module)
    return True


def _same_rotary(original: Rotary, made: Rotary) -> bool:
    """By trial, as models have several kinds of rotation under this name."""
    q, k = (torch.linspace(-3, 3, heads * 80).sin().view(1, heads, 5, 16) for heads in (6, 2))
    angles = torch.linspace(0, 3, 5 * 16).view(1, 5, 16)
    cos, sin = angles.cos(), (angles * 1.7).sin()  # no two alike
    try:
        wanted = original(q, k, cos, sin)
    except (RuntimeError, TypeError, ValueError):
        return False
    found = made(q, k, cos, sin)
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(wanted, found, strict=True)
    )
