"""Which steps may still be touching memory, and which thread may change it."""

import threading

from freehold.memory.ledger.errors import OwnershipError


class Epochs:
    """Counts steps submitted to the engine and steps known to be complete.

    A page that a step up to `fence` may read or write can be reused once `completed >= fence`.
    Completions may arrive out of order; `completed` moves only over a gapless run.
    """

    def __init__(self) -> None:
        self.submitted = 0
        self.completed = 0
        self._early: set[int] = set()
        self._thread: int | None = None

    def bind_thread(self) -> None:
        """From now on the calling thread is the one that allocates and frees."""
        self._thread = threading.get_ident()

    def claim_thread(self) -> None:
        """Bind the calling thread if none is bound. Raises OwnershipError in any other thread than the bound one."""
        if self._thread is None:
            self.bind_thread()
        self.check_thread()

    def check_thread(self) -> None:
        """Raise OwnershipError in any other thread than the bound one: an engine or IO thread reports, it
        never moves a page."""
        if self._thread is not None and threading.get_ident() != self._thread:
            raise OwnershipError(f"thread '{threading.current_thread().name}' is not the one that moves pages")

    def submit(self) -> int:
        """The number of the next step."""
        self.submitted += 1
        return self.submitted

    def complete(self, step: int) -> None:
        """Record that `step` has finished. Raises ValueError if it was not in flight."""
        if not self.completed < step <= self.submitted or step in self._early:
            raise ValueError(f"step {step} is not in flight ({self.completed} .. {self.submitted})")
        self._early.add(step)
        while self.completed + 1 in self._early:
            self.completed += 1
            self._early.remove(self.completed)

    def passed(self, fence: int) -> bool:
        return fence <= self.completed
