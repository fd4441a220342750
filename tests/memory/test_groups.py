"""Groups that forget: windows and states beside full attention, in one ledger."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from freehold.memory import AuditError, CacheGroup, LeaseError, Memory, MemoryShape, Namespace, Retention
from freehold.memory.explain import explain, explain_miss
from freehold.memory.ledger import owner
from freehold.memory.ledger.pool import FreedPages

FULL = CacheGroup()
STATE = CacheGroup("state", lookback=1, is_state=True, page_count=12)


def window(tokens: int, pages: int = 40) -> CacheGroup:
    """A group whose layers look at so many tokens, the newest one included."""
    return CacheGroup("window", lookback=tokens - 1, page_count=pages)


def memory_of(*groups: CacheGroup, page_size: int = 4, page_count: int = 64, rows: int = 8) -> Memory:
    shape = MemoryShape(page_count, page_size, rows, 400, "lru", groups=groups, step_tokens=16, pinned_share=1.0)
    return Memory(shape)


def compute(memory: Memory, tokens, match=None, checkpoints=(), chunk: int = 16):
    """A prompt, in chunks, published as it goes on -> its lease."""
    tokens = np.array(tokens, np.int32)
    match = memory.match("", tokens) if match is None else match
    lease = memory.leases.open(match)
    lease.keep_checkpoints(*checkpoints)
    row = np.array([lease.row])
    while lease.committed < len(tokens):
        advance(memory, lease, min(chunk, len(tokens) - lease.committed), decodes=False)
        memory.publish(lease, tokens[: lease.committed])
    memory.leases.slide(row)
    memory.audit()
    return lease


def advance(memory: Memory, lease, count: int, decodes: bool = True) -> None:
    """One step of `count` tokens."""
    row = np.array([lease.row])
    target = np.array([lease.committed + count])
    memory.leases.slide(row)
    assert memory.room.make(row, target, np.array([decodes]))
    memory.leases.extend(row, target, np.array([decodes]))
    step = memory.epochs.submit()
    memory.leases.submit(row, step)
    memory.complete(step)
    memory.leases.commit(row, target, target)


def named(memory: Memory, lease, group: int) -> list[int]:
    """The columns in which a row has pages."""
    return np.flatnonzero(memory.leases.row_pages(lease.row, group)).tolist()


# -- the one rule -------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(0, 300), st.sampled_from([1, 4, 16, 64]))
def test_the_first_column_is_that_of_the_first_token_looked_at(lookback, boundary, size):
    group = CacheGroup("window", lookback=lookback)
    positions = range(max(0, boundary - lookback), boundary)
    expected = positions[0] // size if positions else boundary // size
    assert group.first_column(boundary, size) == expected
    assert group.first_column(np.array([boundary]), size).tolist() == [expected]
    assert CacheGroup().first_column(boundary, size) == 0


def test_a_group_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="lookback must be at least 1"):
        CacheGroup("window", lookback=0)
    with pytest.raises(ValueError, match="looks back on 1 token"):
        CacheGroup("state", lookback=2, is_state=True)
    with pytest.raises(ValueError, match="cache group window: 3 pages, but one row needs"):
        memory_of(FULL, window(9, pages=3))


def boundary_by_force(held: dict[int, set[int]], groups, size: int, columns: int) -> int:
    """The longest prefix, in tokens, from which every group can go on."""
    for end in range(columns, 0, -1):
        if all(
            set(range(group.first_column(end * size, size), end)) <= held[number] for number, group in enumerate(groups)
        ):
            return end * size
    return 0


@pytest.mark.parametrize(("hole", "reached"), [(9, 36), (8, 32), (5, 40), (7, 40)])
def test_behind_a_hole_an_earlier_boundary_is_found(hole, reached):
    """Ten pages, a window of two: the longest part that nothing is missing for, however far back that is."""
    memory = memory_of(FULL, window(8))
    tokens = np.arange(40, dtype=np.int32)
    compute(memory, tokens).release()
    (bounded,) = memory.tree.bounded
    (node,) = memory.tree.path(memory.tree.match(Namespace("", 0), tokens).node)
    bounded.pool.free(node.pages[bounded.number][hole : hole + 1], owner.node(node.serial), 0)
    bounded.page_count -= 1
    node.pages[bounded.number][hole] = 0
    memory.audit()
    assert memory.tree.match(Namespace("", 0), tokens).length == reached


@settings(max_examples=200, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # shrinking would take minutes
@given(st.data())
def test_a_match_ends_where_every_group_can_go_on(data):
    """Holes anywhere, nodes of any length: the same as trying every boundary."""
    size = data.draw(st.sampled_from([1, 4]))
    groups = (FULL, window(data.draw(st.integers(2, 20)), 200), CacheGroup("state", 1, True, 200))
    memory = memory_of(*groups, page_size=size, page_count=200)
    tokens = np.arange(20 * size, dtype=np.int32)
    for end in sorted(data.draw(st.sets(st.integers(1, 19), max_size=3))):  # so that the path has several nodes
        other = np.concatenate([tokens[: end * size], np.full(size, 999, np.int32)])
        compute(memory, other, chunk=size).release()
    lease = compute(memory, tokens, chunk=size)
    lease.release()
    columns = data.draw(st.integers(0, 20))
    held = {number: set(range(20)) for number in range(3)}
    path = memory.tree.path(memory.tree.match(Namespace("", 0), tokens).node)
    for bounded in memory.tree.bounded:
        holes = data.draw(st.sets(st.integers(0, 19)))
        for node in path:
            pages, begin = node.pages[bounded.number], node.start // size
            gone = [
                column - begin for column in holes if begin <= column < begin + len(pages) and pages[column - begin]
            ]
            bounded.pool.free(pages[gone], owner.node(node.serial), 0)
            bounded.page_count -= len(gone)
            pages[gone] = 0
        present = np.concatenate([node.pages[bounded.number] for node in path])
        held[bounded.number] = set(np.flatnonzero(present).tolist())
    memory.audit()
    match = memory.tree.match(Namespace("", 0), tokens, columns * size)
    assert match.known == columns * size
    assert match.length == boundary_by_force(held, groups, size, columns)
    assert match.length == 0 or match.node.start < match.length <= match.node.end
    if match.length:
        lease = memory.leases.open(match)
        memory.audit()
        lease.release()
    memory.audit()


# -- what a row keeps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("tokens", [2, 5, 17])
def test_a_row_keeps_its_window_however_long_it_gets(size, tokens):
    memory = memory_of(FULL, window(tokens, 80), page_size=size, page_count=400)
    lease = compute(memory, range(40))
    most = -(-(tokens - 1) // size) + 2
    for _ in range(200):
        advance(memory, lease, 1)
        assert len(named(memory, lease, 1)) <= most
        first = max(0, lease.committed + 1 - tokens) // size  # the oldest that the next token looks at
        last = (lease.committed - 1) // size
        assert set(range(first, last + 1)) <= set(named(memory, lease, 1))
        memory.audit()
    assert len(named(memory, lease, 0)) == -(-240 // size)
    lease.release()
    memory.audit()


def test_a_row_holds_two_states_and_three_while_it_crosses_a_page():
    memory = memory_of(FULL, STATE)
    lease = compute(memory, range(18))
    for _ in range(100):
        advance(memory, lease, 1)
        assert len(named(memory, lease, 1)) <= 3
        last = (lease.committed - 1) // 4
        assert last in named(memory, lease, 1)
        if lease.committed >= 4:
            assert lease.committed // 4 - 1 in named(memory, lease, 1), "the state at the last page's end is gone"
        memory.leases.slide(np.array([lease.row]))
        assert len(named(memory, lease, 1)) <= 2
    lease.release()
    memory.audit()


def test_a_long_prompt_leaves_states_where_it_ends_and_where_it_was_told_to():
    memory = memory_of(FULL, STATE)
    compute(memory, range(58), checkpoints=(56, 20), chunk=50).release()
    (node,) = [node for node in memory.tree.nodes() if node.parent is not None]
    assert np.flatnonzero(node.pages[1]).tolist() == [20 // 4 - 1, 50 // 4, 56 // 4 - 1]
    assert memory.match("", np.arange(58, dtype=np.int32)).length == 56
    assert memory.match("", np.r_[np.arange(22), 900, 900].astype(np.int32)).length == 20
    assert memory.match("", np.r_[np.arange(19), 900, 900].astype(np.int32)).length == 0


def test_a_row_does_not_keep_what_its_last_user_was_told_to():
    memory = memory_of(FULL, STATE)
    first = compute(memory, range(58), checkpoints=(56, 20), chunk=50)
    row = first.row
    first.release()
    second = compute(memory, range(100, 158), chunk=58)
    assert second.row == row
    assert named(memory, second, 1) == [57 // 4]
    second.release()


def test_checkpoints_at_an_interval():
    shape = MemoryShape(64, 4, 8, 400, groups=(FULL, CacheGroup("state", 1, True, 69)), checkpoint_interval=16)
    memory = Memory(shape)
    compute(memory, range(100), chunk=100).release()
    for end in (16, 32, 48, 64):
        found = memory.match("", np.r_[np.arange(end + 3), 900, 900].astype(np.int32))
        assert (found.length, found.known) == (end, end)
    with pytest.raises(ValueError, match="checkpoint_interval must be a multiple of 4"):
        MemoryShape(64, 4, checkpoint_interval=6)


def test_a_column_without_a_state_is_written_as_0_for_the_engine():
    """Or a kernel would leave a state in the page that the row's last user had there."""
    memory = memory_of(FULL, STATE)
    first = memory.leases.open(memory.match("", np.zeros(1, np.int32)))
    advance(memory, first, 30)
    row = first.row
    first.release()
    memory.leases.page_tables.take_updates()
    second = memory.leases.open(memory.match("", np.ones(1, np.int32)))
    assert second.row == row
    advance(memory, second, 30, decodes=False)
    _, columns, pages = memory.leases.page_tables.take_updates()[1]
    assert sorted(columns.tolist()) == list(range(8))
    assert np.count_nonzero(pages) == 1
    second.release()


# -- borrowing ----------------------------------------------------------------------------------------------


def test_only_what_a_row_looks_at_is_borrowed_and_the_rest_can_go():
    memory = memory_of(FULL, window(9, 21), page_count=100)
    lease = compute(memory, range(60))
    bounded = memory.tree.bounded[0]
    assert bounded.borrowed_count == 2  # columns 13 and 14 of 15: 8 tokens
    before = bounded.page_count
    assert bounded.evict(100) == before - 2
    assert named(memory, lease, 1) == [13, 14]
    memory.audit()
    assert bounded.evict(1) == 0, "what is left is read"
    other = memory.leases.open(memory.tree.match(Namespace("", 0), np.arange(60, dtype=np.int32)))
    lease.release()
    assert bounded.evict(1) == 0, "the other one still reads it"
    other.release()
    assert bounded.evict(100) == 2
    memory.audit()


def test_room_is_counted_without_what_is_read_or_will_be():
    memory = memory_of(FULL, window(9, 40), page_count=100)
    tokens = np.arange(61, dtype=np.int32)
    lease = compute(memory, tokens[:60])
    assert memory.room.reachable.tolist() == [100 - 15, 40 - 2]
    assert memory.room.gained_by(np.array([lease.row]))[0].tolist() == [15, 2]
    lease.release()
    assert memory.room.reachable.tolist() == [100, 40]
    hit = memory.look_up("", tokens)
    assert memory.room.taken_by(hit.match).tolist() == [15, 2]
    for may_unpin in (False, True):
        assert memory.room.can_be_made([85, 38], hit, may_unpin)
        assert not memory.room.can_be_made([85, 39], hit, may_unpin)
        assert not memory.room.can_be_made([86, 38], hit, may_unpin)
    memory.pin("p", "", tokens, None)
    other = memory.look_up("", np.arange(100, 161, dtype=np.int32))
    assert not memory.room.can_be_made([86, 1], other)
    assert memory.room.can_be_made([86, 1], other, may_unpin=True)


def test_a_new_row_does_not_wait_for_states_that_running_rows_take_again():
    """With one token a page, a running row gives one state back in each step, and takes one. So there are enough
    pages free or in limbo at any time, and never enough free: room is made of prefixes instead."""
    memory = memory_of(FULL, CacheGroup("state", lookback=1, is_state=True, page_count=8), page_size=1, page_count=100)
    compute(memory, range(100, 104)).release()
    lease = compute(memory, range(8))
    row, steps = np.array([lease.row]), []
    for length in (9, 10, 11):  # two steps are in flight
        memory.leases.slide(row)
        target = np.array([length])
        assert memory.room.make(row, target, np.array([True]))
        memory.leases.extend(row, target, np.array([True]))
        steps.append(memory.epochs.submit())
        memory.leases.submit(row, steps[-1])
        if len(steps) > 1:
            memory.complete(steps[-2])
        memory.leases.commit(row, target, target)
    memory.leases.slide(row)
    (states,) = memory.tree.bounded
    limbo, free = states.pool.limbo_count, states.pool.free_count
    assert limbo > 0
    assert states.evictable_count > 0
    assert memory.room.reachable[1] == free + limbo + states.evictable_count
    hit = memory.look_up("", np.array([7], np.int32))
    assert memory.room.can_be_made([1, free + states.evictable_count], hit)
    assert not memory.room.can_be_made([1, free + states.evictable_count + 1], hit)
    assert memory.room.make_for([1, free + 1])
    assert states.pool.limbo_count == limbo, "what running rows take again is left to them"
    memory.complete(steps[-1])
    lease.release()
    memory.audit()


def test_pages_that_a_step_in_flight_may_read_wait_for_it():
    memory = memory_of(FULL, window(5))
    lease = compute(memory, range(12))
    row = np.array([lease.row])
    memory.leases.extend(row, np.array([17]))
    step = memory.epochs.submit()
    memory.leases.submit(row, step)
    memory.leases.commit(row, np.array([17]), np.array([17]))
    memory.leases.slide(row)
    bounded = memory.tree.bounded[0]
    read = 1  # column that the step looks at, and nobody after it
    before = bounded.pool.limbo_count
    bounded.evict(100)
    assert bounded.pool.limbo_count == before + read
    free = bounded.pool.free_count
    memory.complete(step)
    assert bounded.pool.free_count >= free + read
    lease.release()
    memory.audit()


def test_pages_of_a_leaf_wait_for_the_last_step_that_may_read_one_of_them():
    """Two readers end whose windows overlap, while a step of each is in flight; then the whole prefix is evicted."""
    memory = memory_of(FULL, window(9))
    tokens = np.arange(13, dtype=np.int32)
    compute(memory, tokens[:12]).release()
    for end in (9, 13):
        reader = memory.leases.open(memory.match("", tokens[:end]))
        assert reader.shared == end - 1
        memory.leases.submit(np.array([reader.row]), memory.epochs.submit())
        reader.release()
    first, second = memory.epochs.submitted - 1, memory.epochs.submitted
    assert memory.tree.evictor.evict(3, "a test") == 3
    assert [pool.limbo_count for pool in memory.pools] == [3, 3]
    memory.complete(first)
    assert [pool.limbo_count for pool in memory.pools] == [3, 3], "the second may still read them"
    memory.complete(second)
    assert [pool.free_count for pool in memory.pools] == [64, 40]


def test_what_a_step_in_flight_reads_goes_last():
    """Or a row that reads on would wait in each step for the pages that it gave back in the one before."""
    memory = memory_of(FULL, window(5))
    lease = compute(memory, range(12))
    compute(memory, range(100, 120)).release()
    row = np.array([lease.row])
    memory.leases.extend(row, np.array([20]))
    step = memory.epochs.submit()
    memory.leases.submit(row, step)
    memory.leases.commit(row, np.array([20]), np.array([20]))
    memory.leases.slide(row)
    (windows,) = memory.tree.bounded
    free, limbo, all_of_it = windows.pool.free_count, windows.pool.limbo_count, windows.evictable_count
    assert windows.evict(all_of_it - 1) == all_of_it - 1
    assert windows.pool.free_count == free + all_of_it - 1
    assert windows.evict(1) == 1
    assert (windows.pool.free_count, windows.pool.limbo_count) == (free + all_of_it - 1, limbo + 1)
    memory.complete(step)
    lease.release()
    memory.audit()


def test_giving_back_what_was_not_borrowed_is_an_error():
    memory = memory_of(FULL, window(5))
    compute(memory, range(12)).release()
    with pytest.raises(LeaseError, match="has no reader"):
        memory.tree.bounded[0].give_back(np.array([1], np.int32), 0)


def test_a_pin_borrows_what_going_on_from_its_end_takes():
    memory = memory_of(FULL, window(9))
    tokens = np.arange(40, dtype=np.int32)
    compute(memory, tokens).release()
    memory.pin("p", "", tokens, None)
    bounded = memory.tree.bounded[0]
    bounded.evict(100)
    memory.audit()
    assert memory.tree.match(Namespace("", 0), tokens).length == 40
    memory.pins.unpin("p")
    assert bounded.evict(100) == 2
    assert memory.tree.match(Namespace("", 0), tokens).length == 0
    memory.audit()


# -- what goes first, and what comes back -------------------------------------------------------------------


def test_pages_that_no_end_looks_back_on_go_first():
    memory = memory_of(FULL, window(9, 60), page_count=100)
    for first in (0, 100, 200):
        compute(memory, range(first, first + 60)).release()
    bounded = memory.tree.bounded[0]
    bounded.evict(3 * 13)
    assert bounded.page_count == 3 * 2
    for first in (0, 100, 200):
        tokens = np.arange(first, first + 60, dtype=np.int32)
        assert memory.tree.match(Namespace("", 0), tokens).length == 60
    bounded.evict(1)
    lengths = [
        memory.tree.match(Namespace("", 0), np.arange(first, first + 60, dtype=np.int32)).length
        for first in (0, 100, 200)
    ]
    assert lengths == [0, 60, 60], "least recently used first, and nothing is kept of half a window"
    assert bounded.page_count == 4
    memory.audit()


def test_the_end_of_a_retained_prefix_goes_last():
    memory = memory_of(FULL, window(9, 60), page_count=100)
    for first in (0, 100):
        lease = compute(memory, range(first, first + 40))
        if first == 0:
            memory.retain(lease, Retention(), 0.0)
        lease.release()
    memory.tree.bounded[0].evict(2 * 8 + 2)
    assert memory.tree.match(Namespace("", 0), np.arange(40, dtype=np.int32)).length == 40
    assert memory.tree.match(Namespace("", 0), np.arange(100, 140, dtype=np.int32)).length == 0


def test_who_computes_a_prefix_again_fills_its_holes():
    memory = memory_of(FULL, window(9))
    tokens = np.arange(40, dtype=np.int32)
    compute(memory, tokens).release()
    bounded = memory.tree.bounded[0]
    bounded.evict(100)
    full_pages = memory.tree.page_count
    match = memory.match("", tokens)
    assert (match.length, match.known) == (0, 36)
    miss = explain_miss(memory, match, tokens)
    assert miss.reason == "incomplete"
    assert str(miss) == "0 of 40 tokens cached; 9 more pages are cached, but their window or state is gone"
    lease = compute(memory, tokens, match)
    assert memory.tree.page_count == full_pages, "what the full group had is not kept twice"
    assert memory.tree.match(Namespace("", 0), tokens).length == 40
    lease.release()
    memory.audit()


def test_a_full_prefix_that_nobody_can_go_on_from_goes_before_others():
    memory = memory_of(FULL, window(9, 40), page_count=30)
    useless, useful = np.arange(40, dtype=np.int32), np.arange(100, 140, dtype=np.int32)
    compute(memory, useless).release()
    compute(memory, useful).release()
    memory.tree.use(memory.tree.match(Namespace("", 0), useless).node)  # so that it is not the oldest
    for node in memory.tree.nodes():
        if node.parent is not None and node.tokens[0] == 0:
            pages = node.pages[1]
            columns = np.flatnonzero(pages)
            freed = FreedPages()
            memory.tree.bounded[0]._take(node, columns, freed)
            freed.give_back(memory.pools[1])
    memory.tree.evictor.evict(10, "a test")
    assert memory.tree.match(Namespace("", 0), useful).known == 40
    assert memory.tree.match(Namespace("", 0), useless).known == 0
    memory.audit()


def test_without_a_full_group_nothing_stays_that_has_no_page():
    memory = memory_of(window(9, 40))
    for first in range(0, 1000, 50):
        compute(memory, range(first, first + 40)).release()
    memory.tree.bounded[0].evict(100)
    memory.audit()
    assert not memory.tree.roots
    assert memory.tree.page_count == 0
    assert memory.capacity_tokens == 400, "a row's limit, since no number of pages is one"


def test_a_small_window_pool_is_not_wedged_by_long_prefixes():
    """Everybody holds a long path, and nobody old windows."""
    memory = memory_of(FULL, window(9, 16), page_count=400, rows=4)
    leases = [compute(memory, range(first, first + 100)) for first in range(0, 400, 100)]
    assert memory.tree.bounded[0].borrowed_count == 4 * 2
    for lease in leases:
        for _ in range(20):
            advance(memory, lease, 1)
        lease.release()
    memory.audit()


# -- tails --------------------------------------------------------------------------------------------------


def test_a_state_that_may_be_ahead_is_no_tail():
    memory = memory_of(FULL, STATE)
    tokens = np.arange(30, dtype=np.int32)
    for ahead in (0, 1):
        lease = memory.leases.open(memory.match("", tokens[:1]))
        row = np.array([lease.row])
        advance(memory, lease, 22)
        memory.leases.extend(row, np.array([22 + ahead]))  # a step in flight goes on
        memory.publish(lease, tokens[:22])
        memory.park(lease, "s", tokens[:22])
        assert len(memory.tails) == 1 - ahead
        lease.release()
        memory.audit()
        memory.tails.forget("s")


def test_a_tail_has_a_page_of_every_group():
    memory = memory_of(FULL, window(9), STATE)
    tokens = np.arange(30, dtype=np.int32)
    lease = compute(memory, tokens[:22], checkpoints=(20,))
    memory.park(lease, "s", tokens[:22])
    lease.release()
    memory.audit()
    hit = memory.look_up("", tokens, session="s")
    assert hit.match.length == 20
    assert hit.length == 22
    lease = memory.leases.open(hit.match)
    lease.adopt(hit.tail)
    memory.audit()
    assert [named(memory, lease, group) for group in range(3)] == [[0, 1, 2, 3, 4, 5], [3, 4, 5], [4, 5]]
    lease.release()


# -- the audit ----------------------------------------------------------------------------------------------


def wrong_readers(memory: Memory, lease) -> None:
    memory.tree.bounded[0].readers[memory.leases.row_pages(lease.row, 1)[-2]] += 1


def wrong_borrowed(memory: Memory, lease) -> None:
    memory.tree.bounded[0].borrowed_count += 1


def wrong_count(memory: Memory, lease) -> None:
    memory.tree.bounded[0].page_count += 1


def hole_in_a_full_group(memory: Memory, lease) -> None:
    lease.node.pages[0][0] = 0


def named_below_the_window(memory: Memory, lease) -> None:
    memory.leases.page_tables.tables[1][lease.row, 0] = 1


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (wrong_readers, "readers; recounted"),
        (wrong_borrowed, "count as borrowed; recounted"),
        (wrong_count, "the tree counts 11 pages; recounted 10"),
        (hole_in_a_full_group, "group 0 has holes"),
        (named_below_the_window, "that were given back"),
    ],
)
def test_the_audit_finds(break_it, message):
    memory = memory_of(FULL, window(9))
    lease = compute(memory, range(43))
    memory.audit()
    break_it(memory, lease)
    with pytest.raises(AuditError, match=message):
        memory.audit()


def test_each_page_of_each_group_is_explained():
    memory = memory_of(FULL, window(9), STATE)
    lease = compute(memory, range(22))
    for group, columns in ((0, [0, 5]), (1, [3, 5]), (2, [5])):
        for column in columns:
            page = int(memory.leases.row_pages(lease.row, group)[column])
            assert f"positions {4 * column}..{4 * column + 3}" in explain(memory, page, group)
    borrowed = int(memory.leases.row_pages(lease.row, 1)[3])
    assert "read by 1" in explain(memory, borrowed, 1)
    lease.release()
    assert "evictable: no reader" in explain(memory, borrowed, 1)
    with pytest.raises(ValueError, match=r"group must be 0 \.\. 2, not 3"):
        explain(memory, 1, 3)
