"""Multi-head latent attention (DeepSeek-AI 2024): keys and values of all heads are derived from one small latent."""

from __future__ import annotations

from typing import Any, Generic

import numpy as np

from freehold.models.backend import Array, Backend, CachePlace, Weight
from freehold.models.layers.source import LayerSource
from freehold.models.spec import Latent
from freehold.models.tensor import StoredTensor


class LatentMixer(Generic[Array, Weight]):
    """Loads `latent.*`: q or q_down, q_norm, q_up; kv_down, kv_norm, kv_up, output.

    Only latents are cached. The projection from latents to keys is applied to the query instead, and the projection to
    values to the weighted sum of latents. Prefill and decoding do the same, so they give the same bits.
    """

    def __init__(self, spec: Latent, source: LayerSource[Array, Weight], place: CachePlace, epsilon: float):
        self._spec, self._epsilon = spec, epsilon
        self._backend: Backend[Array, Weight, Any] = source.backend
        ops, pack = self._backend, self._backend.pack
        self._norm = source.vector("mixer_norm.weight")
        head = spec.plain_size + spec.rotary.size
        plain, turned = _split_rows(spec.head_count, head, spec.plain_size, spec)
        is_low_rank = spec.query_rank is not None
        query = source.stored("latent.q_up.weight" if is_low_rank else "latent.q.weight")
        self._query_plain, self._query_turned = pack([query.reorder(plain)]), pack([query.reorder(turned)])
        self._q_down = source.weight("latent.q_down.weight") if is_low_rank else None
        self._q_norm = source.vector("latent.q_norm.weight") if is_low_rank else None
        latents, keys = _split_rows(1, spec.rank + spec.rotary.size, spec.rank, spec)
        self._kv_down = pack([source.stored("latent.kv_down.weight").reorder(np.concatenate([latents, keys]))])
        self._kv_norm = source.vector("latent.kv_norm.weight")
        up = source.numbers("latent.kv_up.weight").reshape(spec.head_count, -1, spec.rank)
        self._to_key = ops.pack_heads([StoredTensor.of(one[: spec.plain_size].T) for one in up])
        self._to_value = ops.pack_heads([StoredTensor.of(one[spec.plain_size :]) for one in up])
        self._output = source.weight("latent.output.weight")
        self._attend = ops.latent_attention(place, spec)

    def add(self, x: Array, batch: Any, out: Array) -> None:
        """Add the attention of the hidden states x [tokens, hidden_size] to out."""
        ops, spec = self._backend, self._spec
        normed = ops.norm(x, self._norm, self._epsilon)
        source = normed
        if self._q_down is not None:
            assert self._q_norm is not None
            source = ops.linear(normed, self._q_down)
            ops.norm_columns(source, 0, self._q_norm, self._epsilon)
        absorbed = ops.heads_linear(ops.linear(source, self._query_plain), self._to_key)
        turned = ops.linear(source, self._query_turned)
        latents = ops.linear(normed, self._kv_down)
        ops.norm_columns(latents, 0, self._kv_norm, self._epsilon)
        queries = ops.join_columns([absorbed, turned], spec.head_count)
        attended = self._attend(queries, latents, batch)
        ops.linear_add(self._output, ops.heads_linear(attended, self._to_value), out)


def _split_rows(heads: int, size: int, plain: int, spec: Latent) -> tuple[np.ndarray, np.ndarray]:
    """Split the rows of `heads` heads of `size` rows: the first `plain` of each, and the rotated rest, converted from
    neighbouring pairs to halves."""
    rows = np.arange(heads * size).reshape(heads, size)
    turned = rows[:, plain:]
    if spec.is_interleaved:
        turned = turned.reshape(heads, -1, 2).swapaxes(1, 2).reshape(heads, -1)
    return rows[:, :plain].ravel(), turned.ravel()
