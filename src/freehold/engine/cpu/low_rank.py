"""Matrices with adapters: an adapter's change is computed beside the product, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numba import njit, prange

from freehold.contract.arrays import Float32, Int32, Int64
from freehold.engine.cpu.onto import NOTHING, Onto
from freehold.engine.cpu.pointwise import NO_NORM, PLAIN, PLAINLY, ROWS_PARALLEL, Preparation, prepare_row
from freehold.models.tensor import AdapterMatrices

if TYPE_CHECKING:
    from freehold.engine.cpu.program import Operations

Names = tuple[str, ...]


class Matrix(Protocol):
    """`PackedMatrix`, `IntegerMatrix` or `RowScaledMatrix`."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    def multiply(
        self, operations: Operations, x: Float32, out: Float32, preparation: Preparation = PLAINLY,
        onto: Onto = NOTHING,
    ) -> None: ...  # fmt: skip

    def gather(self, operations: Operations, rows: Int32) -> Float32: ...


class LowRank(NamedTuple):
    """An adapter's change of a matrix: `down` [columns, rank] and `up` [rank, rows]."""

    down: Float32
    up: Float32


Factors = Mapping[Names, LowRank]  # by the names of a matrix's tensors


@dataclass
class AdaptedTokens:
    """The current batch's tokens by adapter: its factors, and int64 [n], ascending."""

    parts: Sequence[tuple[Factors, Int64]] = field(default_factory=list[tuple[Factors, Int64]])


@dataclass(frozen=True)
class AdaptableShape:
    """The shape of a matrix of several tensors' rows. It is independent of the loaded weights."""

    names: Names
    row_counts: tuple[int, ...]  # of each tensor
    columns: int

    def pack(self, matrices: Mapping[str, AdapterMatrices]) -> LowRank:
        """Pack an adapter's change, given by tensor name. Each tensor has separate ranks, in which the others' rows are
        0."""
        found = [matrices.get(name) for name in self.names]
        rank = sum(len(one.down) for one in found if one is not None)
        down, up = np.zeros((self.columns, rank), np.float32), np.zeros((rank, sum(self.row_counts)), np.float32)
        first = at = 0
        for one, rows in zip(found, self.row_counts, strict=True):
            if one is not None:
                end = at + len(one.down)
                down[:, at:end] = one.down.T
                up[at:end, first : first + rows] = one.up.T
                at = end
            first += rows
        return LowRank(down, up)


@dataclass(frozen=True)
class AdaptedMatrix:
    """Implements a layer's matrix. Tokens without an adapter, or whose adapter does not change this matrix, get the
    same bits as without adapters."""

    matrix: Matrix
    shape: AdaptableShape
    tokens: AdaptedTokens

    @property
    def rows(self) -> int:
        return self.matrix.rows

    @property
    def columns(self) -> int:
        return self.matrix.columns

    def multiply(
        self, operations: Operations, x: Float32, out: Float32, preparation: Preparation = PLAINLY,
        onto: Onto = NOTHING,
    ) -> None:  # fmt: skip
        """Compute out [n, rows] = onto + prepared(x) [n, columns] @ (weight + adapters' changes).T."""
        self.matrix.multiply(operations, x, out, preparation, onto)
        for factors, tokens in self.tokens.parts:
            added = factors.get(self.shape.names)
            if added is not None:
                add, (step, parameters, epsilon) = _add_few if len(tokens) < ROWS_PARALLEL else _add_many, preparation
                add(step, x.ravel(), parameters, np.float32(epsilon), self.columns, tokens, added.down, added.up, out)

    def gather(self, operations: Operations, rows: Int32) -> Float32:
        return self.matrix.gather(operations, rows)


@njit(inline="always")
def _add(preparation, x, columns, token, down, up, out):
    row, inner = np.empty(columns, np.float32), np.zeros(down.shape[1], np.float32)
    if preparation.step == PLAIN:
        for k in range(columns):
            row[k] = x[token * columns + k]
    else:
        prepare_row(preparation, x, token, columns, row, 0)
    for k in range(columns):
        for r in range(down.shape[1]):
            inner[r] += row[k] * down[k, r]
    for r in range(down.shape[1]):
        for k in range(up.shape[1]):
            out[token, k] += inner[r] * up[r, k]


@njit(nogil=True, cache=True, error_model="numpy")
def _add_few(step, x, norm, epsilon, columns, tokens, down, up, out):
    """Add prepared(x) @ down @ up to the rows `tokens` of out."""
    for i in range(len(tokens)):
        _add(Preparation(step, norm, epsilon), x, columns, tokens[i], down, up, out)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _add_many(step, x, norm, epsilon, columns, tokens, down, up, out):
    """Add likewise, on all threads."""
    for i in prange(len(tokens)):
        _add(Preparation(step, norm, epsilon), x, columns, tokens[i], down, up, out)


def compile_kernels() -> None:
    """Compile the kernels, so that no step waits for them."""
    tokens, one = np.zeros(1, np.int64), np.zeros((16, 16), np.float32)
    for add in (_add_few, _add_many):
        add(PLAIN, one[0].copy(), NO_NORM, np.float32(0), 16, tokens, one, one, one[:1].copy())
