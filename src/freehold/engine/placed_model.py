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
    """Owns no page: every slot it touches was named by the scheduler. `layouts`: its cache groups, those of `shape`.
    `adapts`: adapters may be added."""

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
        """Compute with other weights of the same shape from now on. Whatever is raised, the old ones stay."""
        decoder: Decoder[Any, Any, Any] = Decoder(checkpoint, self._backend, self._layouts)
        forward, logits = self._backend.recorder(decoder.forward), self._backend.row_recorder(decoder.logits)
        self._decoder, self._forward, self._logits = decoder, forward, logits

    @property
    def adaptable(self) -> Mapping[str, tuple[int, int]]:
        """The tensors that adapters may change, and their rows and columns."""
        return self._backend.adaptable

    def pack_adapter(self, matrices: Mapping[str, AdapterMatrices]) -> object:
        """What an adapter adds to `adaptable` tensors. Any thread may call it."""
        return self._backend.pack_adapter(matrices)

    def page_bytes(self) -> Sequence[PageBytes]:
        """How pages of each group are copied."""
        return self._backend.page_bytes()

    @property
    def group_count(self) -> int:
        return len(self._tables)

    def update_pages(self, updates: Sequence[PageUpdate]) -> None:
        """Write to the page table of each group: (rows, columns, pages), in order."""
        for table, (rows, columns, pages) in zip(self._tables, updates, strict=True):
            table[rows, columns] = pages

    def batch(self, rows: Int64, starts: Int64, counts: Int64, proposed: Int64 | None = None) -> Any:
        """`counts` [n] tokens from positions `starts` [n] of `rows` [n], the last `proposed` [n] of them drafts."""
        proposed = np.zeros_like(counts) if proposed is None else proposed
        return self._backend.batch(self._tables, rows, starts, counts, proposed)

    def forward(self, tokens: Int32, batch: Any, adapted: Sequence[AdaptedPart] = ()) -> Float32:
        """The tokens of a batch, flat, and which of them adapters change -> hidden states [tokens, features], which
        the next call may overwrite."""
        with self._backend.adapting([(adapter.factors, of) for adapter, of in adapted]):
            return self._forward(tokens, batch)

    def settle(self, batch: Any, written: Int64) -> None:
        """Of each sequence of the batch, the first `written` [n] tokens are right: its other drafts were not."""
        self._backend.settle(batch, written)

    def final(self, hidden: Float32) -> Float32:
        """Hidden states behind the last norm, [n, features]."""
        return self._decoder.final(np.ascontiguousarray(hidden))

    def logits(self, hidden: Float32) -> Float32:
        """[n, features] -> [n, vocab], which the next call may overwrite"""
        return self._logits(np.ascontiguousarray(hidden))
