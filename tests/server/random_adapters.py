"""LoRA adapters of random numbers for the bundled model, as PEFT would save them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK, HIDDEN, LAYERS = 4, 576, 30


def save_random_adapter(folder: Path, seed: int) -> str:
    """Into a folder -> its path."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{part}.weight": rng.normal(0, 0.12, shape).astype(
            np.float32
        )
        for layer in range(LAYERS)
        for part, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)
