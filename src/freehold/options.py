"""Options declared once: a configuration field's meaning, limits and flag."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Limits:
    """Limits of a value. `above` excludes the bound itself. None is allowed where it is the default."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()

    def refuse(self, name: str, value: Any) -> None:
        """Raise ValueError naming the option and its limits if `value` is outside them."""
        if self.choices and value not in self.choices:
            raise ValueError(f"{name} must be one of {self.choices}, not '{value}'")
        low = self.least is None or value >= self.least
        high = self.most is None or value <= self.most
        strict = self.above is None or self.above < value < math.inf
        if not (low and high and strict):
            raise ValueError(f"{name} must be {self}, not {value}")

    def __str__(self) -> str:
        if self.above is not None:
            return "a positive number" if self.above == 0 else f"above {self.above:g}"
        if self.most is None:
            return f"at least {self.least:g}"
        return f"between {self.least:g} and {self.most:g}"


@dataclass(frozen=True)
class Option:
    """One field of a configuration. `flags` are command-line names besides its own. A secret is never shown."""

    name: str
    type: Any
    default: Any
    help: str
    group: str
    limits: Limits
    flags: tuple[str, ...] = ()
    is_secret: bool = False
    is_size: bool = False  # in bytes; the command line takes units

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"FREEHOLD_{self.name.upper()}"


def option(
    default: Any,
    help: str,
    group: str,
    limits: Limits = Limits(),
    flags: tuple[str, ...] = (),
    is_secret: bool = False,
    is_size: bool = False,
) -> Any:
    """Return a dataclass field with its command-line flag and documentation."""
    declared = {
        "help": help, "group": group, "limits": limits, "flags": flags, "is_secret": is_secret, "is_size": is_size,
    }  # fmt: skip
    return field(default=default, metadata={"option": declared})


def options_of(record: type) -> Iterator[Option]:
    """Yield the options that a dataclass declares, in order."""
    types = get_type_hints(record)
    for one in fields(record):
        if "option" in one.metadata:
            assert one.default is not MISSING
            yield Option(one.name, types[one.name], one.default, **one.metadata["option"])


def check_limits(record: Any) -> None:
    """Raise ValueError for the first field of a dataclass outside its limits."""
    for one in options_of(type(record)):
        value = getattr(record, one.name)
        if value is not None:
            one.limits.refuse(one.name, value)
        elif one.default is not None:
            raise ValueError(f"{one.name} must have a value")
