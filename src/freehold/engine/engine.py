"""The engine: a thread that executes steps in the order they were submitted, once its kernels are warm."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from freehold.step import Step, StepResult


class StepRunner(Protocol):
    """What the thread drives."""

    def prepare_thread(self) -> None: ...

    def warm_up(self) -> None: ...

    def run(self, step: Step) -> StepResult: ...

    def load_weights(self, source: str) -> None: ...


class StepThread:
    """Implements `freehold.step.Engine` around a runner. Kernels release the interpreter lock, so that
    the scheduler plans the next step meanwhile."""

    def __init__(self, runner: StepRunner):
        self._runner = runner
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._warm: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def wait_until_warm(self) -> None:
        """Until the kernels are compiled. Raises what preparing raised: then the thread has ended."""
        self._warm.result()

    def execute(self, step: Step) -> Future[StepResult]:
        return self._submit(lambda: self._runner.run(step))

    def load_weights(self, source: str) -> Future[None]:
        return self._submit(lambda: self._runner.load_weights(source))

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.put((work, future))
        return future

    def shutdown(self) -> None:
        """Finish what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            self._runner.prepare_thread()
            self._runner.warm_up()
        except BaseException as error:
            self._warm.set_exception(error)
            return
        self._warm.set_result(None)
        while (item := self._queue.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
