"""The engine's thread, around a runner that does as it is told."""

from concurrent.futures import Future
from queue import SimpleQueue

import pytest

from freehold.engine.engine import StepThread


class FailingRunner:
    def prepare_thread(self) -> None:
        pass

    def warm_up(self) -> None:
        raise MemoryError("no room for the kernels")

    def launch(self, step):
        raise AssertionError("never")

    def load_weights(self, source):
        raise AssertionError("never")


@pytest.mark.timeout(20)
def test_a_warm_up_that_fails_is_told():
    with pytest.raises(MemoryError, match="no room for the kernels"):
        StepThread(FailingRunner()).wait_until_warm()


@pytest.mark.timeout(20)
def test_a_preparation_that_fails_is_told():
    class Unprepared(FailingRunner):
        def prepare_thread(self) -> None:
            raise OSError("no threads")

    with pytest.raises(OSError, match="no threads"):
        StepThread(Unprepared()).wait_until_warm()


class RunnerOnce:
    """Fails in its first step, and answers the others."""

    def __init__(self):
        self.runs = 0

    def prepare_thread(self) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def launch(self, step):
        self.runs += 1
        if self.runs == 1:
            raise RuntimeError("a bad step")
        pending = Future()
        pending.set_result(self.runs)
        return pending


def test_a_step_that_fails_is_told_and_the_next_one_runs():
    engine = StepThread(RunnerOnce())
    engine.wait_until_warm()
    with pytest.raises(RuntimeError, match="a bad step"):
        engine.execute(None).result(10)
    assert engine.execute(None).result(10) == 2
    engine.shutdown()


class Device:
    """Has a queue: a step is complete when the test says so."""

    def __init__(self):
        self.launched: SimpleQueue[tuple[int, Future]] = SimpleQueue()

    def prepare_thread(self) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def launch(self, step):
        pending = Future()
        self.launched.put((step, pending))
        return pending

    def load_weights(self, source):
        pass


@pytest.mark.timeout(20)
def test_the_next_step_is_launched_before_the_result_of_the_last_one_is_there():
    engine = StepThread(device := Device())
    results = [engine.execute(step) for step in range(3)]
    pending = [device.launched.get(timeout=10) for _ in range(3)]
    assert [step for step, _ in pending] == [0, 1, 2]
    assert not any(result.done() for result in results)
    pending[0][1].set_result("first")
    pending[1][1].set_exception(RuntimeError("the device lost it"))
    assert results[0].result(10) == "first"
    with pytest.raises(RuntimeError, match="the device lost it"):
        results[1].result(10)
    assert not results[2].done()
    engine.shutdown()
    pending[2][1].set_result("last")
    assert results[2].result(10) == "last"


class Panic(BaseException):
    """What a library in Rust raises: no Exception."""


@pytest.mark.timeout(20)
def test_a_panic_in_a_step_ends_the_step_and_not_the_thread():
    class Panicking(RunnerOnce):
        def launch(self, step):
            if not self.runs:
                self.runs += 1
                raise Panic("unwrapped nothing")
            return super().launch(step)

        def load_weights(self, source):
            raise Panic("no weights")

    engine = StepThread(runner := Panicking())
    for work, words in ((engine.execute, "unwrapped nothing"), (engine.load_weights, "no weights")):
        error = work(None).exception(10)
        assert isinstance(error, Exception)
        assert words in str(error)
    assert engine.execute(None).result(10) == runner.runs == 2
    engine.shutdown()


@pytest.mark.timeout(20)
def test_a_panic_of_a_device_is_an_exception():
    engine = StepThread(device := Device())
    result = engine.execute(0)
    device.launched.get(timeout=10)[1].set_exception(Panic("lost"))
    assert isinstance(result.exception(10), Exception)
    engine.shutdown()
