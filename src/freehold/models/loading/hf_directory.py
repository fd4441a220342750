"""A Hugging Face model directory: config.json and safetensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 with NumPy
import numpy as np
from safetensors import safe_open

from freehold.models.families.config import HfConfig, architecture_of
from freehold.models.families.family import RULES
from freehold.models.families.rules import Rule, fitting, module_name
from freehold.models.registry import family_of
from freehold.models.spec import ModelSpec
from freehold.models.tensor import StoredTensor, TensorFormat

_FORMATS = {"float32": TensorFormat.F32, "float16": TensorFormat.F16, "bfloat16": TensorFormat.BF16}
HEAD = "lm_head.weight"  # outside the decoder's root


class HfCheckpoint:
    """Raises ValueError for an unsupported model type or setting, FileNotFoundError without config or weights."""

    def __init__(self, path: Path):
        self.path = path
        if not (path / "config.json").exists():
            raise ValueError(f"{path} has no config.json: it is not a model directory")
        values = json.loads((path / "config.json").read_text())
        self._family = family_of(architecture_of(values), path)
        self.config = HfConfig(path, values, self._family.defaults)
        self._rules = (*self._family.rules(self.config), *RULES)
        self._opened: dict[Path, Any] = {}
        self._files = self._find_files()
        self._root = self._find_root()
        self._spec = self._family.spec(self.config, self._has_tied_embeddings())

    def _find_files(self) -> dict[str, Path]:
        """Return the file of each tensor name."""
        paths = sorted(self.path.glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{self.path} holds no *.safetensors file")
        files: dict[str, Path] = {}
        for path in paths:
            self._opened[path] = safe_open(path, framework="numpy")
            files.update(dict.fromkeys(self._opened[path].keys(), path))
        return files

    def _read(self, name: str) -> Any:
        """Return a lazy tensor: indexing reads from the file."""
        return self._opened[self._files[name]].get_slice(name)

    def _has_tied_embeddings(self) -> bool:
        """Return whether embeddings are tied. Old files don't say: then it depends on the tensors."""
        tied = self.config.get("tie_word_embeddings")
        if tied is False and not self.has("head.weight"):
            raise ValueError(f"{self.path}: the embeddings are not tied, and there is no lm_head.weight")
        return not self.has("head.weight") if tied is None else bool(tied)

    def _find_root(self) -> str:
        """Return the prefix of decoder names. Multimodal models nest the decoder deeper."""
        usual = f"{self._family.root}layers."
        found = (name[: name.index(".layers.") + 1] for name in self._files if ".layers.0." in name)
        roots = sorted(root for root in found if "vision" not in root)
        return self._family.root if any(name.startswith(usual) for name in self._files) or not roots else roots[0]

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def field(self, name: str, default: Any = None) -> Any:
        return self.config.values.get(name, default)

    def _find(self, name: str) -> tuple[str, Rule, re.Match[str]]:
        """Return the name in the file, and its rule. Raises KeyError for a name without a rule."""
        prefix, own = "", name
        if layer := re.match(r"layers\.\d+\.", name):
            prefix, own = layer[0], name[layer.end() :]
        for rule, match in fitting(self._rules, own):
            source = f"{prefix}{match.expand(rule.source)}"
            heads = (name for name in self._files if name.endswith(source))
            return next(heads, source) if source == HEAD else f"{self._root}{source}", rule, match
        raise KeyError(f"{self.path}: the family has no tensor {name}")

    def module(self, name: str) -> str | None:
        return module_name(self._rules, name)

    def has(self, name: str) -> bool:
        try:
            return self._find(name)[0] in self._files
        except KeyError:
            return False

    def tensor(self, name: str) -> StoredTensor:
        source, rule, match = self._find(name)
        if source not in self._files:
            raise KeyError(f"{self.path}: the checkpoint lacks {source}")
        stored = self._read(source)
        if stored.get_dtype() not in _FORMATS.values():
            raise ValueError(f"{self.path}: {source} has the unsupported type {stored.get_dtype()}")
        if rule.is_stacked and (count := stored.get_shape()[0]) != self._spec.expert_count:
            raise ValueError(f"{source} is of {count} experts, expected {self._spec.expert_count}")
        found = stored[int(match[1])] if rule.is_stacked else stored[:]
        if rule.change is not None:
            found = rule.change(found, match)
        if self._family.offset_norms and re.fullmatch(f"(layers.\\d+.)?{self._family.offset_norms}.*", name):
            found = found.astype(np.float32) + np.float32(1)
        if found.ndim not in (1, 2):
            raise ValueError(f"{source} has the shape {list(found.shape)}")
        rows, columns = (1, found.shape[0]) if found.ndim == 1 else tuple(found.shape)
        data = np.ascontiguousarray(found).reshape(rows, -1).view(np.uint8)
        return StoredTensor(_FORMATS[found.dtype.name], rows, columns, data)
