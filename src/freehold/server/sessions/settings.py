"""The settings of a session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SessionSettings:
    """`timeout` is the idle time in seconds after which a session is closed; None is never. A turn of a `branching`
    session continues any earlier one (see `branches.py`). Only `owner` and admins may use it."""

    timeout: float | None = None
    capacity: int | None = None
    namespace: str = ""
    branching: bool = False
    owner: str = ""
