"""This machine's limits: memory bandwidth, and products of each instruction set.

All are measured, with all threads, since no table knows the speed of a shared core; the best of several times counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import get_num_threads, njit, prange
from numba.core import cgutils, types

from freehold.engine.cpu import amx
from freehold.engine.cpu.attention_pairs import add_pairs
from freehold.engine.cpu.integer_tiles import IntegerVectors
from freehold.engine.cpu.isa import ISAS, Amx, Avx512Bf16
from freehold.engine.cpu.simd import add, load, splat, sum_lanes
from freehold.engine.cpu.vectors import F32, I16, I32, constant, intrinsic, math

BYTES, WORDS, FLOATS, HALVES = "bytes", "words", "floats", "halves"  # types of factors; halves are bfloat16
ROUNDS, SUMS, REPEATS = 20_000, 12, 25
MEMORY_BYTES = 512 << 20
_FLOATS = ir.VectorType(F32, 16)


def bandwidth() -> float:
    """Return the bytes per second read from memory."""
    array = np.ones(MEMORY_BYTES // 4, np.float32)
    return array.nbytes / min(times(lambda: _sum(array, get_num_threads()), REPEATS))


def products(isa: str, kind: str) -> float:
    """Return fused multiply-adds per second of numbers in registers; 0 if the set has no such registers."""
    is_tiled = ISAS[isa].tile > 0
    if kind == HALVES and not (is_tiled or isinstance(ISAS[isa], Avx512Bf16)):
        return 0.0
    run, lanes = _KERNELS[kind], ISAS[isa].lanes
    each = {BYTES: 4 * lanes, WORDS: 2 * lanes, FLOATS: 16, HALVES: 32}[kind]
    if is_tiled and kind != FLOATS:
        each = {BYTES: 64, WORDS: 32, HALVES: 32}[kind] * amx.TILE * amx.TILE  # words are two planes of bytes
    threads = get_num_threads()
    weights, out = np.ones(SUMS * 64, np.int8), np.zeros(16 * threads, np.int32)
    seconds = min(times(lambda: run(ISAS[isa], ROUNDS, weights, out), REPEATS))
    return threads * ROUNDS * SUMS * each / seconds


def times(work: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each run of `work`, after one run to warm up."""
    work()
    seconds: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds


@njit(parallel=True, nogil=True)
def _sum(array: Any, threads: int) -> Any:
    size, sums = len(array) // (8 * threads), np.zeros(8 * threads, np.float32)
    for part in prange(8 * threads):
        one = two = splat(np.float32(0))
        for i in range(part * size, (part + 1) * size - 31, 32):
            one, two = add(one, load(array, i)), add(two, load(array, i + 16))
        sums[part] = sum_lanes(add(one, two))
    return sums


def _multiplying(kind: str) -> Any:
    """Return a kernel (isa, rounds, weights, out). Each thread adds `rounds` products each to SUMS sums in registers,
    with its own weights: int8 [SUMS, 64]. It touches its number in `out` int32 [16 x threads], so that the work is not
    optimized away."""

    def define(typingctx, isa, rounds, weights, out, at) -> Any:
        def codegen(context, builder, signature, values) -> Any:
            where = builder.gep(context.make_array(out)(context, builder, values[3]).data, [values[4]])
            factors = context.make_array(weights)(context, builder, values[2]).data
            if isa.instance_class is Amx and kind != FLOATS:
                _add_tiles(builder, kind, values[1])
            else:
                _add_vectors(builder, IntegerVectors(isa.instance_class), kind, values[1], factors, where)
            return context.get_dummy_value()

        return types.void(isa, rounds, weights, out, at), codegen

    multiply: Any = intrinsic(define)

    @njit(parallel=True, nogil=True)
    def run(isa, rounds, weights, out):
        for thread in prange(len(out) // 16):
            multiply(isa, rounds, weights, out, 16 * thread)

    return run


def _add_vectors(builder, vectors: IntegerVectors, kind: str, rounds, factors, where) -> None:
    operand = {BYTES: vectors.bytes, WORDS: vectors.words, FLOATS: _FLOATS, HALVES: vectors.words}[kind]
    is_float = kind in (FLOATS, HALVES)
    total_kind = _FLOATS if is_float else {BYTES: vectors.byte_total, WORDS: vectors.ints}[kind]
    one, nothing = constant(operand, 1.0 if kind == FLOATS else 1), 0.0 if is_float else 0
    totals = [cgutils.alloca_once_value(builder, constant(total_kind, nothing)) for _ in range(SUMS)]
    inputs = cgutils.alloca_once_value(builder, one)
    weights = [
        builder.load(
            builder.bitcast(builder.gep(factors, [ir.Constant(I32, 64 * number)]), operand.as_pointer()), align=1
        )
        for number in range(SUMS)
    ]
    with cgutils.for_range(builder, rounds):
        # Inputs change in each round: constant products would be computed once.
        before = builder.load(inputs)
        given = builder.fadd(before, one) if kind == FLOATS else builder.add(before, one)
        builder.store(given, inputs)
        for total, of in zip(totals, weights, strict=True):
            builder.store(_added(builder, vectors, kind, builder.load(total), of, given), total)
    for total in totals:
        width = total_kind.count // 2 if total_kind.element == I16 else total_kind.count
        numbers = builder.bitcast(builder.load(total), ir.VectorType(I32, width))
        first = builder.extract_element(numbers, ir.Constant(I32, 0))
        builder.store(builder.add(builder.load(where), first), where)


def _added(builder, vectors: IntegerVectors, kind: str, total, weights, inputs) -> Any:
    if kind == FLOATS:
        return math(builder, "fma", [inputs, weights, total])
    if kind == HALVES:
        return add_pairs(builder, total, inputs, weights)
    add = vectors.add_bytes if kind == BYTES else vectors.add_words
    return add(builder, total, weights, inputs)


def _add_tiles(builder, kind: str, rounds) -> None:
    amx.configure(builder, ((amx.TILE, 64),) * amx.REGISTERS)
    with cgutils.for_range(builder, rounds):
        for number in range(SUMS):
            name = "f16ps" if kind == HALVES else "ssd"
            amx.add_product(builder, name, number % 4, 4 + number % 2, 6 + number % 2)
    amx.release(builder)


_KERNELS = {kind: _multiplying(kind) for kind in (BYTES, WORDS, FLOATS, HALVES)}
