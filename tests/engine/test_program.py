"""Operations done at once, and steps that are recorded and done again."""

import gc

import numpy as np
import pytest

from freehold.contract.step import KVShape
from freehold.engine.cpu import recorder, row_operations
from freehold.engine.cpu.device import CpuDevice
from freehold.engine.cpu.isa import ISAS, Isa
from freehold.engine.cpu.operation import address, made_once
from freehold.engine.cpu.program import Count, Now, Program
from freehold.engine.placed_model import PlacedModel
from freehold.models.loading.truncated import TruncatedCheckpoint

PAGE, PAGES, ROWS, LENGTH = 16, 160, 2, 1280


@pytest.fixture(scope="module", autouse=True)
def device():
    device = CpuDevice()
    device.prepare_thread()
    return device


# -- programs


def test_operations_follow_each_other_whoever_does_them():
    """Each number is changed by each operation, and differently if their order is another."""
    program, x = Program(), np.random.default_rng(0).standard_normal((300, 48)).astype(np.float32)
    start, more = x.copy(), np.arange(48, dtype=np.float32)
    for number in range(200):
        row_operations.add(program, x, more)
        row_operations.scale(program, x, 0.25 + number % 3 / 2)
    program.end()
    program.run()
    once = x.copy()
    for number in range(200):
        start = (start + more) * np.float32(0.25 + number % 3 / 2)
    np.testing.assert_array_equal(once, start)
    for _ in range(20):
        before = x.copy()
        program.run()
        for number in range(200):
            before = (before + more) * np.float32(0.25 + number % 3 / 2)
        np.testing.assert_array_equal(x, before)


def test_a_count_of_tasks_is_read_when_the_operation_is_done():
    program, x, count = Program(), np.zeros((8, 16), np.float32), np.zeros(1, np.int64)
    program.add(row_operations._adding(), Count(count, 2), x, 16, np.ones(16, np.float32), 0)
    program.end()
    for number in (0, 1, 4, 0):
        x[:], count[0] = 0, number
        program.run()
        assert x.sum(axis=1).tolist() == [16.0] * 2 * number + [0.0] * (8 - 2 * number)


def test_operations_without_tasks_are_left_out():
    program, x, none = Program(), np.zeros((3, 16), np.float32), np.zeros(1, np.int64)
    for _ in range(3):
        for _ in range(4):
            program.add(row_operations._adding(), Count(none, 1), x, 16, np.full(16, 100, np.float32), 0)
        row_operations.add(program, x, np.ones(16, np.float32))
    program.end()
    program.run()
    assert x.tolist() == [[3.0] * 16] * 3


def test_operations_are_made_for_each_set_of_instructions():
    """Also for two that are equal as tuples."""
    made: list[Isa] = []
    make = made_once(made.append)
    for _ in range(2):
        for isa in ISAS.values():
            make(isa)
    assert [type(one) for one in made] == [type(one) for one in ISAS.values()]


def test_an_empty_program_does_nothing():
    program = Program()
    program.end()
    program.run()


def test_a_program_keeps_what_it_needs():
    program, x = Program(), np.zeros((1, 16), np.float32)
    row_operations.add(program, x, np.full(16, 3, np.float32))
    program.end()
    gc.collect()
    noise = [np.full(16, 7, np.float32) for _ in range(100)]
    program.run()
    assert x.tolist() == [[3.0] * 16]
    assert len(noise) == 100


@pytest.mark.parametrize("operations", [Now, Program])
def test_a_room_is_given_out_again_once_nobody_refers_to_it(operations):
    operations = operations()
    size = (256, 256)  # large enough to be kept
    first = operations.room(size)
    at, part = address(first), first[3:5, 7:]
    del first
    second = operations.room(size)
    assert address(second) != at, "a part of the first is still referred to"
    del part
    assert address(operations.room(size)) == at
    assert address(second) % 64 == 0


# -- recorded steps


class Steps:
    """A few layers of the bundled model, and what they say of steps of two prompts that go on token by token."""

    def __init__(self, checkpoint, device):
        small = TruncatedCheckpoint(checkpoint, 3)
        layouts = small.spec.cache_layouts()
        shape = KVShape((PAGES,) * len(layouts), PAGE, ROWS, LENGTH, "bfloat16")
        self.model = PlacedModel(small, device, shape, layouts, "int16")
        columns = LENGTH // PAGE
        for row in range(2):
            pages = np.arange(columns, dtype=np.int32) + 1 + row * columns
            places = np.full(columns, row), np.arange(columns, dtype=np.int32), pages
            self.model.update_pages([places] * len(layouts))
        self._rng = np.random.default_rng(1)

    def step(self, rows, starts, counts) -> np.ndarray:
        tokens = self._rng.integers(0, 49_000, sum(counts)).astype(np.int32)
        batch = self.model.batch(*(np.array(numbers, np.int64) for numbers in (rows, starts, counts)))
        return self.model.forward(tokens, batch).copy()

    def all(self) -> list[np.ndarray]:
        found = [self.step([0, 1], [0, 0], [1100, 33])]  # the first has two segments
        for number in range(3):
            found.append(self.step([0], [1100 + number], [1]))
            found.append(self.step([0, 1], [1103 + number, 33 + number], [1, 1]))
        found.append(self.step([1], [36], [5]))
        found.append(self.step([1, 0], [41, 1106], [3, 2]))
        found.append(self.step([1], [44], [recorder.TOKENS_MAX]))
        found.append(self.step([1], [200], [recorder.TOKENS_MAX + 1]))
        return found


def test_recorded_steps_have_the_bits_of_others(checkpoint, device, monkeypatch):
    recorded = Steps(checkpoint, device).all()
    monkeypatch.setattr(recorder, "TOKENS_MAX", 0)
    monkeypatch.setattr(recorder.Recorder, "_record", lambda *_: pytest.fail("recorded"))
    steps = Steps(checkpoint, device)
    monkeypatch.setattr(recorder, "TOKENS_MAX", 64)
    steps.model._forward = steps.model._decoder.forward
    for ours, others in zip(recorded, steps.all(), strict=True):
        np.testing.assert_array_equal(ours, others)


def test_each_number_of_tokens_is_recorded_once(checkpoint, device, monkeypatch):
    counts, record = [], recorder.Recorder._record
    monkeypatch.setattr(
        recorder.Recorder, "_record", lambda self, count, groups: counts.append(count) or record(self, count, groups)
    )
    Steps(checkpoint, device).all()
    assert counts == [1, 2, 5, recorder.TOKENS_MAX]
