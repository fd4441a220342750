"""The model's names."""

from __future__ import annotations

from dataclasses import dataclass

from freehold.errors import NotFound


@dataclass(frozen=True)
class ServedModels:
    """The model under one name or several; the first is that of answers to requests that name none. With
    `allows_any` every other name means it, too."""

    names: tuple[str, ...]
    allows_any: bool = False

    @property
    def first(self) -> str:
        return self.names[0]

    def name(self, asked: str | None) -> str:
        """What the answer to a request for this model says. Raises NotFound."""
        if not asked:
            return self.first
        return asked if self.allows_any else self.known(asked)

    def known(self, name: str) -> str:
        """The same name. Raises NotFound if it is not one of ours."""
        if name not in self.names:
            raise NotFound(f"the model '{name}' does not exist; this server has '{self.first}'", "model")
        return name
