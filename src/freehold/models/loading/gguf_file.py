"""GGUF: the file format of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import dequantize

from freehold.models.loading.gguf_layout import read_layout
from freehold.models.registry import check_architecture
from freehold.models.spec import DecoderSpec, StoredTensor, TensorFormat

_TOP = {"embed_tokens.weight": "token_embd", "norm.weight": "output_norm", "lm_head.weight": "output"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufCheckpoint:
    """A model in one memory-mapped GGUF file. Raises ValueError for an architecture we don't have."""

    def __init__(self, path: Path):
        self.path = path
        self._fields, self._tensors = read_layout(path)
        self.architecture = str(self.field("general.architecture"))
        check_architecture(self.architecture, path.name)
        self._spec = self._read_spec()

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata value; the architecture's own are also found without their prefix."""
        return self._fields.get(name, default)

    def _own(self, name: str, default: Any = None) -> Any:
        return self.field(f"{self.architecture}.{name}", default)

    @property
    def spec(self) -> DecoderSpec:
        return self._spec

    def _read_spec(self) -> DecoderSpec:
        heads = int(self._own("attention.head_count"))
        hidden = int(self._own("embedding_length"))
        divisors = self._tensors.get("rope_freqs.weight")
        return DecoderSpec(
            architecture=self.architecture,
            layer_count=int(self._own("block_count")),
            hidden_size=hidden,
            head_count=heads,
            kv_head_count=int(self._own("attention.head_count_kv", heads)),
            head_size=int(self._own("attention.key_length", hidden // heads)),
            ffn_size=int(self._own("feed_forward_length")),
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            context_length=int(self._own("context_length", 2048)),
            rope_theta=float(self._own("rope.freq_base", 10000.0)),
            norm_epsilon=float(self._own("attention.layer_norm_rms_epsilon", 1e-5)),
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            tied_embeddings="output.weight" not in self._tensors,
            rope_divisors=None if divisors is None else divisors.data.view(np.float32).copy(),
        )

    def tensor(self, name: str) -> StoredTensor:
        found = self._tensors[self._stored_name(name)]
        columns, rows = int(found.shape[0]), int(found.shape[1]) if len(found.shape) > 1 else 1
        kind = found.kind.name
        if kind in TensorFormat.__members__:
            data = np.asarray(found.data).reshape(rows, -1)
        else:  # a format without a kernel of its own
            values = dequantize(found.data.reshape(rows, -1), found.kind).astype(np.float32, copy=False)
            kind, data = "F32", values.view(np.uint8).reshape(rows, -1)
        stored = StoredTensor(TensorFormat(kind), rows, columns, data)
        if self.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            return self._unpermute(stored)
        return stored

    def _stored_name(self, name: str) -> str:
        if name in _TOP:
            return f"{_TOP[name]}.weight"
        _, layer, rest = name.split(".", 2)
        part, kind = rest.rsplit(".", 1)
        return f"blk.{layer}.{_PARTS[part]}.{kind}"

    def _unpermute(self, stored: StoredTensor) -> StoredTensor:
        """llama.cpp stores Llama's q and k with the two halves of each head interleaved."""
        if stored.rows == 1:  # a bias
            order = self._halves_order(stored.columns)
            data = stored.to_float32()[:, order].view(np.uint8).reshape(1, -1)
            return StoredTensor(TensorFormat.F32, 1, stored.columns, data)
        return stored.reorder(self._halves_order(stored.rows))

    def _halves_order(self, rows: int) -> np.ndarray:
        half = self.spec.head_size // 2
        return np.arange(rows).reshape(-1, half, 2).swapaxes(1, 2).ravel()
