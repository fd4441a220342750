"""One matrix per head, which multiplies the head's part of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit, prange

from freehold.contract.arrays import Float32
from freehold.engine.cpu.tile import Rows, tile_rows

LANES = 16


@dataclass(frozen=True)
class HeadMatrices:
    """values: float32 [heads, panels, columns, 16], flat; a panel is 16 rows of a head's matrix [rows, columns]."""

    heads: int
    rows: int
    columns: int
    values: Float32

    @classmethod
    def pack(cls, matrices: Sequence[Float32]) -> HeadMatrices:
        rows, columns = matrices[0].shape
        padded = np.pad(np.stack(matrices), ((0, 0), (0, -rows % LANES), (0, 0)))
        panels = padded.reshape(len(matrices), -1, LANES, columns).swapaxes(2, 3)
        return cls(len(matrices), rows, columns, np.ascontiguousarray(panels).ravel())


def multiply_heads(x: Float32, weight: HeadMatrices) -> Float32:
    """Multiply x [n, heads * columns] -> [n, heads * rows]."""
    padded = -(-weight.rows // LANES) * LANES
    out = np.zeros((len(x), weight.heads, padded), np.float32)
    _multiply(x.ravel(), weight.values, weight.heads, weight.columns, len(x), padded, out.ravel())
    return np.ascontiguousarray(out[:, :, : weight.rows]).reshape(len(x), -1)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _multiply(x, values, heads, columns, count, rows, out):
    panels = rows // LANES
    for work in prange(heads * panels):
        head, panel = work // panels, work % panels
        inputs = Rows(x, head * columns, heads * columns)
        weights = Rows(values, work * columns * LANES, LANES)
        tile_rows(inputs, weights, columns, Rows(out, head * rows + panel * LANES, heads * rows), count)
