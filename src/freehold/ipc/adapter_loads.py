"""Adapters load in their own thread, so that steps continue meanwhile."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from freehold.contract.adapter import Adapter
from freehold.contract.errors import InvalidParameter


class Adapters(Protocol):
    """`freehold.engine.adapters.Adapters`."""

    def find(self, name: str) -> Adapter: ...

    def load(self, name: str, path: str) -> None: ...

    def unload(self, name: str) -> None: ...


class AdapterLoads:
    """Loads and finds adapters. `adapters` is None if the engine takes none."""

    def __init__(self, adapters: Adapters | None):
        self._adapters = adapters
        self._thread = ThreadPoolExecutor(1, "adapters")

    def find(self, name: str) -> Adapter | None:
        """Return the adapter called `name`, or None for "", the base model. Raises NotFound or InvalidParameter."""
        return self._taking().find(name) if name else None

    def load(self, argument: dict[str, Any]) -> Future[None]:
        """Load an adapter. Raises InvalidParameter, also through the future."""
        return self._thread.submit(self._taking().load, argument["name"], argument["path"])

    def unload(self, name: str) -> None:
        """Unload an adapter. Raises NotFound or InvalidParameter."""
        self._taking().unload(name)

    def _taking(self) -> Adapters:
        if self._adapters is None:
            raise InvalidParameter("lora_path", "adapters are switched off: start with --enable-lora")
        return self._adapters
