"""The compiler refuses instructions that its target lacks, even where they would never run.

Here its target is an older processor, in a process of its own. Kernels give the same bits as those for this processor.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_attention import attention_run, layer
from test_products import product

from freehold.engine.cpu import isa
from freehold.engine.cpu.row_scaled import RowScaledMatrix
from freehold.models.tensor import TensorFormat
from random_tensors import stored

OLDER = {"avx2": "haswell", "avx512-vnni": "cascadelake"}  # the first processors that had these sets
TESTS = Path(__file__).parent
PROGRAM = "import sys, test_older_processors; print(test_older_processors.digest(sys.argv[1]))"


def digest(name: str) -> str:
    """The hash of attention and of a product, as the default computes them with a set of instructions."""
    chosen = isa.ISAS[name]
    attended, _ = attention_run(layer(9, 3, 64), 16, 150, [140, 10], kind="bfloat16", isa=chosen)
    rng = np.random.default_rng(0)
    tensor = stored(rng.standard_normal((48, 256)).astype(np.float32), TensorFormat.Q4_1)
    x = rng.standard_normal((19, 256)).astype(np.float32)
    answer = product(RowScaledMatrix.pack([tensor], chosen), x)
    return hashlib.sha256(attended.tobytes() + answer.tobytes()).hexdigest()


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in OLDER if name in isa.available()])
def test_kernels_can_be_compiled_where_nothing_newer_is_there(name):
    settings = {
        "NUMBA_CPU_NAME": OLDER[name],
        "NUMBA_CPU_FEATURES": "",
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent))),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name], env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest(name)


def test_a_processor_that_is_too_old_is_told_so(monkeypatch):
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(isa.llvm, "get_host_cpu_features", lambda: {"sse4.2": True})
    with pytest.raises(RuntimeError, match="F16C"):
        isa.choose()
