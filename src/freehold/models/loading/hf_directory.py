"""A Hugging Face model directory: config.json and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from freehold.models.registry import check_architecture
from freehold.models.spec import DecoderSpec, StoredTensor, TensorFormat


class HfCheckpoint:
    """Raises ValueError for a model type or a setting that we don't have, FileNotFoundError without
    config or weights."""

    def __init__(self, path: Path):
        self.path = path
        if not (path / "config.json").exists():
            raise ValueError(f"{path} has no config.json: it is no model's directory")
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.architecture = str(self.config.get("model_type"))
        check_architecture(self.architecture, path)
        self._files = self._open_files()
        self._spec = self._read_spec()

    def _open_files(self) -> dict[str, Any]:
        """tensor name -> the open file that holds it"""
        from safetensors import safe_open

        paths = sorted(self.path.glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{self.path} holds no *.safetensors file")
        files: dict[str, Any] = {}
        for path in paths:
            file = safe_open(path, framework="pt")
            files.update(dict.fromkeys(file.keys(), file))
        return files

    @property
    def spec(self) -> DecoderSpec:
        return self._spec

    def _read_spec(self) -> DecoderSpec:
        config = self.config
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        head_size = int(config.get("head_dim") or hidden // heads)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        return DecoderSpec(
            architecture=self.architecture,
            layer_count=int(config["num_hidden_layers"]),
            hidden_size=hidden,
            head_count=heads,
            kv_head_count=int(config.get("num_key_value_heads") or heads),
            head_size=head_size,
            ffn_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            context_length=int(config.get("max_position_embeddings", 2048)),
            rope_theta=theta,
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            qkv_bias=self._name("layers.0.self_attn.q_proj.bias") in self._files,
            qk_norm=self._name("layers.0.self_attn.q_norm.weight") in self._files,
            tied_embeddings=bool(config.get("tie_word_embeddings")) or "lm_head.weight" not in self._files,
            rope_divisors=rope_divisors(rope, theta, head_size),
            windows=self._windows(int(config.get("max_position_embeddings", 2048))),
        )

    def _windows(self, context_length: int) -> tuple[int | None, ...]:
        """How many tokens each layer looks at. A window as large as the context is none."""
        config, layers = self.config, int(self.config["num_hidden_layers"])
        window = config.get("sliding_window")
        is_used = self.architecture == "mistral" or bool(config.get("use_sliding_window"))
        if not (window and is_used) or window >= context_length:
            return ()
        if window < 2:
            raise ValueError(f"{self.path}: a sliding_window of {window} is not supported")
        if self.architecture == "mistral":
            return (int(window),) * layers
        kinds = config.get("layer_types") or [
            "sliding_attention" if layer >= config.get("max_window_layers", 0) else "full_attention"
            for layer in range(layers)
        ]
        windows = tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
        return windows if any(windows) else ()

    def field(self, name: str, default: Any = None) -> Any:
        return self.config.get(name, default)

    def _name(self, name: str) -> str:
        return name if name.startswith("lm_head") else f"model.{name}"

    def tensor(self, name: str) -> StoredTensor:
        import torch

        found = self._files[self._name(name)].get_tensor(self._name(name))
        formats = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
        if found.dtype not in formats:
            raise ValueError(f"{self.path}: {name} has the unsupported type {found.dtype}")
        rows, columns = (1, found.shape[0]) if found.ndim == 1 else tuple(found.shape)
        data = found.contiguous().view(torch.uint8).numpy().reshape(rows, -1)
        return StoredTensor(TensorFormat(formats[found.dtype]), rows, columns, data)


def rope_divisors(rope: dict[str, Any], theta: float, head_size: int) -> np.ndarray | None:
    """By what each rotary frequency is divided: none, `linear`, or Llama 3's scheme, which leaves short
    wavelengths alone and interpolates between (transformers, `_compute_llama3_parameters`)."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return np.full(head_size // 2, rope["factor"], np.float32)
    if kind != "llama3":
        raise ValueError(f"RoPE scaling '{kind}' is not supported")
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = np.clip((old / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
