"""The same model as a folder in Hugging Face's layout, for engines that read nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freehold.bench.peers.peer import Model


def exported(gguf: Path) -> Model:
    """Dequantized to float32 by transformers, once. Raises RuntimeError without transformers."""
    folder = gguf.parent / f"{gguf.stem}-float32"
    if not (folder / "config.json").exists():
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError:
            raise RuntimeError("peers need transformers: pip install 'freehold[bench]'") from None
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(**source)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return Model(gguf, folder)
