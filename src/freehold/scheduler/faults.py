"""Which faults end one request, and which end the engine.

Examining a waiting request moves nothing, and stops are matched in the output of one request alone. An error there
ends only that request. Once pages, pins or rows move, a fault may leave them half moved: it ends the engine, as does a
broken invariant anywhere.
"""

from __future__ import annotations

from freehold.contract.errors import EngineFailed, FreeholdError
from freehold.memory import BrokenInvariant


def is_broken(error: BaseException) -> bool:
    """Return whether an error means a broken invariant."""
    return isinstance(error, (BrokenInvariant, AssertionError))


def fault_of_one(error: Exception) -> FreeholdError:
    """Return the error to report to the request. Raise `error` again if it is a broken invariant."""
    if is_broken(error):
        raise error
    if isinstance(error, FreeholdError):
        return error
    return EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
