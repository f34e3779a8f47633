"""The compiled code (csrc/) by ctypes: structures, loading.

A library that isn't there, or was built from other sources, is no error: `load` says why,
and the engine then runs in plain torch. Nothing is ever compiled here.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from pd_engine.build import ATTENTION

ABI = 3  # PD_ATTENTION_ABI

_FUNCTIONS = {
    "pd_attention_write": 2,
    "pd_attention_attend": 2,
    "pd_linear": 1,
    "pd_linear_pack": 3,
    "pd_norm": 1,
    "pd_rotary": 1,
}
"""Those that take addresses only, and how many."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class StepCall(ctypes.Structure):
    """PdStep in csrc/attention.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_tokens", ctypes.c_int32),
        ("block_stride", ctypes.c_int64),
        ("half_stride", ctypes.c_int64),
        ("begin", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("table_at", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
    )


class LayerCall(ctypes.Structure):
    """PdLayer in csrc/attention.h."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_head", ctypes.c_int64),
        ("q_token", ctypes.c_int64),
        ("k_head", ctypes.c_int64),
        ("k_token", ctypes.c_int64),
        ("v_head", ctypes.c_int64),
        ("v_token", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int32),
    )


class LinearCall(ctypes.Structure):
    """PdLinear in csrc/attention.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("inner", ctypes.c_int32),
        ("outer", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("y_row", ctypes.c_int64),
    )


class NormCall(ctypes.Structure):
    """PdNorm in csrc/attention.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("one_more", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("y_row", ctypes.c_int64),
    )


class RotaryCall(ctypes.Structure):
    """PdRotary in csrc/attention.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("rotary", ctypes.c_int32),
        ("q_heads", ctypes.c_int32),
        ("k_heads", ctypes.c_int32),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("q_out", ctypes.c_void_p),
        ("k_out", ctypes.c_void_p),
        ("q_head", ctypes.c_int64),
        ("q_token", ctypes.c_int64),
        ("k_head", ctypes.c_int64),
        ("k_token", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded library."""

    library: ctypes.CDLL

    @property
    def variant(self) -> str:
        """The instruction set that it uses."""
        name: bytes = self.library.pd_attention_variant()
        return name.decode()

    def use(self, variant: str) -> bool:
        """Another instruction set from now on, for tests; False if this CPU hasn't got it."""
        return bool(self.library.pd_attention_use(variant.encode()))


@dataclass(frozen=True, slots=True)
class Missing:
    """Why there is no library."""

    reason: str


@cache
def load() -> Native | Missing:
    """The library as built for these sources, loaded once a process."""
    path = ATTENTION.path()
    if not path.is_file():
        return Missing("not built; build it with: python -m pd_engine.build")
    try:
        # torch is imported: its OpenMP runtime is loaded, and this library shares it.
        library = ctypes.CDLL(str(path))
        library.pd_attention_variant.restype = ctypes.c_char_p
        library.pd_attention_use.argtypes = (ctypes.c_char_p,)
        library.pd_attention_check.argtypes = (ctypes.c_void_p, ctypes.c_int32)
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes = (ctypes.c_void_p,) * arguments
            function.restype = None
        abi = library.pd_attention_abi()
    except (OSError, AttributeError) as error:
        return Missing(f"{path.name} cannot be loaded: {error}")
    if abi != ABI:
        return Missing(f"{path.name} has interface {abi}, {ABI} is needed")
    return Native(library)
