"""The CPU as an engine device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from subprocess import Popen

from freehold.contract.step import KVShape
from freehold.engine.cpu import drawing
from freehold.engine.cpu.backend import CpuBackend
from freehold.engine.cpu.caches import GroupCache
from freehold.engine.cpu.compile_progress import CompileProgress
from freehold.engine.cpu.first_start import compile_beside
from freehold.engine.cpu.isa import AUTO, ISAS, choose
from freehold.engine.cpu.threads import choose_threads, use_threads
from freehold.engine.device import Drawing
from freehold.models.quantize import Quantizer
from freehold.models.spec import CacheLayout


class CpuDevice:
    """Implements `freehold.engine.device.Device`. `thread_count` None is one thread per core; `isa` is the instruction
    set of integer products, by default the best available. `quantizer` converts float weights. Raises ValueError if the
    processor lacks the instruction set."""

    def __init__(self, thread_count: int | None = None, isa: str = AUTO, quantizer: Quantizer | None = None):
        choose_threads()
        self.isa = choose(isa)
        self._thread_count = thread_count
        self._quantizer = quantizer
        self._progress = CompileProgress()
        self._compiling: Popen[bytes] | None = None

    @property
    def drawing(self) -> Drawing:
        return drawing

    def prepare_thread(self) -> None:
        use_threads(self._thread_count)

    @contextmanager
    def preparation(self) -> Iterator[None]:
        with self._progress:
            if self._compiling is not None:  # kernels not in the cache yet would be compiled twice
                self._compiling.wait()
            yield

    def backend(
        self, layouts: Sequence[CacheLayout], shape: KVShape, epsilon: float, compute: str, adapts: bool
    ) -> CpuBackend:
        self._progress.begin()
        if self._compiling is None:
            self._compiling = compile_beside(shape.kind, self.isa)
        scratch = shape.row_count * shape.draft_limit
        caches = [
            GroupCache(layout, pages, shape.page_size, shape.kind, scratch)
            for layout, pages in zip(layouts, shape.page_counts, strict=True)
        ]
        return CpuBackend(caches, epsilon, shape.token_limit, compute, adapts, ISAS[self.isa], self._quantizer)
