"""Tensors as stored in a file."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from freehold.contract.arrays import Float32
from freehold.models.spec import ModelSpec


class TensorFormat(StrEnum):
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    IQ4_NL = "IQ4_NL"
    MXFP4 = "MXFP4"
    Q2_K = "Q2_K"
    Q3_K = "Q3_K"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in its file's format: `data` uint8 [rows, bytes of a row]; vectors have one row."""

    format: TensorFormat
    rows: int
    columns: int
    data: np.ndarray

    @classmethod
    def of(cls, values: Float32) -> StoredTensor:
        """Convert numbers [rows, columns], or [columns]."""
        table = np.ascontiguousarray(np.atleast_2d(values), np.float32)
        return cls(TensorFormat.F32, len(table), table.shape[1], table.view(np.uint8))

    def reorder(self, order: np.ndarray) -> StoredTensor:
        """Return some or all rows in the given order."""
        return StoredTensor(self.format, len(order), self.columns, self.data[order])

    def between(self, first: int, stop: int) -> StoredTensor:
        """Return the rows `first` up to `stop`, without a copy."""
        return StoredTensor(self.format, stop - first, self.columns, self.data[first:stop])

    def leave_memory(self) -> None:
        """Drop pages mapped from a file from this process. Later reads hit the system's cache."""
        array = self.data
        while isinstance(array, np.ndarray):
            mapping = getattr(array, "_mmap", None)
            if isinstance(mapping, mmap.mmap):
                with suppress(AttributeError, OSError):  # not available everywhere
                    mapping.madvise(mmap.MADV_DONTNEED)
                return
            array = array.base

    def to_float32(self) -> Float32:
        """Return [rows, columns], for small tensors and tests."""
        raw = np.ascontiguousarray(self.data)
        if self.format is TensorFormat.F32:
            return raw.view(np.float32).reshape(self.rows, self.columns)
        if self.format is TensorFormat.F16:
            return raw.view(np.float16).astype(np.float32).reshape(self.rows, self.columns)
        if self.format is TensorFormat.BF16:
            wide = raw.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.rows, self.columns)
        import gguf

        kind = gguf.GGMLQuantizationType[self.format.value]
        return gguf.dequantize(raw, kind).reshape(self.rows, self.columns)


@dataclass(frozen=True)
class AdapterMatrices:
    """An adapter's change of one module: output += up [rows, rank] @ down [rank, columns] @ input."""

    down: Float32
    up: Float32


class Checkpoint(Protocol):
    """A model on disk. `tensor_shapes.py` lists its tensors' names and shapes."""

    path: Path

    @property
    def spec(self) -> ModelSpec: ...

    def field(self, name: str, default: Any = None) -> Any:
        """Return a metadata value of the file (GGUF) or of config.json."""
        ...

    def has(self, name: str) -> bool:
        """Return whether a tensor has that name."""
        ...

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor. Raises KeyError with the name if the checkpoint lacks it."""
        ...

    def module(self, name: str) -> str | None:
        """Return Hugging Face's name of the module whose weight this tensor is, such as layers.0.self_attn.q_proj; None
        if the tensor is only a part of it, or something else."""
        ...
