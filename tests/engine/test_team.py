"""Parallel loops that are run by our own threads."""

import threading

import numba
import numpy as np
import pytest
from numba import njit, prange

from freehold.engine.cpu import team
from freehold.engine.cpu.atomics import add, get, put
from freehold.engine.cpu.threads import choose_threads, use_threads

MET = team.WORDS - 1  # a word that nobody else uses


@pytest.fixture(scope="module", autouse=True)
def threads():
    choose_threads()
    if not team.helper_count():
        pytest.skip("one core, or Numba's own threads")
    use_threads(None)


@njit(parallel=True, nogil=True)
def squares(values, out):
    for i in prange(len(values)):
        out[i] += values[i] * values[i]


@njit(parallel=True, nogil=True)
def meet(patience):
    """Whether two pieces ran at the same time: each waits for the other."""
    met = np.zeros(2, np.bool_)
    for i in prange(2):
        add(MET, 1)
        for _ in range(patience):
            if get(MET) == 2:
                met[i] = True
                break
    return met.all()


@njit
def clear():
    put(MET, 0)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 1001])
def test_each_piece_is_done_once(count):
    values = np.arange(count, dtype=np.float64)
    for _ in range(50):
        out = np.zeros(count)
        squares(values, out)
        assert np.array_equal(out, values * values)


@njit(parallel=True, nogil=True)
def count_up(counts, by):
    for i in prange(len(counts)):
        counts[i] += by


@njit(nogil=True)
def one_after_the_other(rounds, few, many):
    for _ in range(rounds):
        count_up(few, 1)
        count_up(many, 2)


def test_whoever_comes_late_to_a_loop_does_nothing_of_the_next():
    """Loops with few and many pieces follow each other so closely that a helper often finds the next one."""
    few, many = np.zeros(2, np.int64), np.zeros(64, np.int64)
    for _ in range(20):
        one_after_the_other(10_000, few, many)
    assert few.tolist() == [200_000] * 2
    assert many.tolist() == [400_000] * 64


def test_two_threads_work_on_one_loop():
    clear()
    assert meet(2_000_000_000)


def test_with_one_thread_the_caller_does_all():
    try:
        numba.set_num_threads(1)
        clear()
        assert not meet(1000)
        assert get_word() == 2
    finally:
        use_threads(None)


@njit
def get_word():
    return get(MET)


def test_several_callers_get_what_they_asked_for():
    """One of them has the team, the others work alone."""
    wrong = []

    def call(seed: int) -> None:
        use_threads(None)
        rng = np.random.default_rng(seed)
        for _ in range(300):
            values = rng.integers(0, 1000, int(rng.integers(1, 4000))).astype(np.float64)
            out = np.zeros(len(values))
            squares(values, out)
            if not np.array_equal(out, values * values):
                wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_helpers_that_have_fallen_asleep_come_back():
    for _ in range(3):
        threading.Event().wait(0.2)
        clear()
        assert meet(2_000_000_000)
