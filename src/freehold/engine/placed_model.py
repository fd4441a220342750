"""A model on a device, with its caches and page tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from freehold.contract.adapter import Adapter
from freehold.contract.arrays import Float32, Int32, Int64
from freehold.contract.step import KVShape
from freehold.engine.device import Device, DeviceBackend, PageBytes
from freehold.models.decoder import Decoder
from freehold.models.spec import CacheLayout, ModelSpec
from freehold.models.tensor import AdapterMatrices, Checkpoint

AdaptedPart = tuple[Adapter, Int64]
PageUpdate = tuple[Int32, Int32, Int32]


class PlacedModel:
    """Owns no page: the scheduler names every slot. `layouts`: its cache groups, those of `shape`. `adapts` allows
    adapters."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        shape: KVShape,
        layouts: Sequence[CacheLayout],
        compute: str,
        adapts: bool = False,
    ):
        columns = -(-shape.token_limit // shape.page_size)
        self._layouts = layouts
        self._tables: list[Int32] = [np.zeros((shape.row_count, columns), np.int32) for _ in layouts]
        self._backend: DeviceBackend = device.backend(layouts, shape, checkpoint.spec.norm_epsilon, compute, adapts)
        self.load(checkpoint)

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    def load(self, checkpoint: Checkpoint) -> None:
        """Switch to other weights of the same shape. On any exception, the old ones stay."""
        decoder: Decoder[Any, Any, Any] = Decoder(checkpoint, self._backend, self._layouts)
        forward, logits = self._backend.recorder(decoder.forward), self._backend.row_recorder(decoder.logits)
        self._decoder, self._forward, self._logits = decoder, forward, logits

    @property
    def adaptable(self) -> Mapping[str, tuple[int, int]]:
        """Tensors that adapters may change, with their rows and columns."""
        return self._backend.adaptable

    def pack_adapter(self, matrices: Mapping[str, AdapterMatrices]) -> object:
        """Pack an adapter's changes of `adaptable` tensors. Thread-safe."""
        return self._backend.pack_adapter(matrices)

    def page_bytes(self) -> Sequence[PageBytes]:
        """Return the page copier of each group."""
        return self._backend.page_bytes()

    @property
    def group_count(self) -> int:
        return len(self._tables)

    def update_pages(self, updates: Sequence[PageUpdate]) -> None:
        """Update each group's page table: (rows, columns, pages), in order."""
        for table, (rows, columns, pages) in zip(self._tables, updates, strict=True):
            table[rows, columns] = pages

    def batch(self, rows: Int64, starts: Int64, counts: Int64, proposed: Int64 | None = None) -> Any:
        """Build a batch: `counts` [n] tokens from positions `starts` [n] of `rows` [n], the last `proposed` [n] of them
        drafts."""
        proposed = np.zeros_like(counts) if proposed is None else proposed
        return self._backend.batch(self._tables, rows, starts, counts, proposed)

    def forward(self, tokens: Int32, batch: Any, adapted: Sequence[AdaptedPart] = ()) -> Float32:
        """Compute a batch's flat tokens, with adapters on some -> hidden states [tokens, features]. The next call may
        overwrite the result."""
        with self._backend.adapting([(adapter.factors, of) for adapter, of in adapted]):
            return self._forward(tokens, batch)

    def settle(self, batch: Any, written: Int64) -> None:
        """Commit verified drafts: the first `written` [n] tokens of each sequence are right."""
        self._backend.settle(batch, written)

    def final(self, hidden: Float32) -> Float32:
        """Return the hidden states after the last norm, [n, features]."""
        return self._decoder.final(np.ascontiguousarray(hidden))

    def logits(self, hidden: Float32) -> Float32:
        """Map hidden states [n, features] to logits [n, vocab]. The next call may overwrite the result."""
        return self._logits(np.ascontiguousarray(hidden))
