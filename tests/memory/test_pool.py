import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.memory import OutOfPages, OwnershipError, PagePool
from freehold.memory.ledger import owner as owners
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.recorder import FlightRecorder


def lease(serial: int, count: int) -> np.ndarray:
    return np.full(count, owners.lease(serial), np.int64)


@pytest.fixture
def pool() -> PagePool:
    return PagePool(8, 16, Epochs())


def test_allocation_gives_everything_or_changes_nothing(pool):
    pages = pool.allocate(lease(1, 5))
    assert len(set(pages.tolist())) == 5
    assert 0 not in pages
    with pytest.raises(OutOfPages, match="4 pages asked for, 3 of 8 free"):
        pool.allocate(lease(2, 4))
    assert pool.free_count == 3


def test_a_move_from_the_wrong_owner_names_page_owners_and_history(pool):
    pages = pool.allocate(lease(1, 2))
    with pytest.raises(OwnershipError) as caught:
        pool.move(pages, owners.lease(2), owners.node(7))
    message = str(caught.value)
    assert f"page {pages[0]}" in message
    assert "expected owner lease 2, found lease 1, on its way to node 7" in message
    assert "step 0: free -> lease 1" in message
    assert (pool.owner[pages] == owners.lease(1)).all(), "nothing has changed"


def test_a_pool_has_pages():
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0, 4, Epochs())


def test_freeing_twice_raises(pool):
    pages = pool.allocate(lease(1, 2))
    pool.free(pages, owners.lease(1), fence=0)
    with pytest.raises(OwnershipError):
        pool.free(pages, owners.lease(1), fence=0)
    assert pool.free_count == 8


def test_one_page_named_twice_in_a_move_raises(pool):
    page = pool.allocate(lease(1, 1))
    with pytest.raises(OwnershipError, match="named twice"):
        pool.free(np.repeat(page, 2), owners.lease(1), fence=0)
    assert pool.free_count == 7


def test_pages_freed_under_a_step_in_flight_wait_in_limbo(pool):
    pages = pool.allocate(lease(1, 3))
    first, second = pool.epochs.submit(), pool.epochs.submit()
    pool.free(pages[:1], owners.lease(1), fence=first)
    pool.free(pages[1:], owners.lease(1), fence=second)
    assert (pool.free_count, pool.limbo_count) == (5, 3)
    pool.epochs.complete(first)
    assert pool.collect() == 1
    pool.epochs.complete(second)
    assert pool.collect() == 2
    assert (pool.free_count, pool.limbo_count) == (8, 0)


def test_epochs_pass_only_over_a_gapless_run():
    epochs = Epochs()
    for _ in range(3):
        epochs.submit()
    epochs.complete(2)
    assert epochs.completed == 0
    epochs.complete(1)
    assert epochs.completed == 2
    with pytest.raises(ValueError, match="not in flight"):
        epochs.complete(2)
    with pytest.raises(ValueError, match="not in flight"):
        epochs.complete(4)


def test_the_recorder_is_bounded_and_keeps_the_newest():
    pool = PagePool(4, 1, Epochs())
    pool.recorder._rows = pool.recorder._rows[:8].copy()
    for serial in range(20):
        page = pool.allocate(lease(serial, 1))
        pool.free(page, owners.lease(serial), fence=0)
    history = pool.recorder.history(int(page[0]))
    assert len(history) == 8
    assert str(history[-1]) == "step 0: lease 19 -> free"


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=5, unique=True), st.booleans()), max_size=12)
)
def test_the_recorder_tells_the_newest_moves_of_each_page(batches):
    """Seven moves are kept; a batch may lie across the end of the ring. Owners are one for all pages, or one each."""
    recorder, moves = FlightRecorder(5, 7), []
    for step, (pages, is_each) in enumerate(batches):
        source, target = (np.array(pages) * factor + step if is_each else factor + step for factor in (100, 1000))
        recorder.record(step, np.array(pages, np.int32), source, target)
        for page in pages:
            factors = [100 * page, 1000 * page] if is_each else [100, 1000]
            moves.append((step, page, *(factor + step for factor in factors)))
    for page in range(6):
        assert recorder.history(page) == [move for move in moves[-7:] if move[1] == page]
        assert recorder.history(page, 1) == [move for move in moves[-7:] if move[1] == page][-1:]
