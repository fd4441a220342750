"""Tensors as they come from a file."""

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
    """A tensor in the format of its file: `data` uint8 [rows, bytes of a row]; vectors have one row."""

    format: TensorFormat
    rows: int
    columns: int
    data: np.ndarray

    @classmethod
    def of(cls, values: Float32) -> StoredTensor:
        """From numbers [rows, columns], or [columns]."""
        table = np.ascontiguousarray(np.atleast_2d(values), np.float32)
        return cls(TensorFormat.F32, len(table), table.shape[1], table.view(np.uint8))

    def reorder(self, order: np.ndarray) -> StoredTensor:
        """The same tensor with its rows in another order, or some of them."""
        return StoredTensor(self.format, len(order), self.columns, self.data[order])

    def between(self, first: int, stop: int) -> StoredTensor:
        """Its rows `first` up to `stop`, in the same memory."""
        return StoredTensor(self.format, stop - first, self.columns, self.data[first:stop])

    def leave_memory(self) -> None:
        """If `data` is mapped from a file, what was read of the file leaves this process. Whoever reads it again finds
        it in the system's cache."""
        array = self.data
        while isinstance(array, np.ndarray):
            mapping = getattr(array, "_mmap", None)
            if isinstance(mapping, mmap.mmap):
                with suppress(AttributeError, OSError):  # not everywhere
                    mapping.madvise(mmap.MADV_DONTNEED)
                return
            array = array.base

    def to_float32(self) -> Float32:
        """[rows, columns], for small tensors and tests."""
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
    """What an adapter adds to one module: output += up [rows, rank] @ down [rank, columns] @ input."""

    down: Float32
    up: Float32


class Checkpoint(Protocol):
    """A model on disk. `tensor_shapes.py` lists the names of its tensors, and their shapes."""

    path: Path

    @property
    def spec(self) -> ModelSpec: ...

    def field(self, name: str, default: Any = None) -> Any:
        """A value of the file's metadata (GGUF) or of config.json."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        ...

    def tensor(self, name: str) -> StoredTensor:
        """Raises KeyError with the name if the checkpoint lacks it."""
        ...

    def module(self, name: str) -> str | None:
        """What Hugging Face calls the module whose weight that tensor is, such as layers.0.self_attn.q_proj; None if
        the tensor is only a part of it, or something else."""
        ...
