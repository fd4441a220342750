"""The threads of the parallel kernels."""

import ctypes.util
import os
from typing import Any

import numba
from numba.core import config

_config: Any = config


# How often a thread that waits for the others looks again before it sleeps. More is hardly faster alone; and beside
# busy processes of others it keeps the core from the very thread that is waited for.
SPIN_COUNT = 1000


def choose_threading_layer() -> None:
    """OpenMP starts a parallel loop in 5 us, Numba's own pool in 100; before the first kernel runs."""
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    if "NUMBA_THREADING_LAYER" not in os.environ:
        _config.THREADING_LAYER = "omp" if ctypes.util.find_library("gomp") else "workqueue"


def use_threads(count: int | None) -> None:
    """For parallel kernels called from this thread; None means one a core."""
    numba.set_num_threads(min(count or os.cpu_count() or 1, _config.NUMBA_NUM_THREADS))
