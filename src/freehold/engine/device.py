"""What the engine needs of a kind of device. `assembly.py` alone chooses one."""

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
    """Choosing tokens. One row of logits float32 [vocab] at a time: no row sees its neighbours."""

    def uniform(self, seed: np.uint64, position: int) -> float:
        """A number in [0, 1) that depends on (seed, position) alone."""
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
        """The token at `chance` in [0, 1) of the distribution that the filters leave."""
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
        """Change the logits in place for tokens of the prompt (bool [vocab]) and output `counts` int32 [vocab]."""
        ...


class Device(Protocol):
    """Owns KV, operations, batches, threads and the drawing of tokens."""

    @property
    def drawing(self) -> Drawing: ...

    def prepare_thread(self) -> None:
        """Called once, in the thread that runs the steps."""
        ...

    def preparation(self) -> AbstractContextManager[object]:
        """Entered while the first steps run, which may compile kernels: tells the user why that takes time."""
        ...

    def backend(
        self, layouts: Sequence[CacheLayout], shape: KVShape, epsilon: float, compute: str, adapts: bool
    ) -> DeviceBackend:
        """Caches for one model in the groups and pages of `shape`, and the operations on them. `epsilon` is that of its
        norms; `compute` says what inputs of quantized weights are rounded to, `adapts` whether adapters may be
        added."""
        ...


class PageBytes(Protocol):
    """Copies pages of one cache group from and to rows of `page_bytes` bytes. Called by threads that move pages, while
    steps run: nobody writes to the pages meanwhile."""

    @property
    def page_bytes(self) -> int: ...

    def gather(self, pages: Int32, out: UInt8, to: Int32) -> None:
        """out[to[i]] = the bytes of page pages[i]; uint8 [rows, page_bytes]."""
        ...

    def scatter(self, pages: Int32, packed: UInt8, at: Int32) -> None:
        """Page pages[i] gets the bytes packed[at[i]]."""
        ...


class DeviceBackend(Backend[Any, Any, Any], Protocol):
    """The operations of decoders, and the batches that they take."""

    def page_bytes(self) -> Sequence[PageBytes]:
        """For each cache group."""
        ...

    def batch(self, tables: Sequence[Int32], rows: Int64, starts: Int64, counts: Int64, proposed: Int64) -> Any:
        """Sequence i has `counts[i]` new tokens from position `starts[i]`, the last `proposed[i]` of them drafts, its
        pages of each cache group in `tables[group][rows[i]]`."""
        ...

    def recorder(self, forward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """What does `forward`, tokens and a batch to hidden states, and may remember what it does for so many tokens.
        The next call may overwrite the result."""
        ...

    def row_recorder(self, compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same for a function of rows, each by itself."""
        ...

    @property
    def adaptable(self) -> Mapping[str, tuple[int, int]]:
        """The tensors that adapters may change, and their rows and columns."""
        ...

    def pack_adapter(self, matrices: Mapping[str, AdapterMatrices]) -> Any:
        """What an adapter adds to `adaptable` tensors, as the kernels want it. Any thread may call it."""
        ...

    def adapting(self, parts: Sequence[tuple[Any, Int64]]) -> AbstractContextManager[None]:
        """Entered while a batch is computed: packed adapters, and their tokens int64 [n], ascending."""
        ...

    def settle(self, batch: Any, written: Int64) -> None:
        """The drafts of a batch were verified: the first `written[i]` tokens of sequence i are right. States are left
        as those after so many."""
        ...
