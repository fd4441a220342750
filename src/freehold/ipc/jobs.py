"""Long calls: they run in slices between two scheduler iterations."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from freehold.contract.errors import QueueFull
from freehold.memory import AuditError
from freehold.scheduler.faults import is_broken

SHARE_S = 0.0005  # of each iteration, for all jobs together
JOBS_MAX = 64

Work = Generator[float | None, None, Any]


@dataclass(frozen=True)
class _Job:
    """`due`: clock time in seconds before which it has nothing to do."""

    work: Work
    result: Future[Any]
    due: float = -math.inf


class Jobs:
    """Every call returns a future. A job is a call that returns a generator. It yields at least every half millisecond:
    None to continue soon, or the seconds to sleep. Its return value or exception is its result; cancelling the future
    ends it. Broken invariants are raised here instead."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._jobs: deque[_Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def take(self, call: Callable[[], Any], is_order: bool = False) -> Future[Any]:
        """Run the call and return a future of its result. A value or an exception completes it; a future is returned as
        is. A generator becomes a job, or fails with QueueFull if there are JOBS_MAX and it is no order."""
        result: Future[Any] = Future()
        try:
            value = call()
            if isinstance(value, Generator) and len(self._jobs) >= JOBS_MAX and not is_order:
                raise QueueFull(f"{JOBS_MAX} calls of this kind are in progress: try again later")
        except BaseException as error:
            _fail(result, error)
            return result
        if isinstance(value, Future):
            return value
        if isinstance(value, Generator):
            self._jobs.append(_Job(value, result))
        else:
            result.set_result(value)
        return result

    @property
    def rest_s(self) -> float:
        """Seconds until a job is due; infinity without jobs."""
        return max(0.0, min((job.due for job in self._jobs), default=math.inf) - self._clock())

    def go_on(self) -> bool:
        """Run jobs in turn until their time share is used up. Return whether any was due."""
        end = self._clock() + SHARE_S
        ready = [job for job in self._jobs if job.due <= end]
        self._jobs = deque(job for job in self._jobs if job.due > end)
        was_ready, going = bool(ready), deque(ready)
        while going and self._clock() < end:
            job = going.popleft()
            after = self._slice(job)
            if after is not None:
                (self._jobs if after.due > end else going).append(after)
        self._jobs.extendleft(reversed(going))
        return was_ready

    def _slice(self, job: _Job) -> _Job | None:
        """Run one slice. Return the job if it continues, else None."""
        if job.result.cancelled():
            job.work.close()
            return None
        try:
            rest = next(job.work)
        except StopIteration as end:
            job.result.set_result(end.value)
        except BaseException as error:
            _fail(job.result, error)
        else:
            return _Job(job.work, job.result, -math.inf if rest is None else self._clock() + rest)
        return None


def _fail(result: Future[Any], error: BaseException) -> None:
    """Store the exception as the result, library panics included; re-raise broken invariants."""
    if is_broken(error) and not isinstance(error, AuditError):
        raise error
    result.set_exception(error)
