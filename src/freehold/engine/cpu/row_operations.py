"""Row-wise operations on a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from freehold.contract.arrays import Float32
from freehold.engine.cpu.operation import Operation, compiled, fields, given, made_once, numbers
from freehold.engine.cpu.pointwise import Preparation, normalize, prepare_row

if TYPE_CHECKING:
    from freehold.engine.cpu.program import Operations


def _prepare(at, first, stop):
    of = given(at)
    preparation = Preparation(of.step, numbers(of.parameters, np.float32), np.float32(of.epsilon))
    x, out = numbers(of.x, np.float32), numbers(of.out, np.float32)
    for row in range(first, stop):
        prepare_row(preparation, x, row, of.columns, out, row * of.columns)


def _norm_columns(at, first, stop):
    of = given(at)
    x, norm = numbers(of.x, np.float32), numbers(of.norm, np.float32)
    for row in range(first, stop):
        start = row * of.columns + of.start
        normalize(x, start, of.size, norm, np.float32(of.epsilon), x, start)


def _scale(at, first, stop):
    """Scale rows. `step` is the distance between rows of factors: 0 if all use one row."""
    of = given(at)
    x, factors = numbers(of.x, np.float32), numbers(of.factors, np.float32)
    for row in range(first, stop):
        for k in range(of.columns):
            x[row * of.columns + k] *= factors[row * of.step + k] if of.has_factors else np.float32(of.factor)


def _add(at, first, stop):
    """Add to rows. `step` is the distance between rows of addends: 0 if all use one row."""
    of = given(at)
    x, other = numbers(of.x, np.float32), numbers(of.other, np.float32)
    for row in range(first, stop):
        for k in range(of.columns):
            x[row * of.columns + k] += other[row * of.step + k]


def _clear(at, first, stop):
    of = given(at)
    x = numbers(of.x, np.float32)
    for k in range(first * of.columns, stop * of.columns):
        x[k] = np.float32(0)


@made_once
def _preparing() -> Operation:
    return compiled(_prepare, fields("step x parameters epsilon:f columns out"))


@made_once
def _norming_columns() -> Operation:
    return compiled(_norm_columns, fields("x columns start size norm epsilon:f"))


@made_once
def _scaling() -> Operation:
    return compiled(_scale, fields("x columns factor:f factors has_factors step"))


@made_once
def _adding() -> Operation:
    return compiled(_add, fields("x columns other step"))


@made_once
def _clearing() -> Operation:
    return compiled(_clear, fields("x columns"))


def prepare(operations: Operations, x: Float32, columns: int, preparation: Preparation) -> Float32:
    """Prepare all rows of x for a product: [n, columns]."""
    out = operations.room((len(x), columns))
    operations.add(_preparing(), len(x), preparation.step, x, preparation.parameters, preparation.epsilon, columns, out)
    return out


def norm_columns(operations: Operations, x: Float32, start: int, norm: Float32, epsilon: float) -> None:
    """Apply RMSNorm in place to the columns from `start` covered by `norm` [n]."""
    operations.add(_norming_columns(), len(x), x, x.shape[1], start, len(norm), norm, epsilon)


def _step(x: Float32, other: Float32) -> int:
    """Return the distance between rows of an operand of x: an array like x, or [columns]."""
    assert other.shape in (x.shape, x.shape[1:])
    return x.shape[1] if other.ndim == 2 else 0


def scale(operations: Operations, x: Float32, factor: float | Float32) -> None:
    """Multiply x in place by a number, an array like x, or [columns]."""
    if isinstance(factor, float | int):
        operations.add(_scaling(), len(x), x, x.shape[1], factor, 0, 0, 0)
    else:
        operations.add(_scaling(), len(x), x, x.shape[1], 0.0, factor, 1, _step(x, factor))


def add(operations: Operations, x: Float32, other: Float32) -> None:
    """Add to x in place an array like x or [columns]."""
    operations.add(_adding(), len(x), x, x.shape[1], other, _step(x, other))


def zeros(operations: Operations, shape: tuple[int, int]) -> Float32:
    out = operations.room(shape)
    operations.add(_clearing(), shape[0], out, shape[1])
    return out
