"""Which steps may still touch memory, and which thread may change it."""

import threading

from freehold.memory.ledger.errors import OwnershipError


class Epochs:
    """Counts steps submitted to the engine and steps known to be complete.

    A page that steps up to `fence` may read or write can be reused once `completed >= fence`. Completions may arrive
    out of order; `completed` advances only over a gapless run.
    """

    def __init__(self) -> None:
        self.submitted = 0
        self.completed = 0
        self._early: set[int] = set()
        self._thread: int | None = None

    def bind_thread(self) -> None:
        """Make the calling thread the one that allocates and frees."""
        self._thread = threading.get_ident()

    def claim_thread(self) -> None:
        """Bind the calling thread if none is bound. Raise OwnershipError in any other thread than the bound one."""
        if self._thread is None:
            self.bind_thread()
        self.check_thread()

    def check_thread(self) -> None:
        """Raise OwnershipError in any other thread than the bound one. Engine and IO threads report; they never move
        pages."""
        if self._thread is not None and threading.get_ident() != self._thread:
            raise OwnershipError(f"thread '{threading.current_thread().name}' is not the one that moves pages")

    def submit(self) -> int:
        """Return the number of the next step."""
        self.submitted += 1
        return self.submitted

    def complete(self, step: int) -> None:
        """Record that `step` has finished. Raise ValueError if it was not in flight."""
        if not self.completed < step <= self.submitted or step in self._early:
            raise ValueError(f"step {step} is not in flight ({self.completed} .. {self.submitted})")
        self._early.add(step)
        while self.completed + 1 in self._early:
            self.completed += 1
            self._early.remove(self.completed)

    def passed(self, fence: int) -> bool:
        return fence <= self.completed
