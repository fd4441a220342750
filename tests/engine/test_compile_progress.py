"""What is said of compiled kernels: nothing where they come from the cache."""

import time

import pytest
from numba.core import event

from freehold.engine.cpu import compile_progress
from freehold.engine.cpu.compile_progress import CompileProgress


def prepare(*seconds: float) -> None:
    with CompileProgress():
        for number, one in enumerate(seconds):
            with event.trigger_event("freehold:compile", data={"name": f"_kernel_{number}"}):
                time.sleep(one)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_progress, "SHOWN_S", 0.2)


def test_nothing_is_said_of_kernels_from_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    prepare(0, 0.01, 0)
    assert capsys.readouterr().err == ""


def test_compilation_is_announced_and_summed_up_once_and_each_kernel_named(capsys: pytest.CaptureFixture[str]) -> None:
    prepare(0, 0.4, 0, 0.4)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" in ")[0].split(" after ")[0] for line in lines] == [
        "freehold: compiling kernels for this machine, once; each that takes a while is named when it is done",
        "freehold: compiled kernel_1",
        "freehold: compiled kernel_3",
        "freehold: all kernels are there",
    ]


def test_a_compilation_that_began_before_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    progress = CompileProgress()
    with event.trigger_event("freehold:compile", data={"name": "early"}):
        progress.begin()
    with progress:
        pass
    assert capsys.readouterr().err == ""


def test_the_second_process_sums_nothing_up(capsys: pytest.CaptureFixture[str]) -> None:
    with CompileProgress(sums_up=False), event.trigger_event("freehold:compile", data={"name": "kernel"}):
        time.sleep(0.4)  # as long as a kernel worth a line takes
    assert [line.split(" in ")[0] for line in capsys.readouterr().err.splitlines()] == ["freehold: compiled kernel"]
