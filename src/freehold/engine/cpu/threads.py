"""The threads of the parallel kernels."""

import ctypes.util
import os
import platform
import sys
from typing import Any

import numba
from numba.core import config
from numba.np.ufunc import parallel

from freehold.engine.cpu.operation import run_by_numba

_config: Any = config
_parallel: Any = parallel

# Spins of a waiting OpenMP thread before it sleeps. More is hardly faster alone; beside busy processes it keeps the
# core from the thread that is waited for.
SPIN_COUNT = 1000


def choose_threads() -> None:
    """Choose the runner of parallel loops, before the first one: our team, or a Numba layer if the team is unavailable
    or NUMBA_THREADING_LAYER names one."""
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    if "NUMBA_THREADING_LAYER" in os.environ:
        return
    # Numba's own pool takes 100 us to start a loop, OpenMP 5.
    _config.THREADING_LAYER = "omp" if ctypes.util.find_library("gomp") else "workqueue"
    if sys.platform == "linux" and platform.machine() == "x86_64":
        _parallel._launch_threads()
        from freehold.engine.cpu.team import join_team, run_by_team

        join_team()
        _runner[0] = run_by_team


_runner: list[Any] = [run_by_numba]  # the team's, once it exists


def run_operations(operations: int, count: int) -> None:
    """Run `count` operations from an address on, in order, on the threads of parallel kernels."""
    _runner[0](operations, count, numba.get_num_threads())


def use_threads(count: int | None) -> None:
    """Set the threads of parallel kernels called from this thread; None means one per core."""
    numba.set_num_threads(min(count or os.cpu_count() or 1, _config.NUMBA_NUM_THREADS))
