"""What makes compilation quick."""

from typing import Any

from numba.core import ir

_Scope: Any = ir.Scope


def share_scopes() -> None:
    """Numba copies the code of a function that it inlines, and with each block a list of all variables again. Nothing
    changes them in one copy alone, and they took a quarter of the time."""
    _Scope.__deepcopy__ = lambda self, memo: self
