"""The engine: a thread that executes steps in the order they were submitted, once its kernels are warm."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from freehold.step import Step, StepResult


class Runner(Protocol):
    def warm_up(self) -> None: ...

    def run(self, step: Step) -> StepResult: ...


class StepThread:
    """Implements `freehold.step.Engine` around a runner. Kernels release the interpreter lock, so that
    the scheduler plans the next step meanwhile."""

    def __init__(self, runner: Runner, prepare: Callable[[], None] = lambda: None):
        self._runner = runner
        self._queue: queue.SimpleQueue[tuple[Step, Future[StepResult]] | None] = queue.SimpleQueue()
        self.is_warm = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(prepare,), name="engine", daemon=True)
        self._thread.start()

    def execute(self, step: Step) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._queue.put((step, future))
        return future

    def shutdown(self) -> None:
        """Finish what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self, prepare: Callable[[], None]) -> None:
        prepare()
        self._runner.warm_up()
        self.is_warm.set()
        while (item := self._queue.get()) is not None:
            step, future = item
            try:
                future.set_result(self._runner.run(step))
            except Exception as error:
                future.set_exception(error)
