"""The configuration of an engine process: its options and the operator's changes since."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freehold.config import EngineConfig


@dataclass(frozen=True)
class EngineSetup:
    """A new process applies this before it serves. `weights`: path of the weights that replaced the model's; `paused`:
    the mode of a pause. Adapters and storage are options. If it `has_served` before, it starts even if a storage can't
    be attached."""

    config: EngineConfig
    weights: str | None = None
    paused: str | None = None
    has_served: bool = False

    @classmethod
    def decode(cls, text: str) -> EngineSetup:
        """Return the setup that `encode` wrote."""
        fields = json.loads(text)
        return cls(EngineConfig(**fields.pop("config")), **fields)

    def encode(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def after(self, procedure: str, argument: Any, value: Any) -> EngineSetup:
        """Return the setup after a procedure (`procedures.py`) returned `value`."""
        match procedure:
            case "update_weights":
                return dataclasses.replace(self, weights=argument)
            case "pause":
                return dataclasses.replace(self, paused=argument)
            case "resume":
                return dataclasses.replace(self, paused=None)
            case "load_adapter":
                return self._with_adapters({**self.config.adapter_paths, argument["name"]: argument["path"]})
            case "unload_adapter":
                paths = self.config.adapter_paths.items()
                return self._with_adapters({name: path for name, path in paths if name != argument})
            case "storage" if value["state"] in ("attached", "detached") and value["error"] is None:
                return self._with_storage(value)
            case _:
                return self

    def _with_adapters(self, paths: Mapping[str, str]) -> EngineSetup:
        modules = tuple(f"{name}={path}" for name, path in paths.items())
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, lora_modules=modules, enable_lora=True)
        )

    def _with_storage(self, status: Mapping[str, Any]) -> EngineSetup:
        """Return the setup with the storage of a `StorageBackend.status`. On detach backend and location are unset;
        other options stay."""
        options = {name: value for name, value in status.items() if name.startswith("hicache_") and value is not None}
        if status["hicache_storage_backend"] is None:
            options |= {"hicache_storage_backend": None, "hicache_storage_location": None}
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **options))
