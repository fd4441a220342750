"""The Llama family: Llama, Mistral, Qwen2, Qwen2.5, Qwen3, SmolLM2. One decoder for paged KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from freehold.models.backend import Array, Backend, Weight
from freehold.models.spec import Checkpoint, StoredTensor

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class _Layer(Generic[Array, Weight]):
    attention_norm: Array
    qkv: Weight
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    output: Weight
    ffn_norm: Array
    gate_up: Weight
    down: Weight


class LlamaDecoder(Generic[Array, Weight, Batch]):
    """RMSNorm, rotary grouped-query attention, SwiGLU."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend[Array, Weight, Batch]):
        self.spec = checkpoint.spec
        self._backend = backend
        self._embedding = backend.pack([checkpoint.tensor("embed_tokens.weight")])
        self._layers = [self._load_layer(checkpoint, i) for i in range(self.spec.layer_count)]
        self._norm = backend.vector([checkpoint.tensor("norm.weight")])
        self._head = (
            self._embedding if self.spec.tied_embeddings else backend.pack([checkpoint.tensor("lm_head.weight")])
        )

    def _load_layer(self, checkpoint: Checkpoint, index: int) -> _Layer[Array, Weight]:
        backend, spec = self._backend, self.spec

        def get(*names: str) -> list[StoredTensor]:
            return [checkpoint.tensor(f"layers.{index}.{name}") for name in names]

        attention = [f"self_attn.{part}_proj" for part in "qkv"]
        return _Layer(
            attention_norm=backend.vector(get("input_layernorm.weight")),
            qkv=backend.pack(get(*(f"{name}.weight" for name in attention))),
            qkv_bias=backend.vector(get(*(f"{name}.bias" for name in attention))) if spec.qkv_bias else None,
            q_norm=backend.vector(get("self_attn.q_norm.weight")) if spec.qk_norm else None,
            k_norm=backend.vector(get("self_attn.k_norm.weight")) if spec.qk_norm else None,
            output=backend.pack(get("self_attn.o_proj.weight")),
            ffn_norm=backend.vector(get("post_attention_layernorm.weight")),
            gate_up=backend.pack(get("mlp.gate_proj.weight", "mlp.up_proj.weight")),
            down=backend.pack(get("mlp.down_proj.weight")),
        )

    def forward(self, tokens: Any, batch: Batch) -> Array:
        """tokens int32 [n] of all sequences of the batch -> hidden states [n, hidden_size]."""
        ops, spec = self._backend, self.spec
        x = ops.embed(self._embedding, tokens)
        for index, layer in enumerate(self._layers):
            qkv = ops.norm_linear(x, layer.attention_norm, spec.norm_epsilon, layer.qkv, layer.qkv_bias)
            attended = ops.attend(spec, index, qkv, batch, layer.q_norm, layer.k_norm)
            ops.linear_add(layer.output, attended, x)
            gate_up = ops.norm_linear(x, layer.ffn_norm, spec.norm_epsilon, layer.gate_up)
            ops.swiglu_linear_add(layer.down, gate_up, x)
        return x

    def logits(self, hidden: Array) -> Array:
        """[n, hidden_size] -> [n, vocab_size]"""
        return self._backend.norm_linear(hidden, self._norm, self.spec.norm_epsilon, self._head)
