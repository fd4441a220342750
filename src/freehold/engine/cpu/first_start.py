"""A second process that compiles kernels in parallel, on a start with an empty kernel cache.

Numba compiles one function at a time. While the engine compiles attention, the slowest, this compiles other kernels
that every model needs, and stores them in the cache for the engine.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from freehold.engine.cpu import drawing
from freehold.engine.cpu.attention import joining, rotating
from freehold.engine.cpu.batch import CpuBatch
from freehold.engine.cpu.caches import DTYPES
from freehold.engine.cpu.compile_progress import CompileProgress
from freehold.engine.cpu.isa import ISAS, of_attention
from freehold.engine.cpu.kernel_cache import is_kept
from freehold.engine.cpu.step_items import divide
from freehold.engine.cpu.team import run_by_team


def compile_beside(kind: str, isa: str) -> subprocess.Popen[bytes] | None:
    """Start compiling for a KV type and an instruction set in another process, unless the cache has kernels already."""
    if is_kept(divide):
        return None
    command = [sys.executable, "-m", __name__, kind, isa]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _compile(kind: str, isa: str) -> None:
    """Compile the slowest kernels first. Arguments have the types that the engine uses."""
    one = np.ones(1, np.int64)
    CpuBatch.of(np.ones((1, 1), np.int32), 16, one - 1, one - 1, one)
    rotating(DTYPES[kind])
    joining(DTYPES[kind], of_attention(ISAS[isa]))
    run_by_team(0, 0, 1)
    logits, half = np.zeros(32, np.float32), np.float32(0.5)
    drawing.draw(logits, half, 0, 0.5, half, drawing.uniform(0, 0))


if __name__ == "__main__":
    with CompileProgress(sums_up=False):
        _compile(*sys.argv[1:])
