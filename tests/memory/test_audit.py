"""The audit finds whatever is wrong: each thing that it counts is made wrong once."""

import numpy as np
import pytest

from freehold.memory import AuditError, Memory, MemoryShape, PinKind
from freehold.memory.audit import NODES_AT_ONCE
from freehold.memory.ledger import owner as owners


def prompt(first: int, count: int = 11) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def busy_memory(prefixes: int = 3) -> Memory:
    """Prefixes, a parked tail, a pin, pages in limbo, and two open leases of which one shares."""
    memory = Memory(MemoryShape(8 * prefixes + 40, 4, 8, 64))

    def compute(tokens):
        lease = memory.leases.open(memory.match("", tokens))
        lease.extend(len(tokens) - lease.committed)
        lease.commit(len(tokens) - lease.committed)
        memory.publish(lease, tokens)
        return lease

    for i in range(prefixes):
        lease = compute(prompt(100 * i))
        if i == 0:
            memory.park(lease, "session", prompt(0))
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
    return memory


def evictable(memory: Memory):
    return next(node for node in memory.tree.nodes() if node.evictable)


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


def lose_a_candidate(memory):
    evictable(memory).queued = False


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


def count(part):
    def wrong(memory):
        part(memory.tree).page_count += 1

    return wrong


WRONGS = {
    "another page": (name_another_page, "does not name the tree's pages"),
    "committed": (commit_too_much, "lease"),
    "shared": (share_less, "shares"),
    "holds": (hold_too_often, r"counted \d holds"),
    "lease pins": (pin_too_often, "lease pins"),
    "operator pins": (lambda memory: pin_too_often(memory, PinKind.OPERATOR), "operator pins"),
    "a pin forgotten": (forget_a_pin, r"counted \d holds"),
    "candidates": (lose_a_candidate, "not a candidate"),
    "pages of a node": (lose_a_page_of_a_node, "1 pages for 8 tokens"),
    "free and held": (free_what_is_held, "held by both"),
    "named twice": (name_a_page_twice, "held by both"),
    "limbo": (lose_limbo, "held by nobody"),
    "tails": (lose_a_tail, "held by nobody"),
    "ledger": (change_the_ledger, "registered to node 9999"),
    "pages": (count(lambda tree: tree), "tree counts"),
    "held pages": (count(lambda tree: tree.holds), "tree counts"),
    "retained pages": (count(lambda tree: tree.hints), "tree counts"),
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
