"""The audit finds whatever is wrong: each thing that it counts is made wrong once."""

import numpy as np
import pytest

from freehold.memory import AuditError, CacheGroup, Memory, MemoryShape, PinKind, Retention
from freehold.memory.audit import NODES_AT_ONCE, recounting
from freehold.memory.ledger import owner as owners
from freehold.memory.ledger.claims import Claims, in_slices
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.pool import PagePool


def prompt(first: int, count: int = 19) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def busy_memory(prefixes: int = 3) -> Memory:
    """Prefixes of two tenants, a parked tail, a pin, a hint, pages in limbo, two open leases of which one shares, and
    beside them a window."""
    window = CacheGroup("window", lookback=5, page_count=8 * prefixes + 80)
    memory = Memory(MemoryShape(8 * prefixes + 80, 4, 8, 64, groups=(CacheGroup(), window), tenant_quota=0.5))

    def compute(tokens, salt=""):
        lease = memory.leases.open(memory.match(salt, tokens))
        lease.extend(len(tokens) - lease.committed)
        lease.commit(len(tokens) - lease.committed)
        memory.publish(lease, tokens)
        return lease

    for i in range(prefixes):
        lease = compute(prompt(100 * i), "other" if i == 2 else "")
        if i == 0:
            memory.park(lease, "session", prompt(0))
        if i == 2:
            memory.retain(lease, Retention(50), 0.0)
        lease.release()
    memory.pin("kept", "", prompt(100), None)
    compute(prompt(5000))
    memory.leases.open(memory.match("", np.append(prompt(100), 7).astype(np.int32)))
    ending = compute(prompt(7000))
    step = memory.epochs.submit()
    memory.leases.submit(np.array([ending.row]), step)
    ending.release()
    counts = memory.counts()
    assert all((counts.free, counts.limbo, counts.lease, counts.tail, counts.pinned, counts.tree)), counts
    assert memory.tree.hints.page_count
    return memory


def evictable(memory: Memory):
    return next(node for node in memory.tree.nodes() if node.evictable and not node.level)


def pinned(memory: Memory):
    return next(node for node in memory.tree.nodes() if node.pins[PinKind.LEASE])


def sharing(memory: Memory):
    return next(lease for lease in memory.leases.open_leases if lease.shared and lease.allocated == lease.shared)


def private(memory: Memory):
    return next(lease for lease in memory.leases.open_leases if lease.allocated > lease.shared)


def name_another_page(memory):
    memory.leases.page_tables.tables[0][sharing(memory).row, 0] += 1


def commit_too_much(memory):
    memory.leases.committed[private(memory).row] = 64


def share_less(memory):
    memory.leases.shared[sharing(memory).row] -= 4


def hold_too_often(memory):
    evictable(memory).holds += 1


def pin_too_often(memory, kind=PinKind.LEASE):
    node = pinned(memory)
    node.pins[kind] += 1
    node.holds += 1


def forget_a_pin(memory):
    node = pinned(memory)
    node.pins[PinKind.LEASE] -= 1
    node.holds -= 1


def pin_a_stranger(memory):
    memory.tree._nodes[99_999] = memory.tree._nodes.pop(pinned(memory).serial)


def lose_a_candidate(memory):
    memory.tree.candidates.forget(evictable(memory))


def lose_an_entry(memory):
    """The node counts as queued, and eviction never meets it."""
    for queue in memory.tree.candidates.heaps():
        if evictable(memory) in queue:
            queue._sorted.remove(queue._entries[evictable(memory)])


def forget_a_level(memory):
    memory.tree.hints.fading.forget(next(node for node in memory.tree.nodes() if node.level > 0))


def hit_an_end_alone(memory):
    node = evictable(memory)
    memory.tree.split(node, node.start + memory.page_size)
    memory.audit()
    node.hits += 1


def orphan(memory):
    node = evictable(memory)
    node.parent.children.clear()


def lose_a_row(memory):
    memory.leases._free_rows.pop()


def free_a_row_twice(memory):
    memory.leases._free_rows.append(memory.leases._free_rows[0])


def register_a_row(memory):
    memory.leases.owner[memory.leases._free_rows[0]] = owners.lease(99)


def lose_a_page_of_a_node(memory):
    node = evictable(memory)
    node.pages[0] = node.pages[0][:-1]


def free_what_is_held(memory):
    memory.pools[0]._free[0] = evictable(memory).pages[0][0]


def name_a_page_twice(memory):
    node = evictable(memory)
    node.pages[0][0] = node.pages[0][1]


def lose_limbo(memory):
    memory.pools[0]._limbo.clear()


def lose_a_tail(memory):
    memory.tails._tails.clear()


def change_the_ledger(memory):
    memory.pools[0].owner[evictable(memory).pages[0][0]] = owners.node(9999)


def count(part, name="page_count"):
    def wrong(memory):
        found = part(memory)
        setattr(found, name, getattr(found, name) + 1)

    return wrong


def read_too_often(memory):
    bounded = memory.tree.bounded[0]
    bounded.readers[bounded.readers.argmax()] += 1


def unread(memory, queue):
    bounded = memory.tree.bounded[0]
    queued = (node for node in memory.tree.nodes() if node in queue(bounded))
    queue(bounded).forget(next(node for node in queued if len(bounded.inner_columns(node))))


def give_a_tenant_a_page(memory):
    memory.tree.candidates.page_counts["other"] += 1


WRONGS = {
    "another page": (name_another_page, "does not name the tree's pages"),
    "committed": (commit_too_much, "lease"),
    "shared": (share_less, "shares"),
    "holds": (hold_too_often, "tree counts .* held"),
    "lease pins": (pin_too_often, "lease pins"),
    "operator pins": (lambda memory: pin_too_often(memory, PinKind.OPERATOR), "operator pins"),
    "a pin forgotten": (forget_a_pin, "lease pins"),
    "kept": (lambda memory: setattr(pinned(memory), "kept", 7), "7 of operators"),
    "kept pages": (count(lambda memory: memory.tree.holds, "kept_page_count"), "tree counts"),
    "a stranger": (pin_a_stranger, "tree counts"),
    "candidates": (lose_a_candidate, "not a candidate"),
    "entries": (lose_an_entry, "can come out of it"),
    "levels": (forget_a_level, "nothing will lower it"),
    "hits": (hit_an_end_alone, "before it only"),
    "children": (orphan, "disagree"),
    "pages of a node": (lose_a_page_of_a_node, "3 pages for 16 tokens"),
    "free and held": (free_what_is_held, "held by both"),
    "named twice": (name_a_page_twice, "held by both"),
    "limbo": (lose_limbo, "unclaimed"),
    "limbo count": (count(lambda memory: memory.pools[0], "limbo_count"), "counted along the way"),
    "free count": (lambda memory: setattr(memory.pools[0], "free_count", 3), "unclaimed"),
    "tails": (lose_a_tail, "unclaimed"),
    "ledger": (change_the_ledger, "registered to node 9999"),
    "pages": (count(lambda memory: memory.tree), "tree counts"),
    "held pages": (count(lambda memory: memory.tree.holds), "tree counts"),
    "retained pages": (count(lambda memory: memory.tree.hints), "tree counts"),
    "tenants": (give_a_tenant_a_page, "tenants have"),
    "a row lost": (lose_a_row, "0 times"),
    "a row twice": (free_a_row_twice, "2 times"),
    "a row registered": (register_a_row, "is registered to lease 99"),
    "readers": (read_too_often, "readers"),
    "borrowed": (count(lambda memory: memory.tree.bounded[0], "borrowed_count"), "count as borrowed"),
    "bounded pages": (count(lambda memory: memory.tree.bounded[0]), "the tree counts"),
    "ends": (lambda memory: unread(memory, lambda bounded: bounded.ends), "eviction does not know"),
    "inner": (lambda memory: unread(memory, lambda bounded: bounded.inner), "behind its end"),
}


@pytest.mark.parametrize("name", WRONGS)
@pytest.mark.parametrize("prefixes", [3, 2 * NODES_AT_ONCE], ids=["one slice", "several slices"])
def test_the_audit_finds(name, prefixes):
    memory = busy_memory(prefixes)
    memory.audit()
    break_it, message = WRONGS[name]
    break_it(memory)
    with pytest.raises(AuditError, match=message):
        memory.audit()


@pytest.mark.parametrize("capacity", [7, 8, 9])
def test_pages_are_compared_to_the_last_whatever_a_slice_is(capacity, monkeypatch):
    monkeypatch.setattr("freehold.memory.ledger.claims.PAGES_AT_ONCE", 4)
    for page in range(1, capacity + 1):
        pool = PagePool(capacity, 4, Epochs())
        claims = Claims(pool, "pool")
        parts = list(in_slices(iter([(pool.free_pages(), owners.FREE)])))
        assert [sum(len(pages) for pages, _ in part) for part in parts] == [4] * (capacity // 4) + [capacity % 4] * (
            capacity % 4 > 0
        )
        thirds = [(pool.free_pages()[at : at + 3], owners.FREE) for at in (0, 1, 2, 3)]
        assert [sum(len(pages) for pages, _ in part) for part in in_slices(iter(thirds))] == [6, 6]
        for part in parts:
            claims.take(part)
        assert len(list(claims.finish())) == -(-(capacity + 1) // 4)
        pool.owner[page] = owners.lease(1)
        with pytest.raises(AuditError, match=f"page {page} is registered to lease 1 but held by free"):
            list(claims.finish())


def test_an_audit_goes_on_while_memory_is_used():
    """What moves meanwhile is not judged, and what does not move is."""
    memory = busy_memory(2 * NODES_AT_ONCE)
    memory.complete(1)
    numbers = iter(range(10_000))

    def use():
        tokens = prompt(100_000 + 100 * next(numbers))
        lease = memory.leases.open(memory.match("", tokens))
        memory.room.make_for([3, 3])
        lease.extend(len(tokens))
        lease.commit(len(tokens))
        memory.publish(lease, tokens)
        lease.release()

    slices = 0
    for _ in recounting(memory):
        slices += 1
        use()
    assert slices > 5
    memory.audit()
    page = int(memory.pools[0].free_pages()[0])
    going_on = recounting(memory)
    next(going_on)
    memory.pools[0].owner[page] = owners.lease(99)  # nothing has moved it
    with pytest.raises(AuditError, match="registered to lease 99"):
        for _ in going_on:
            pass
    assert not memory.pools[0]._watches, "moves are noted for ever"


def test_an_audit_that_is_given_up_leaves_nothing_behind():
    memory = busy_memory()
    auditing = memory.auditing()
    next(auditing)
    assert memory.pools[0]._watches
    del auditing
    assert not memory.pools[0]._watches
