"""Attention as one would write it on paper, in plain torch: what the kernels are tested against."""

from __future__ import annotations

import torch


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    lookback: int | None = None,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence.

    q [queries, heads, size] at positions first, first + 1, ...; k [positions, kv_heads, size] and v [positions,
    kv_heads, value size] for all positions from 0 -> [queries, heads, value size], computed in float64. A query sees
    its own position and `lookback` before it; None is all. `scale` None is 1 / sqrt(size). With a `cap` c a score s is
    c * tanh(s / c). `sinks` [heads] are the scores of a key that everybody sees, and whose value is 0.
    """
    queries, heads, size = q.shape
    group = heads // k.shape[1]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * (size**-0.5 if scale is None else scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    positions = torch.arange(first, first + queries)
    hidden = torch.arange(len(k))[None, :] > positions[:, None]
    if lookback is not None:
        hidden |= torch.arange(len(k))[None, :] < positions[:, None] - lookback
    scores = scores.masked_fill(hidden[None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(heads, queries, 1)], dim=2)
    weights = scores.softmax(dim=-1)[:, :, : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, values)
