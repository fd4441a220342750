"""Captures small steps once and replays them (`program.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from freehold.contract.arrays import Float32, Int32
from freehold.engine.cpu.attention import BATCH
from freehold.engine.cpu.batch import CpuBatch
from freehold.engine.cpu.program import Operations, Program

TOKENS_MAX = 64  # of a captured step: in larger ones, Python takes less time than the operations
ROWS_MAX = 4  # whose logits are captured: each row count has a separate room for them

T = TypeVar("T")
Forward = Callable[[Int32, Sequence[Any]], Float32]


class NotRecorded(Exception):
    """The model does something that is not an operation."""


class Recording(Protocol):
    """Sends operations to a program while recording."""

    def recording(self, program: Operations) -> Any: ...

    @property
    def is_adapting(self) -> bool: ...


@dataclass
class _Place:
    """Stands for a batch while recording: it holds what operations know of a batch."""

    record: np.ndarray

    def make_room(self, heads: int, size: int) -> None:
        """Do nothing: the real batch makes room when the step runs."""


@dataclass
class _Recorded:
    program: Program
    tokens: Int32
    places: list[_Place]
    hidden: Float32


class _Recordings(Generic[T]):
    """Recordings by the number of rows."""

    def __init__(self) -> None:
        self._of: dict[int, T] = {}
        self._is_possible = True

    def of(self, count: int, record: Callable[[], T]) -> T | None:
        """Return the recording for `count` rows, recording it if necessary. None if it can't be recorded."""
        if count not in self._of and self._is_possible:
            try:
                self._of[count] = record()
            except NotRecorded:
                self._is_possible = False
        return self._of.get(count)


class Recorder:
    """Runs forward passes. Small ones are captured, unless adapters apply or the model has states, experts or anything
    else that is not an operation."""

    def __init__(self, backend: Recording, forward: Forward):
        self._backend, self._forward = backend, forward
        self._recordings: _Recordings[_Recorded] = _Recordings()

    def __call__(self, tokens: Int32, batch: Sequence[Any], heads: Sequence[tuple[int, int]]) -> Float32:
        """Return hidden states, which the next call may overwrite. `heads`: for each cache group, the most heads and
        value numbers of a layer."""
        has_states = not all(isinstance(one, CpuBatch) for one in batch)
        if len(tokens) > TOKENS_MAX or has_states or self._backend.is_adapting:
            return self._forward(tokens, batch)
        found = self._recordings.of(len(tokens), lambda: self._record(len(tokens), len(batch)))
        if found is None:
            return self._forward(tokens, batch)
        found.tokens[:] = tokens
        for place, one, (count, size) in zip(found.places, batch, heads, strict=True):
            one.make_room(count, size)
            place.record[:] = one.record
        found.program.run()
        return found.hidden

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
    """Runs a function of rows that adapters don't change: the product with the vocabulary. Few rows are captured."""

    def __init__(self, backend: Recording, compute: Callable[[Float32], Float32]):
        self._backend, self._compute = backend, compute
        self._recordings: _Recordings[_RecordedRows] = _Recordings()

    def __call__(self, rows: Float32) -> Float32:
        """Compute rows. The next call may overwrite the result."""
        if len(rows) > ROWS_MAX:
            return self._compute(rows)
        found = self._recordings.of(len(rows), lambda: self._record(rows.shape))
        if found is None:
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
