"""The engine's interface to a kind of device. Only `assembly.py` chooses one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from freehold.contract.arrays import Float32, Int32, Int64, UInt8
from freehold.contract.step import KVShape
from freehold.models.backend import Backend
from freehold.models.spec import CacheLayout
from freehold.models.tensor import AdapterMatrices


class Drawing(Protocol):
    """Samples tokens. Takes one row of logits float32 [vocab] at a time, so that rows are independent."""

    def uniform(self, seed: np.uint64, position: int) -> float:
        """Return a number in [0, 1) that depends only on (seed, position)."""
        ...

    def draw(
        self,
        logits: Float32,
        temperature: np.float32,
        top_k: int,
        top_p: float,
        min_p: np.float32,
        chance: float,
    ) -> int:
        """Return the token at quantile `chance` in [0, 1) of the filtered distribution."""
        ...

    def mask(self, logits: Float32, legal: np.ndarray) -> None:
        """Set the logits of tokens to -inf whose bit in `legal` uint32 [ceil(vocab / 32)] is 0."""
        ...

    def penalize(
        self,
        logits: Float32,
        in_prompt: np.ndarray,
        counts: Int32,
        repetition: np.float32,
        presence: np.float32,
        frequency: np.float32,
    ) -> None:
        """Penalize logits in place for tokens of the prompt (bool [vocab]) and output `counts` int32 [vocab]."""
        ...


class Device(Protocol):
    """Owns KV, operations, batches, threads and token sampling."""

    @property
    def drawing(self) -> Drawing: ...

    def prepare_thread(self) -> None:
        """Prepare the thread that runs the steps. Called once, in that thread."""
        ...

    def preparation(self) -> AbstractContextManager[object]:
        """Return a context for the first steps, which may compile kernels. It tells the user why that takes time."""
        ...

    def backend(
        self, layouts: Sequence[CacheLayout], shape: KVShape, epsilon: float, compute: str, adapts: bool
    ) -> DeviceBackend:
        """Return a model's caches in the groups and pages of `shape`, with the operations on them. `epsilon` is that of
        its norms; `compute` is the type that inputs of quantized weights are rounded to; `adapts` allows adapters."""
        ...


class PageBytes(Protocol):
    """Copies pages of one cache group to and from rows of `page_bytes` bytes. Called by copy threads while steps run,
    which never write to these pages."""

    @property
    def page_bytes(self) -> int: ...

    def gather(self, pages: Int32, out: UInt8, to: Int32) -> None:
        """Copy page pages[i] to out[to[i]]; uint8 [rows, page_bytes]."""
        ...

    def scatter(self, pages: Int32, packed: UInt8, at: Int32) -> None:
        """Copy packed[at[i]] to page pages[i]."""
        ...


class DeviceBackend(Backend[Any, Any, Any], Protocol):
    """The decoders' operations, and their batches."""

    def page_bytes(self) -> Sequence[PageBytes]:
        """Return the page copier of each cache group."""
        ...

    def batch(self, tables: Sequence[Int32], rows: Int64, starts: Int64, counts: Int64, proposed: Int64) -> Any:
        """Build a batch. Sequence i has `counts[i]` new tokens from position `starts[i]`, the last `proposed[i]` of
        them drafts, and its pages of each cache group in `tables[group][rows[i]]`."""
        ...

    def recorder(self, forward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Wrap `forward`, which maps tokens and a batch to hidden states. Its steps may be captured and replayed by
        token count. The next call may overwrite the result."""
        ...

    def row_recorder(self, compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a row-wise function likewise."""
        ...

    @property
    def adaptable(self) -> Mapping[str, tuple[int, int]]:
        """Tensors that adapters may change, with their rows and columns."""
        ...

    def pack_adapter(self, matrices: Mapping[str, AdapterMatrices]) -> Any:
        """Pack an adapter's changes of `adaptable` tensors for the kernels. Thread-safe."""
        ...

    def adapting(self, parts: Sequence[tuple[Any, Int64]]) -> AbstractContextManager[None]:
        """Return a context for computing a batch with packed adapters and their tokens int64 [n], ascending."""
        ...

    def settle(self, batch: Any, written: Int64) -> None:
        """Commit verified drafts: the first `written[i]` tokens of sequence i are right. States are set to those after
        that many."""
        ...
