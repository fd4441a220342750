"""Names of the model and its adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from freehold.contract.errors import InvalidParameter, NotFound


class Chosen(NamedTuple):
    """A request's model: its name in the answer, and the adapter, empty for none."""

    name: str
    adapter: str = ""


@dataclass(frozen=True)
class ServedModels:
    """The model's names; the first is used in answers to requests that name none. With `allows_any` every other name
    works too. `adapters`: folders of loaded adapters, by name."""

    names: tuple[str, ...]
    allows_any: bool = False
    adapters: Callable[[], Mapping[str, str]] = field(default=dict)

    @property
    def first(self) -> str:
        return self.names[0]

    @property
    def all(self) -> list[str]:
        return [*self.names, *self.adapters()]

    def choose(self, asked: str | None, lora_path: str | None = None) -> Chosen:
        """Return the model and adapter for a request; `lora_path` names an adapter separately. Raises NotFound or
        InvalidParameter."""
        chosen = Chosen(self.first)
        if asked and asked in self.adapters():
            chosen = Chosen(asked, asked)
        elif asked:
            chosen = Chosen(asked if self.allows_any else self.known(asked))
        if not lora_path:
            return chosen
        if chosen.adapter not in ("", lora_path):
            raise InvalidParameter("lora_path", f"'{lora_path}' differs from the model's adapter, '{chosen.adapter}'")
        if lora_path not in self.adapters():
            raise NotFound(f"the adapter '{lora_path}' is not loaded", "lora_path")
        return Chosen(chosen.name, lora_path)

    def known(self, name: str) -> str:
        """Return the name unchanged. Raises NotFound if it is unknown."""
        if name not in self.all:
            raise NotFound(f"the model '{name}' does not exist; this server has '{self.first}'", "model")
        return name
