"""A GGUF file's metadata, and the locations of its tensors.

The format is llama.cpp's (docs/gguf.md in ggml). The `gguf` package also reads it, but makes an array of each of a
vocabulary's 50,000 strings, which takes seconds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32  # unless the file says otherwise
BOOL, STRING, ARRAY = 7, 8, 9
LENGTH = struct.Struct("<Q")  # of a string
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Tensor:
    """`shape` is as in the file: fastest dimension first. `data`: its mapped bytes."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray


class _Cursor:
    def __init__(self, data: np.ndarray, at: int):
        self._data = data.data
        self.at = at

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        begin = self.at + LENGTH.size
        self.at = begin + LENGTH.unpack_from(self._data, self.at)[0]
        return str(self._data[begin : self.at], "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        item, count = self.scalar("I"), self.scalar("Q")
        if item in (STRING, ARRAY):
            return [self.value(item) for _ in range(count)]
        values = np.frombuffer(self._data, f"<{SCALARS[item]}", count, self.at)
        self.at += values.nbytes
        return values.tolist()

    def skip(self, kind: int) -> None:
        """Skip a value."""
        if kind == STRING:
            self.at += LENGTH.size + LENGTH.unpack_from(self._data, self.at)[0]
        elif kind == ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in (STRING, ARRAY):
                for _ in range(count):
                    self.skip(item)
            else:
                self.at += count * struct.calcsize(SCALARS[item])
        else:
            self.at += struct.calcsize(SCALARS[kind])


class _Fields(Mapping[str, Any]):
    """Metadata by name. Values are decoded on each access: a cached vocabulary would take tens of megabytes."""

    def __init__(self, data: np.ndarray, places: dict[str, int]):
        self._data = data
        self._places = places

    def __getitem__(self, name: str) -> Any:
        cursor = _Cursor(self._data, self._places[name])
        return cursor.value(cursor.scalar("I"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_layout(path: Path) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return metadata by name and tensors by name. Raises ValueError if the file is not GGUF or is truncated."""
    if path.stat().st_size == 0:
        raise ValueError(f"{path.name} is empty")
    data = np.memmap(path, np.uint8, mode="r")
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise ValueError(f"{path.name} is not a GGUF file")
    cursor, places = _Cursor(data, len(MAGIC)), dict[str, int]()
    try:
        version, tensor_count, field_count = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not supported: only {', '.join(map(str, VERSIONS))} are")
        for _ in range(field_count):
            name = cursor.string()
            places[name] = cursor.at
            cursor.skip(cursor.scalar("I"))
        described = [_describe(cursor) for _ in range(tensor_count)]
    except (struct.error, OverflowError):
        raise ValueError(f"{path.name} is damaged: it ends before its description does") from None
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path.name} can't be read as GGUF: {error}") from None
    fields = _Fields(np.array(data[: cursor.at]), places)  # copied, since the file may change
    alignment = fields.get("general.alignment", ALIGNMENT)
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, kind, offset in described:
        block, size = GGML_QUANT_SIZES[kind]
        if shape[0] % block:
            raise ValueError(f"{path.name} is damaged: rows of {name} have {shape[0]} values, not blocks of {block}")
        end = start + offset + int(np.prod(shape)) // block * size
        if end > len(data):
            raise ValueError(f"{path.name} is damaged: it ends before tensor {name} does")
        tensors[name] = Tensor(shape, kind, data[start + offset : end])
    return fields, tensors


def _describe(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name, dimensions = cursor.string(), cursor.scalar("I")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))
    return name, shape, GGMLQuantizationType(cursor.scalar("I")), cursor.scalar("Q")
