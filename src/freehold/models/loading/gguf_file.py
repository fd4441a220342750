"""GGUF, the file format of llama.cpp."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import dequantize

from freehold.models.families.family import RULES as USUAL_RULES
from freehold.models.families.gguf import RULES, GgufFields, gguf_family_of
from freehold.models.families.rules import Rule, fitting, module_name
from freehold.models.loading.gguf_layout import Tensor, read_layout
from freehold.models.spec import ModelSpec
from freehold.models.tensor import StoredTensor, TensorFormat


class GgufCheckpoint:
    """A model in one memory-mapped GGUF file. Raises ValueError for an unsupported architecture."""

    def __init__(self, path: Path):
        self.path = path
        self._fields, self._tensors = read_layout(path)
        divisors = self._tensors.get("rope_freqs.weight")
        fields = GgufFields(
            path,
            self._fields,
            {name: found.shape for name, found in self._tensors.items()},
            None if divisors is None else divisors.data.view(np.float32).copy(),
        )
        family = gguf_family_of(fields.architecture, path.name)
        self._rules = (*family.rules(fields), *RULES)
        self._spec = family.spec(fields)
        self._is_unchanged = not family.scales_weights

    def field(self, name: str, default: Any = None) -> Any:
        """Return a metadata value."""
        return self._fields.get(name, default)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def _find(self, name: str) -> tuple[str, Rule, re.Match[str]]:
        """Return the name in the file, and its rule. Raises KeyError for a name without a rule."""
        prefix, own = "", name
        if layer := re.match(r"layers\.(\d+)\.", name):
            prefix, own = f"blk.{layer[1]}.", name[layer.end() :]
        for rule, match in fitting(self._rules, own):
            if (source := f"{prefix}{match.expand(rule.source)}") in self._tensors:
                return source, rule, match
        raise KeyError(f"{self.path.name}: the file lacks {name}")

    def module(self, name: str) -> str | None:
        return module_name(USUAL_RULES, name) if self._is_unchanged else None

    def has(self, name: str) -> bool:
        try:
            self._find(name)
        except KeyError:
            return False
        return True

    def tensor(self, name: str) -> StoredTensor:
        source, rule, match = self._find(name)
        found = self._tensors[source]
        if rule.is_stacked:
            found = _one_of(found, int(match[1]), self._spec.expert_count)
        stored = _stored(found, found.data)
        stored.leave_memory()  # tensors read earlier are packed by now
        return stored if rule.change is None else rule.change(stored, match)


def _one_of(found: Tensor, number: int, count: int) -> Tensor:
    """Return one expert's matrix or vector: the last dimension counts experts. Raises ValueError."""
    if found.shape[-1] != count:
        raise ValueError(f"it is of {found.shape[-1]} experts, expected {count}")
    size = len(found.data) // count
    return replace(found, shape=found.shape[:-1], data=found.data[number * size : (number + 1) * size])


def _stored(found: Tensor, raw: np.ndarray) -> StoredTensor:
    columns, rows = int(found.shape[0]), int(np.prod(found.shape[1:], dtype=np.int64))
    if found.kind.name in TensorFormat.__members__:
        return StoredTensor(TensorFormat(found.kind.name), rows, columns, np.asarray(raw).reshape(rows, -1))
    # A format without its own kernel.
    return StoredTensor.of(dequantize(raw.reshape(rows, -1), found.kind))
