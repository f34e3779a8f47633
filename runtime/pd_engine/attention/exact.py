"""Attention spelled out in plain torch: every option, no fast path.

The reference that faster paths are tested against, and what runs for the options that
torch's fused attention doesn't have (soft-caps, sinks).
"""

import torch


def attend_exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(cap(query key^T scale) + mask) value.

    query [kv_heads, group, T, D]; key, value [kv_heads, S, D]; mask [T, S], added to the
    scores; sinks [kv_heads, group], one more score a head that takes weight and gives
    nothing. Returns [kv_heads, group, T, D]. The softmax is taken in float32.
    """
    scores = torch.matmul(query, key.unsqueeze(1).transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        column = sinks.float()[:, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value.unsqueeze(1))
