"""Speeds up compilation."""

from typing import Any

from numba.core import ir

_Scope: Any = ir.Scope


def share_scopes() -> None:
    """Share scopes in deep copies. Numba copies the list of all variables with each block of an inlined function. It is
    never changed in one copy only, and copying took a quarter of the time."""
    _Scope.__deepcopy__ = lambda self, memo: self
