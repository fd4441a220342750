"""The same model as a Hugging Face folder, for engines that read only that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freehold.bench.peers.peer import Model

TIED = "lm_head.weight"  # the same as the embedding


def exported(gguf: Path) -> Model:
    """Dequantize to float32 with transformers, once. Raises RuntimeError without transformers."""
    folder = gguf.parent / f"{gguf.stem}-float32"
    if not (folder / "config.json").exists():
        try:
            import torch
            from safetensors.torch import save_file
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError:
            raise RuntimeError("peers need transformers: pip install 'freehold[bench]'") from None
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        tokenizer.save_pretrained(folder)
        # Its own `save_pretrained` refuses: it does not know that the model is no longer quantized.
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != TIED}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        model.config.quantization_config = None
        del model.config.quantization_config
        model.config.save_pretrained(folder)
    return Model(gguf, folder)
