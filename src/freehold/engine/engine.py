"""The engine: a thread that launches steps in submission order, once its kernels are warm."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from freehold.contract.errors import as_exception
from freehold.contract.step import Step, StepResult


class StepRunner(Protocol):
    """The runner that the thread drives."""

    def prepare_thread(self) -> None: ...

    def warm_up(self) -> None: ...

    def launch(self, step: Step) -> Future[StepResult]:
        """Launch a step. A device with queues may still be computing on return: the next step is launched before this
        result is read back."""
        ...

    def load_weights(self, source: str) -> bytes: ...


class StepThread:
    """Implements `freehold.contract.step.Engine` around a runner. Kernels release the GIL, so that the scheduler plans
    the next step meanwhile."""

    def __init__(self, runner: StepRunner):
        self._runner = runner
        self._queue: queue.SimpleQueue[tuple[Callable[[], Future[Any]], Future[Any]] | None] = queue.SimpleQueue()
        self._warm: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def wait_until_warm(self) -> None:
        """Wait until the kernels are compiled. Raises what preparation raised; then the thread has ended."""
        self._warm.result()

    def execute(self, step: Step) -> Future[StepResult]:
        return self._submit(lambda: self._runner.launch(step))

    def load_weights(self, source: str) -> Future[bytes]:
        return self._submit(lambda: completed(self._runner.load_weights(source)))

    def _submit(self, launch: Callable[[], Future[Any]]) -> Future[Any]:
        result: Future[Any] = Future()
        self._queue.put((launch, result))
        return result

    def shutdown(self) -> None:
        """Launch what is queued, then end the thread. The results of a device's last steps arrive on their own."""
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
            launch, result = item
            try:
                pending = launch()
            except BaseException as error:  # any failure: continue with the next step
                result.set_exception(as_exception(error))
            else:
                pending.add_done_callback(lambda done, result=result: _pass_on(done, result))


def completed(value: Any) -> Future[Any]:
    """Return a completed future."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _pass_on(done: Future[Any], result: Future[Any]) -> None:
    """Copy the outcome of `done` to `result`, in the thread that completed it."""
    if (error := done.exception()) is not None:
        result.set_exception(as_exception(error))
    else:
        result.set_result(done.result())
