"""Steps of few tokens, recorded once and done again (`program.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from freehold.arrays import Float32, Int32
from freehold.engine.cpu.attention import BATCH
from freehold.engine.cpu.batch import CpuBatch
from freehold.engine.cpu.program import Operations, Program

TOKENS_MAX = 64  # of a step that is recorded: with more, Python takes less time than the operations
ROWS_MAX = 4  # whose logits are recorded: each number of rows has room of its own for them

Forward = Callable[[Int32, Sequence[Any]], Float32]


class NotRecorded(Exception):
    """A model does something that is not an operation."""


class Recording(Protocol):
    """What sends operations to a program while it is recorded."""

    def recording(self, program: Operations) -> Any: ...

    @property
    def is_adapting(self) -> bool: ...


@dataclass
class _Place:
    """Stands for a batch while a step is recorded: what operations know of it lies here."""

    record: np.ndarray

    def make_room(self, heads: int, size: int) -> None:
        """When the step is done."""


@dataclass
class _Recorded:
    program: Program
    tokens: Int32
    places: list[_Place]
    hidden: Float32


class Recorder:
    """Does forward passes. One with few tokens is recorded, unless adapters change it or the model has states, experts
    or whatever else is no operation."""

    def __init__(self, backend: Recording, forward: Forward):
        self._backend, self._forward = backend, forward
        self._recorded: dict[int, _Recorded] = {}
        self._is_possible = True

    def __call__(self, tokens: Int32, batch: Sequence[Any], heads: Sequence[tuple[int, int]]) -> Float32:
        """-> hidden states, which the next call may overwrite. `heads`: of each cache group, the most heads and numbers
        of a value that a layer has."""
        if len(tokens) > TOKENS_MAX or not self._can_record(batch) or self._backend.is_adapting:
            return self._forward(tokens, batch)
        found = self._recorded.get(len(tokens))
        if found is None:
            try:
                found = self._record(len(tokens), len(batch))
            except NotRecorded:
                self._is_possible = False
                return self._forward(tokens, batch)
            self._recorded[len(tokens)] = found
        found.tokens[:] = tokens
        for place, one, (count, size) in zip(found.places, batch, heads, strict=True):
            one.make_room(count, size)
            place.record[:] = one.record
        found.program.run()
        return found.hidden

    def _can_record(self, batch: Sequence[Any]) -> bool:
        return self._is_possible and all(isinstance(one, CpuBatch) for one in batch)

    def _record(self, count: int, groups: int) -> _Recorded:
        program, tokens = Program(), np.zeros(count, np.int32)
        places = [_Place(np.zeros(1, BATCH)) for _ in range(groups)]
        with self._backend.recording(program):
            hidden = self._forward(tokens, places)
        program.end()
        return _Recorded(program, tokens, places, hidden)


@dataclass
class _RecordedRows:
    program: Program
    rows: Float32
    result: Float32


class RowRecorder:
    """Does a function of rows that adapters don't change: the product with the vocabulary. With few rows it is
    recorded."""

    def __init__(self, backend: Recording, compute: Callable[[Float32], Float32]):
        self._backend, self._compute = backend, compute
        self._recorded: dict[int, _RecordedRows] = {}
        self._is_possible = True

    def __call__(self, rows: Float32) -> Float32:
        """The next call may overwrite the result."""
        if not self._is_possible or len(rows) > ROWS_MAX:
            return self._compute(rows)
        found = self._recorded.get(len(rows))
        if found is None:
            try:
                found = self._recorded[len(rows)] = self._record(rows.shape)
            except NotRecorded:
                self._is_possible = False
                return self._compute(rows)
        found.rows[:] = rows
        found.program.run()
        return found.result

    def _record(self, shape: tuple[int, ...]) -> _RecordedRows:
        program, rows = Program(), np.zeros(shape, np.float32)
        with self._backend.recording(program):
            result = self._compute(rows)
        program.end()
        return _RecordedRows(program, rows, result)
