"""LoRA adapters of one model: the loaded ones, and the rows that use them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from freehold.contract.adapter import Adapter
from freehold.contract.arrays import Int64
from freehold.contract.errors import InvalidParameter, NotFound
from freehold.contract.step import RowStart
from freehold.engine.placed_model import AdaptedPart, PlacedModel
from freehold.models.loading.adapter_file import read_adapter
from freehold.models.tensor import AdapterMatrices, Checkpoint


class Adapters:
    """Adapters by name, at most `limit`. Thread-safe."""

    def __init__(self, model: PlacedModel, checkpoint: Checkpoint, limit: int):
        self._model = model
        self._shapes = model.adaptable
        modules = {name: checkpoint.module(name) for name in self._shapes}
        self._tensors = {module: name for name, module in modules.items() if module is not None}
        self._limit = limit
        self._loaded: dict[str, Adapter] = {}
        self._lock = threading.Lock()

    def find(self, name: str) -> Adapter:
        """Return an adapter. Raises NotFound."""
        adapter = self._loaded.get(name)
        if adapter is None:
            raise NotFound(f"the adapter '{name}' is not loaded", "lora_path")
        return adapter

    def load(self, name: str, path: str) -> None:
        """Load an adapter from a PEFT folder. Raises InvalidParameter."""
        self._check(name)
        fingerprint, matrices = read_adapter(Path(path))
        factors = self._model.pack_adapter(self._by_tensor(path, matrices))
        with self._lock:
            self._check(name)
            self._loaded[name] = Adapter(name, fingerprint, factors)

    def load_again(self, paths: Mapping[str, str]) -> None:
        """Load the previous process's adapters: folders by name. Skip adapters that can't be loaded; requests for them
        are refused."""
        for name, path in paths.items():
            try:
                self.load(name, path)
            except (InvalidParameter, OSError) as error:
                print(f"freehold: serving without the adapter '{name}': {error}", file=sys.stderr, flush=True)

    def unload(self, name: str) -> None:
        """Unload an adapter. New requests don't find it; running ones finish with it. Raises NotFound."""
        with self._lock:
            self.find(name)
            del self._loaded[name]

    def _check(self, name: str) -> None:
        if name in self._loaded:
            raise InvalidParameter("lora_name", f"the adapter '{name}' is already loaded")
        if len(self._loaded) >= self._limit:
            raise InvalidParameter("lora_name", f"{len(self._loaded)} adapters are loaded, the limit is {self._limit}")

    def _by_tensor(self, path: str, matrices: dict[str, AdapterMatrices]) -> dict[str, AdapterMatrices]:
        """Return matrices by tensor. Raises InvalidParameter if the model lacks a module, or has it in another
        shape."""
        found: dict[str, AdapterMatrices] = {}
        for module, pair in matrices.items():
            if module not in self._tensors:
                raise InvalidParameter("lora_path", f"{path}: {module} of this model can't be adapted")
            shape = self._shapes[self._tensors[module]]
            if (len(pair.up), pair.down.shape[1]) != shape:
                raise InvalidParameter("lora_path", f"{path}: {module} has another shape than the model's, {shape}")
            found[self._tensors[module]] = pair
        return found


class AdapterRows:
    """The adapters of rows. A row keeps its adapter until another sequence takes it."""

    def __init__(self) -> None:
        self._of: dict[int, Adapter] = {}

    def start(self, start: RowStart) -> None:
        """Assign a row to a sequence."""
        if start.adapter is None:
            self._of.pop(start.row, None)
        else:
            self._of[start.row] = start.adapter

    def parts(self, rows: Int64, sizes: Int64) -> list[AdaptedPart]:
        """Return the adapters of sequences of `sizes` [n] tokens in `rows` [n], and the tokens they apply to."""
        if not self._of:
            return []
        tokens: dict[Adapter, list[Int64]] = {}
        ends = np.cumsum(sizes)
        for i, row in enumerate(rows.tolist()):
            if (adapter := self._of.get(row)) is not None:
                tokens.setdefault(adapter, []).append(np.arange(ends[i] - sizes[i], ends[i]))
        return [(adapter, np.concatenate(of)) for adapter, of in tokens.items()]
