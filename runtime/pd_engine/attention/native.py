"""One step's attention by the compiled code, on the pool's pages where they are."""

import ctypes
from array import array
from collections.abc import Sequence

import torch

from pd_engine.attention.library import DTYPES, LayerCall, Native, StepCall
from pd_engine.attention.pool import KvPool
from pd_engine.attention.rows import Options, RowPlan


class NativeStep:
    """One step's rows as the library sees them, for all layers."""

    def __init__(self, native: Native, pool: KvPool, plans: Sequence[RowPlan]) -> None:
        tensor = pool.tensor
        if tensor.device.type != "cpu":
            raise ValueError(f"the compiled attention runs on the CPU, not on {tensor.device}")
        self._write = native.library.pd_attention_write
        self._attend = native.library.pd_attention_attend
        begins, starts = array("i"), array("i")
        places, tables = array("i"), array("i")
        for plan in plans:
            begins.append(plan.begin)
            starts.append(plan.start)
            places.append(len(tables))
            tables.extend(plan.blocks)
        self._tokens = plans[-1].begin + plans[-1].tokens
        begins.append(self._tokens)
        self._arrays = (begins, starts, places, tables)  # the structure has their addresses
        _, _, _, block_tokens, kv_heads, head_dim = tensor.shape
        self._pool, self._kv_heads, self._head_dim = tensor, kv_heads, head_dim
        self._layer_bytes = tensor.stride(1) * tensor.element_size()
        self._step = StepCall(
            DTYPES[tensor.dtype],
            len(plans),
            torch.get_num_threads(),
            kv_heads,
            kv_heads,
            head_dim,
            block_tokens,
            tensor.stride(0),
            tensor.stride(2),
            *(values.buffer_info()[0] for values in self._arrays),
        )
        self._layer = LayerCall()
        self._pointers = (ctypes.addressof(self._step), ctypes.addressof(self._layer))
        wrong = native.library.pd_attention_check(self._pointers[0], pool.num_blocks)
        if wrong >= 0:
            raise IndexError(f"row {wrong} has a block outside the pool")

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value [kv_heads, T, D] in the rows' blocks."""
        key, value = self._checked(key, self._kv_heads), self._checked(value, self._kv_heads)
        fields = self._layer
        fields.pool = self._pool.data_ptr() + layer * self._layer_bytes
        fields.k, fields.v = key.data_ptr(), value.data_ptr()
        fields.k_head, fields.k_token, _ = key.stride()
        fields.v_head, fields.v_token, _ = value.stride()
        self._write(*self._pointers)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        _key: torch.Tensor,
        _value: torch.Tensor,
        options: Options,
    ) -> torch.Tensor:
        """query [H, T, D] -> [T, H, D]; keys and values are read from the blocks."""
        heads = query.shape[0]
        query = self._checked(query, heads)
        out = query.new_empty(self._tokens, heads, self._head_dim)
        sinks = options.sinks
        if sinks is not None:
            sinks = sinks.float().contiguous()
        self._step.heads = heads
        fields = self._layer
        fields.pool = self._pool.data_ptr() + layer * self._layer_bytes
        fields.q, fields.out = query.data_ptr(), out.data_ptr()
        fields.q_head, fields.q_token, _ = query.stride()
        fields.sinks = None if sinks is None else sinks.data_ptr()
        fields.scale, fields.softcap = options.scale, options.softcap or 0.0
        fields.window = options.window or 0
        self._attend(*self._pointers)
        return out

    def _checked(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """The library trusts what it is given: form, type and dense vectors are made sure of."""
        if tensor.shape != (heads, self._tokens, self._head_dim) or heads % self._kv_heads:
            raise ValueError(f"{tuple(tensor.shape)} is not this step's form")
        if tensor.dtype != self._pool.dtype:
            raise ValueError(f"{tensor.dtype} is not the pool's {self._pool.dtype}")
        return tensor if tensor.stride(2) == 1 else tensor.contiguous()
