"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from freehold.contract.arrays import Float32
from freehold.contract.errors import InvalidParameter
from freehold.models.loading.content import content_fingerprint
from freehold.models.tensor import AdapterMatrices, StoredTensor, TensorFormat

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:.*\.)?(layers\.\d+\..+)\.lora_([AB])(?:\.\w+)?\.weight")
_WITHOUT = {"bias": ("none",), "use_dora": (False,), "fan_in_fan_out": (False,), "modules_to_save": (None, [])}


def read_adapter(path: Path) -> tuple[str, dict[str, AdapterMatrices]]:
    """Return the content's fingerprint, and matrices by module, such as layers.0.self_attn.q_proj. Raises
    InvalidParameter for an invalid adapter or one that needs more than LoRA."""
    if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
        raise InvalidParameter("lora_path", f"{path} is no adapter: it has no {CONFIG} or no {WEIGHTS}")
    try:
        config = json.loads((path / CONFIG).read_text())
        tensors = _tensors(path / WEIGHTS)
    except (ValueError, OSError) as error:
        raise InvalidParameter("lora_path", f"{path} can't be read: {error}") from error
    if config.get("peft_type") != "LORA":
        raise InvalidParameter("lora_path", f"{path} is of type {config.get('peft_type')}, only LORA is supported")
    for field, allowed in _WITHOUT.items():
        if config.get(field, allowed[0]) not in allowed:
            raise InvalidParameter("lora_path", f"{path}: {field} is {config[field]}, which is not supported")
    return content_fingerprint(path).hex(), _matrices(path, config, tensors)


def _tensors(path: Path) -> dict[str, Float32]:
    """Read all tensors as float32. Raises ValueError."""
    from safetensors import SafetensorError, deserialize

    found: dict[str, Float32] = {}
    try:
        entries = deserialize(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    for name, entry in entries:
        if entry["dtype"] not in ("F32", "F16", "BF16") or len(entry["shape"]) != 2:
            raise ValueError(f"{name} is not a matrix of floats")
        rows, columns = entry["shape"]
        raw = np.frombuffer(entry["data"], np.uint8)
        found[name] = StoredTensor(TensorFormat(entry["dtype"]), rows, columns, raw).to_float32()
    return found


def _matrices(path: Path, config: dict[str, Any], tensors: dict[str, Float32]) -> dict[str, AdapterMatrices]:
    parts: dict[str, dict[str, Float32]] = {}
    for name, values in tensors.items():
        if not (match := _TENSOR.fullmatch(name)):
            raise InvalidParameter("lora_path", f"{path}: {name} is not supported")
        parts.setdefault(match[1], {})[match[2]] = values
    found: dict[str, AdapterMatrices] = {}
    for module, pair in parts.items():
        if set(pair) != {"A", "B"} or pair["A"].ndim != 2 or pair["A"].shape[:1] != pair["B"].shape[1:]:
            raise InvalidParameter("lora_path", f"{path}: lora_A and lora_B of {module} don't fit each other")
        found[module] = AdapterMatrices(pair["A"], pair["B"] * _scaling(config, module, len(pair["A"])))
    return found


def _scaling(config: dict[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) for rank-stabilized adapters (Kalajdzievski 2023)."""
    patterns: dict[str, float] = config.get("alpha_pattern") or {}
    fits = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    alpha = float(next(fits, config.get("lora_alpha", 8)))
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
