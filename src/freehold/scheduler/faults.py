"""Where a fault ends one request, and where it ends the engine.

While a waiting request is looked at, nothing is moved; and stops are looked for in the output of one request alone.
What is raised there ends this request with an error, and the others go on. Once pages, pins or rows begin to move, a
fault may have left them half moved: it ends the engine, and so does a broken invariant anywhere.
"""

from __future__ import annotations

from freehold.contract.errors import EngineFailed, FreeholdError
from freehold.memory import BrokenInvariant


def is_broken(error: BaseException) -> bool:
    """Whether an error says that an invariant is broken."""
    return isinstance(error, (BrokenInvariant, AssertionError))


def fault_of_one(error: Exception) -> FreeholdError:
    """The error that the request meets. Raises `error` again if it is a broken invariant."""
    if is_broken(error):
        raise error
    if isinstance(error, FreeholdError):
        return error
    return EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
