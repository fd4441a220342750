"""Attention as one would write it on paper, in plain torch: what the kernels are tested against."""

from __future__ import annotations

import torch


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, lookback: int | None = None
) -> torch.Tensor:
    """Causal attention of one sequence.

    q [queries, heads, size] at positions first, first + 1, ...; k, v [positions, kv_heads, size], all
    positions from 0 -> [queries, heads, size], computed in float64. A query sees its own position and `lookback` before
    it; None is all.
    """
    queries, heads, size = q.shape
    group = heads // k.shape[1]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * size**-0.5
    positions = torch.arange(first, first + queries)
    hidden = torch.arange(len(k))[None, :] > positions[:, None]
    if lookback is not None:
        hidden |= torch.arange(len(k))[None, :] < positions[:, None] - lookback
    weights = scores.masked_fill(hidden[None], float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
