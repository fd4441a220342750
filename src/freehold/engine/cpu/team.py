"""The threads that share parallel loops, in place of Numba's.

Numba's layers divide a loop into as many parts as there are threads, and each waits for all others. A thread that has
to give its core to another process for some milliseconds then holds up the whole engine, 150 times a token. Here a loop
has several pieces for each thread. A thread takes those of its own share in order, which follow each other in memory,
then those of others: the caller does all of them alone if nobody comes. It waits only for pieces that somebody else has
begun, and soon sleeps instead of spinning: a core that is idle is given to the very thread that lacks one.

All words are in one block (`atomics`): a job's number, its pieces, and what to call. A share's word names its job, so
that who comes late to a job finds none of its pieces, and takes none of the next one's.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

import numpy as np
from llvmlite import binding
from numba import cfunc, njit, types

from freehold.engine.cpu.atomics import (
    add,
    call_piece,
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

PIECES = 4  # of a loop, for each thread
SPIN_WORK, SPIN_END = 2000, 400  # looks, before a thread sleeps: for the next loop, and for the end of this one
LINE = 8  # words of a cache line
# A word each, in cache lines of their own where several threads write.
BUSY, JOB, DONE, SLEEPERS, WAITS = range(0, 5 * LINE, LINE)
FUNCTION, ARGUMENTS, SIZES, STEPS, DATA, INNER, ARRAYS, SHARES, HELPERS = range(5 * LINE, 5 * LINE + 9)
SHARE = 7 * LINE  # the first thread's: its job, its next piece and where its pieces end, in 32, 16 and 16 bits
CORES = len(os.sched_getaffinity(0))
WORDS = SHARE + (CORES + 1) * LINE
JOBS, PIECES_MAX = 0x7FFFFFFF, 0xFFFF
ARRAYS_MAX, INNER_MAX = 128, 256
# Of this process, like Numba's own threads. It is there before anything is compiled that names it.
_words = place(WORDS)


class _Loop(NamedTuple):
    """A parallel loop as Numba passes it: addresses, and how many sizes and arguments there are. The arguments of piece
    i begin i steps further."""

    function: int
    arguments: int
    sizes: int
    steps: int
    data: int
    inner: int
    arrays: int


@njit(inline="always")
def _run(loop, piece, arguments, sizes):
    """Call the loop's function for one piece; `arguments` and `sizes` are the thread's own."""
    for i in range(loop.arrays):
        arguments[i] = read(loop.arguments, i) + piece * read(loop.steps, i)
    sizes[0] = 1
    for i in range(1, loop.inner + 1):
        sizes[i] = read(loop.sizes, i)
    call_piece(loop.function, arguments.ctypes.data, sizes.ctypes.data, loop.steps, loop.data)


@njit(inline="always")
def _take(job, own, arguments, sizes):
    """Do pieces of a job for as long as it has any, first those of share `own`."""
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
            # The job can't end before this piece is done, so what it says stays.
            loop = _Loop(get(FUNCTION), get(ARGUMENTS), get(SIZES), get(STEPS), get(DATA), get(INNER), get(ARRAYS))
            _run(loop, piece, arguments, sizes)
            add(DONE, 1)
            if get(WAITS):
                wake(DONE)


@njit(nogil=True, cache=True)
def _help(number):
    """A helper's life. It takes part if the job has room for so many."""
    arguments, sizes = np.empty(ARRAYS_MAX, np.int64), np.empty(INNER_MAX, np.int64)
    job = get(JOB)
    while True:
        spun = 0
        while get(JOB) == job and spun < SPIN_WORK:
            pause()
            spun += 1
        if get(JOB) == job:
            add(SLEEPERS, 1)
            sleep_while(JOB, job)
            add(SLEEPERS, -1)
            continue
        job = get(JOB)
        if number + 1 < get(SHARES):
            _take(job, number + 1, arguments, sizes)


@cfunc(types.void(*[types.int64] * 8), cache=True)
def _parallel_for(function, arguments, sizes, steps, data, inner, arrays, threads):
    """Numba calls this for each parallel loop: `sizes[0]` pieces."""
    own, inner_sizes = np.empty(ARRAYS_MAX, np.int64), np.empty(INNER_MAX, np.int64)
    count = read(sizes, 0)
    if threads == 1 or count == 1 or count > PIECES_MAX or not exchange_if(BUSY, 0, 1):
        loop = _Loop(function, arguments, sizes, steps, data, inner, arrays)
        for piece in range(count):
            _run(loop, piece, own, inner_sizes)
        return
    job = (get(JOB) + 1) % JOBS
    put(FUNCTION, function)
    put(ARGUMENTS, arguments)
    put(SIZES, sizes)
    put(STEPS, steps)
    put(DATA, data)
    put(INNER, inner)
    put(ARRAYS, arrays)
    put(DONE, 0)
    shares = min(threads, get(HELPERS) + 1)
    put(SHARES, shares)
    for number in range(shares):
        first, end = number * count // shares, (number + 1) * count // shares
        post(SHARE + number * LINE, job << 32 | first << 16 | end)
    put(JOB, job)
    if get(SLEEPERS):
        wake(JOB)
    _take(job, 0, own, inner_sizes)
    spun = 0
    while get(DONE) < count and spun < SPIN_END:
        pause()
        spun += 1
    while get(DONE) < count:
        put(WAITS, 1)
        done = get(DONE)
        if done < count:
            sleep_while(DONE, done)
        put(WAITS, 0)
    put(BUSY, 0)


@cfunc(types.int64(*[types.int64] * 4), cache=True)
def _piece_count(threads, dimensions, starts, ends):
    """Numba asks this how many pieces a loop shall have."""
    total = 1
    for i in range(dimensions):
        total *= max(read(ends, i) - read(starts, i) + 1, 1)
    return 1 if threads == 1 else min(total, PIECES * threads)


def join_team() -> None:
    """Have all of Numba's parallel loops run by the team. Before the first one is compiled or loaded; it can't be
    undone."""
    if _helpers:
        return
    binding.add_symbol("numba_parallel_for", _parallel_for.address)
    binding.add_symbol("get_sched_size", _piece_count.address)
    _words[HELPERS] = CORES - 1
    for number in range(CORES - 1):
        helper = threading.Thread(target=_help, args=(number,), name=f"team-{number}", daemon=True)
        _helpers.append(helper)
        helper.start()


_helpers: list[threading.Thread] = []


def helper_count() -> int:
    """How many threads help whoever runs a loop; 0 where Numba's own threads do it."""
    return len(_helpers)
