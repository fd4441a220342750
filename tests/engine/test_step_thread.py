"""The engine's thread, around a runner that does as it is told."""

import pytest

from freehold.engine.engine import StepThread


class FailingRunner:
    def prepare_thread(self) -> None:
        pass

    def warm_up(self) -> None:
        raise MemoryError("no room for the kernels")

    def run(self, step):
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

    def run(self, step):
        self.runs += 1
        if self.runs == 1:
            raise RuntimeError("a bad step")
        return self.runs


def test_a_step_that_fails_is_told_and_the_next_one_runs():
    engine = StepThread(RunnerOnce())
    engine.wait_until_warm()
    with pytest.raises(RuntimeError, match="a bad step"):
        engine.execute(None).result(10)
    assert engine.execute(None).result(10) == 2
    engine.shutdown()
