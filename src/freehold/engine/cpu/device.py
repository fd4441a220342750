"""The CPU, as the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence

from freehold.arrays import Int32, Int64
from freehold.engine.cpu import drawing
from freehold.engine.cpu.backend import CpuBackend, CpuKV
from freehold.engine.cpu.batch import CpuBatch
from freehold.engine.cpu.compile_progress import CompileProgress
from freehold.engine.cpu.threads import choose_threading_layer, use_threads
from freehold.engine.device import Drawing
from freehold.models.spec import DecoderSpec
from freehold.step import KVShape


class CpuDevice:
    """Implements `freehold.engine.device.Device`. `thread_count` None is one thread for each core."""

    def __init__(self, thread_count: int | None = None):
        choose_threading_layer()
        self._thread_count = thread_count

    @property
    def drawing(self) -> Drawing:
        return drawing

    def prepare_thread(self) -> None:
        use_threads(self._thread_count)

    def preparation(self) -> CompileProgress:
        return CompileProgress()

    def backend(self, spec: DecoderSpec, shape: KVShape, compute: str) -> CpuBackend:
        groups = spec.layers_of_groups(len(shape.page_counts))
        kv = [
            CpuKV(spec, pages, shape.page_size, shape.kind, len(layers))
            for pages, layers in zip(shape.page_counts, groups, strict=True)
        ]
        return CpuBackend(spec, kv, shape.token_limit, compute)

    def batch(
        self,
        tables: Sequence[Int32],
        page_size: int,
        rows: Int64,
        starts: Int64,
        counts: Int64,
        may_share: Sequence[bool],
    ) -> list[CpuBatch]:
        return [
            CpuBatch.of(table, page_size, rows, starts, counts, shares)
            for table, shares in zip(tables, may_share, strict=True)
        ]
