"""A model on a device, with its KV and page tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from freehold.arrays import Float32, Int32, Int64
from freehold.engine.device import Device
from freehold.models.registry import Decoder, make_decoder
from freehold.models.spec import Checkpoint, DecoderSpec
from freehold.step import KVShape

PageUpdate = tuple[Int32, Int32, Int32]


class PlacedModel:
    """Owns no page: every slot it touches was named by the scheduler."""

    def __init__(self, checkpoint: Checkpoint, device: Device, shape: KVShape, compute: str):
        self._device = device
        self._page_size = shape.page_size
        columns = -(-shape.token_limit // shape.page_size)
        self._tables: list[Int32] = [np.zeros((shape.row_count, columns), np.int32) for _ in shape.page_counts]
        spec = checkpoint.spec
        groups = spec.layers_of_groups(len(self._tables))
        self._may_share = [all(spec.lookback_of(layer) is None for layer in layers) for layers in groups]
        self._backend: Any = device.backend(spec, shape, compute)
        self._decoder: Decoder = make_decoder(checkpoint, self._backend)

    @property
    def spec(self) -> DecoderSpec:
        return self._decoder.spec

    def load(self, checkpoint: Checkpoint) -> None:
        """Compute with other weights of the same shape from now on."""
        self._decoder = make_decoder(checkpoint, self._backend)

    @property
    def group_count(self) -> int:
        return len(self._tables)

    def update_pages(self, updates: Sequence[PageUpdate]) -> None:
        """Write to the page table of each group: (rows, columns, pages), in order."""
        for table, (rows, columns, pages) in zip(self._tables, updates, strict=True):
            table[rows, columns] = pages

    def forward(self, tokens: Int32, rows: Int64, starts: Int64, counts: Int64) -> Float32:
        """`counts` [n] tokens from positions `starts` [n] of `rows` [n], flat -> hidden states [tokens, features]."""
        batch = self._device.batch(self._tables, self._page_size, rows, starts, counts, self._may_share)
        return self._decoder.forward(tokens, batch)

    def logits(self, hidden: Float32) -> Float32:
        """[n, features] -> [n, vocab]"""
        return self._decoder.logits(np.ascontiguousarray(hidden))
