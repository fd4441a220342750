"""The engine's thread, around a runner that does as it is told."""

import pytest

from freehold.engine.engine import StepThread


class FailingRunner:
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
    def prepare():
        raise OSError("no threads")

    with pytest.raises(OSError, match="no threads"):
        StepThread(FailingRunner(), prepare).wait_until_warm()
