"""Runs operations immediately, or records them in a program for replay.

Small steps consist of many small operations, and Python takes as long between them as they take themselves. So such
steps are captured once, like CUDA graphs, and replayed for other steps' numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from freehold.engine.cpu.cache_line import LINE
from freehold.engine.cpu.operation import BYTES, COUNT, TABLE_ROW, WORDS, Operation, address
from freehold.engine.cpu.threads import run_operations

ARGUMENTS_MAX = 64  # of an operation
LARGE = 64 << 10  # bytes
_SIZES: dict[type[np.generic], int] = {np.float32: 4, np.int32: 4, np.int16: 2, np.int8: 1}


class Count(NamedTuple):
    """A task count: the number in an array int64 [1], times a factor. It is read when the operation runs."""

    number: np.ndarray
    factor: int


class Operations(Protocol):
    """Accepts operations, in order."""

    def room(self, shape: tuple[int, ...], kind: type[np.generic] = np.float32) -> np.ndarray:
        """Return an uninitialized array aligned to a cache line. Its memory is reused once it is unreferenced."""
        ...

    def add(self, operation: Operation, tasks: int | Count, *arguments: Any) -> None:
        """Run or record an operation. Arguments are in the order of its record: numbers, and arrays, which are passed
        by address."""
        ...


def _values(arguments: Sequence[Any]) -> list[Any]:
    return [_place(one) if isinstance(one, np.ndarray) else one for one in arguments]


def _place(array: np.ndarray) -> int:
    assert array.flags.c_contiguous, "operations know nothing of strides"
    return address(array)


def _row(operation: Operation, tasks: int | Count, record: int, at: int) -> tuple[int, ...]:
    """Return the words of an operation stored at address `at`, with arguments at address `record`."""
    if isinstance(tasks, int):
        return operation.address, record, at + 8 * COUNT, 1, tasks, *_NO_LOOP
    return operation.address, record, address(tasks.number), tasks.factor, 0, *_NO_LOOP


_NO_LOOP = (0,) * (WORDS - COUNT - 1)


def _aligned(size: int) -> np.ndarray:
    """Return bytes aligned to a cache line."""
    raw = np.empty(size + LINE, np.uint8)
    first = -address(raw) % LINE
    return raw[first : first + size]


class _Rooms:
    """Memory for rooms, reused once they are unreferenced."""

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []
        self._free: list[np.ndarray] = []

    def give(self, shape: tuple[int, ...], kind: type[np.generic]) -> np.ndarray:
        count = prod(shape)
        buffer: Any = self._block(count * _SIZES[kind])
        # Not a view of the block as an array: views of the room must reference the room.
        room = np.frombuffer(memoryview(buffer), kind, count)
        weakref.finalize(room, self._free.append, buffer).atexit = False
        return room.reshape(shape)

    def _block(self, size: int) -> np.ndarray:
        large = [number for number, block in enumerate(self._free) if block.nbytes >= size]
        if large:
            return self._free.pop(min(large, key=lambda number: self._free[number].nbytes))
        self.blocks.append(_aligned(-(-max(size, 1) // LINE) * LINE))
        return self.blocks[-1]


class Now:
    """Runs each operation immediately. For one thread."""

    def __init__(self) -> None:
        self._arguments: Any = np.zeros(WORDS + ARGUMENTS_MAX, np.int64)  # an operation, then its arguments
        self._at = address(self._arguments)
        self._large = _Rooms()

    def room(self, shape: tuple[int, ...], kind: type[np.generic] = np.float32) -> np.ndarray:
        size = prod(shape) * _SIZES[kind]
        # The system would clear large arrays page by page on each allocation.
        return self._large.give(shape, kind) if size >= LARGE else _aligned(size).view(kind).reshape(shape)

    def add(self, operation: Operation, tasks: int | Count, *arguments: Any) -> None:
        operation.arguments.pack_into(self._arguments, BYTES, *_values(arguments))
        TABLE_ROW.pack_into(self._arguments, 0, *_row(operation, tasks, self._at + BYTES, self._at))
        run_operations(self._at, 1)


class Program:
    """Records operations, and replays them on each `run`.

    Rooms are reused during recording, since operations run in recorded order. So a room must stay referenced for as
    long as it is needed.
    """

    def __init__(self) -> None:
        self._recorded: list[tuple[Operation, int | Count, np.ndarray]] = []
        self._kept: list[np.ndarray] = []  # arrays that operations find by address, which may have no other reference
        self._rooms = _Rooms()
        self._table = np.zeros((0, WORDS), np.int64)

    def room(self, shape: tuple[int, ...], kind: type[np.generic] = np.float32) -> np.ndarray:
        return self._rooms.give(shape, kind)

    def add(self, operation: Operation, tasks: int | Count, *arguments: Any) -> None:
        record: Any = np.empty(operation.arguments.size // 8, np.int64)
        operation.arguments.pack_into(record, 0, *_values(arguments))
        numbers = [] if isinstance(tasks, int) else [tasks.number]
        found = [one for one in (*arguments, *numbers) if isinstance(one, np.ndarray)]
        self._kept.extend(one for one in found if not self._is_room(one))
        self._recorded.append((operation, tasks, record))

    def _is_room(self, array: np.ndarray) -> bool:
        at = address(array)
        return any(0 <= at - address(block) < block.nbytes for block in self._rooms.blocks)

    def end(self) -> None:
        """Finish recording."""
        self._table = np.empty((len(self._recorded), WORDS), np.int64)
        first = address(self._table)
        for number, (operation, tasks, record) in enumerate(self._recorded):
            self._table[number] = _row(operation, tasks, address(record), first + number * BYTES)

    def run(self) -> None:
        run_operations(address(self._table), len(self._table))
