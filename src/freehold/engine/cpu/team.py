"""The compute threads: a team that runs operations in order, each of them together.

An operation is a compiled function over a range of tasks, divided into several pieces per thread. A thread takes the
consecutive pieces of its own share in order, then those of others: one thread runs all if no other comes. The thread
that finishes the last piece starts the next operation. So a preempted thread delays only its current piece, and a whole
step runs without coordination from outside. Idle threads soon sleep instead of spinning: an idle core then goes to the
thread that lacks one.

Numba's parallel loops are operations, too. Its own threads would divide a loop into as many parts as threads, and each
would wait for all others.

All shared words are in one block (`atomics`). A running operation is a job with a number. A share's word names its job,
so that a late thread finds no pieces of its job, and takes none of the next one's.
"""

from __future__ import annotations

import os
import threading

import numpy as np
from llvmlite import binding
from numba import cfunc, njit, types

from freehold.engine.cpu.atomics import (
    add,
    address_of,
    call_piece,
    call_tasks,
    exchange_if,
    get,
    pause,
    place,
    post,
    put,
    read,
    sleep_while,
    wake,
)
from freehold.engine.cpu.operation import (
    ARGUMENTS,
    ARRAYS,
    BYTES,
    COUNT,
    COUNT_AT,
    DATA,
    FACTOR,
    FUNCTION,
    INNER,
    SIZES,
    STEPS,
    task_count,
)

PIECES, TASKS = 4, 16  # minimum pieces of an operation per thread, and maximum tasks of a piece
SPIN_WORK, SPIN_END = 2000, 400  # spins before sleeping: of a helper, and of the calling thread
LINE = 8  # words of a cache line
# One word each, in separate cache lines if several threads write them.
BUSY, JOB, DONE, SLEEPERS = range(0, 4 * LINE, LINE)
OPERATIONS, FIRST, LAST, PIECE_COUNT, SHARES, HELPERS = range(4 * LINE, 4 * LINE + 6)
LOOP = 5 * LINE  # the operation for a parallel loop of Numba's
SHARE = 7 * LINE  # the first thread's: its job, next piece and end of pieces, in 32, 16 and 16 bits
CORES = len(os.sched_getaffinity(0))
WORDS = SHARE + (CORES + 1) * LINE
JOBS, NUMBERS, PIECES_MAX = 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFF
ARRAYS_MAX, INNER_MAX = 128, 256
# Per process, like Numba's own threads. It exists before any code that names it is compiled.
_words = place(WORDS)


@njit(inline="always")
def _run(operation, piece, pieces, arguments, sizes):
    """Run one of `pieces` of an operation; `arguments` and `sizes` are the thread's own."""
    count, function = task_count(operation), read(operation, FUNCTION)
    first, stop = piece * count // pieces, (piece + 1) * count // pieces
    arrays, steps = read(operation, ARRAYS), read(operation, STEPS)
    if arrays == 0:
        call_tasks(function, read(operation, ARGUMENTS), first, stop)
        return
    inner = read(operation, INNER)
    sizes[0] = 1
    for i in range(1, inner + 1):
        sizes[i] = read(read(operation, SIZES), i)
    for task in range(first, stop):
        for i in range(arrays):
            arguments[i] = read(read(operation, ARGUMENTS), i) + task * read(steps, i)
        call_piece(function, arguments.ctypes.data, sizes.ctypes.data, steps, read(operation, DATA))


@njit(inline="always")
def _begin(number):
    """Start operation `number`, or the next one that has tasks, as a new job."""
    operations, last, shares = get(OPERATIONS), get(LAST), get(SHARES)
    while number < last and task_count(operations + number * BYTES) <= 0:
        number += 1
    job = (get(JOB) + 1) % JOBS
    post(FIRST, job << 32 | number)
    if number < last:
        tasks = task_count(operations + number * BYTES)
        pieces = min(tasks, max(PIECES * shares, tasks // TASKS), PIECES_MAX)
        post(PIECE_COUNT, pieces)
        post(DONE, 0)
        for share in range(shares):
            first, end = share * pieces // shares, (share + 1) * pieces // shares
            post(SHARE + share * LINE, job << 32 | first << 16 | end)
    put(JOB, job)
    if get(SLEEPERS):
        wake(JOB)


@njit(inline="always")
def _take(job, own, arguments, sizes):
    """Run pieces of a job while it has any, first those of share `own`."""
    shares = get(SHARES)
    for turn in range(shares):
        share = SHARE + (own + turn) % shares * LINE
        while True:
            word = get(share)
            piece = (word >> 16) & PIECES_MAX
            if word >> 32 != job or piece >= word & PIECES_MAX:
                break
            if not exchange_if(share, word, word + (1 << 16)):
                continue
            # The job can't end before this piece is done, so its words stay.
            number, pieces = get(FIRST) & NUMBERS, get(PIECE_COUNT)
            _run(get(OPERATIONS) + number * BYTES, piece, pieces, arguments, sizes)
            if add(DONE, 1) + 1 == pieces:
                _begin(number + 1)
                return


@njit(inline="always")
def _await(job, patience):
    """Wait until another job begins, or return spuriously."""
    spun = 0
    while get(JOB) == job and spun < patience:
        pause()
        spun += 1
    if get(JOB) == job:
        add(SLEEPERS, 1)
        sleep_while(JOB, job)
        add(SLEEPERS, -1)


@njit(nogil=True, cache=True)
def _help(number):
    """Run a helper. It takes part in jobs with enough shares."""
    arguments, sizes = np.empty(ARRAYS_MAX, np.int64), np.empty(INNER_MAX, np.int64)
    while True:
        job = get(JOB)
        if number + 1 < get(SHARES):
            _take(job, number + 1, arguments, sizes)
        _await(job, SPIN_WORK)


@njit(inline="always")
def _lead(operations, count, shares):
    """Have the team run operations, and take part."""
    arguments, sizes = np.empty(ARRAYS_MAX, np.int64), np.empty(INNER_MAX, np.int64)
    put(OPERATIONS, operations)
    put(LAST, count)
    put(SHARES, shares)
    _begin(0)
    while True:
        job, begun = get(JOB), get(FIRST)
        # FIRST is written before JOB. If JOB is older, the thread that ends the list has yet to write it, and would
        # overwrite a job of the next list.
        if begun >> 32 == job and begun & NUMBERS >= count:
            break
        _take(job, 0, arguments, sizes)
        if get(JOB) == job:
            _await(job, SPIN_END)
    put(BUSY, 0)


@njit(inline="always")
def _alone(operations, count):
    """Run operations without a team."""
    arguments, sizes = np.empty(ARRAYS_MAX, np.int64), np.empty(INNER_MAX, np.int64)
    for number in range(count):
        operation = operations + number * BYTES
        if task_count(operation) > 0:
            _run(operation, 0, 1, arguments, sizes)


@njit(nogil=True, cache=True)
def run_by_team(operations, count, threads):
    """Run `count` operations from the address `operations` on, in order; without helpers if another caller uses
    them."""
    shares = min(threads, get(HELPERS) + 1)
    if shares == 1 or not exchange_if(BUSY, 0, 1):
        _alone(operations, count)
    else:
        _lead(operations, count, shares)


@cfunc(types.void(*[types.int64] * 8), cache=True)
def _parallel_for(function, arguments, sizes, steps, data, inner, arrays, threads):
    """Run a parallel loop for Numba: `sizes[0]` tasks."""
    count = read(sizes, 0)
    shares = min(threads, get(HELPERS) + 1)
    if shares == 1 or count <= 1 or not exchange_if(BUSY, 0, 1):
        own, inner_sizes = np.empty(ARRAYS_MAX, np.int64), np.empty(INNER_MAX, np.int64)
        inner_sizes[0] = 1
        for i in range(1, inner + 1):
            inner_sizes[i] = read(sizes, i)
        for task in range(count):
            for i in range(arrays):
                own[i] = read(arguments, i) + task * read(steps, i)
            call_piece(function, own.ctypes.data, inner_sizes.ctypes.data, steps, data)
        return
    put(LOOP + FUNCTION, function)
    put(LOOP + ARGUMENTS, arguments)
    put(LOOP + COUNT_AT, address_of(LOOP + COUNT))
    put(LOOP + FACTOR, 1)
    put(LOOP + COUNT, count)
    put(LOOP + SIZES, sizes)
    put(LOOP + STEPS, steps)
    put(LOOP + DATA, data)
    put(LOOP + INNER, inner)
    put(LOOP + ARRAYS, arrays)
    _lead(address_of(LOOP), 1, shares)


@cfunc(types.int64(*[types.int64] * 4), cache=True)
def _piece_count(threads, dimensions, starts, ends):
    """Return the number of pieces of a loop, for Numba."""
    total = 1
    for i in range(dimensions):
        total *= max(read(ends, i) - read(starts, i) + 1, 1)
    return 1 if threads == 1 else min(total, PIECES * threads)


def join_team() -> None:
    """Run all of Numba's parallel loops on the team. Call it before the first one is compiled or loaded; it can't be
    undone."""
    if _helpers:
        return
    binding.add_symbol("numba_parallel_for", _parallel_for.address)
    binding.add_symbol("get_sched_size", _piece_count.address)
    _words[HELPERS] = CORES - 1
    _words[SHARES] = 1
    for number in range(CORES - 1):
        helper = threading.Thread(target=_help, args=(number,), name=f"team-{number}", daemon=True)
        _helpers.append(helper)
        helper.start()


_helpers: list[threading.Thread] = []


def helper_count() -> int:
    """Return the number of helper threads; 0 with Numba's own threads."""
    return len(_helpers)
