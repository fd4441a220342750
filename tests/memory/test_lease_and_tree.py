import numpy as np
import pytest

from freehold.memory import AuditError, LeaseError, Memory, MemoryShape, OutOfPages, PinKind, Retention
from freehold.memory.explain import explain
from freehold.memory.ledger import owner as owners


def make(pages=32, page_size=4, rows=8, **options) -> Memory:
    return Memory(MemoryShape(pages, page_size, rows, pages * page_size, **options))


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def run(memory: Memory, prompt: np.ndarray, namespace: str = ""):
    """A lease with all of `prompt` computed."""
    lease = memory.leases.open(memory.match(namespace, prompt))
    count = len(prompt) - lease.committed
    lease.extend(count)
    lease.commit(count)
    return lease


def test_publishing_what_is_known_frees_the_duplicates():
    memory = make()
    prompt = np.arange(9, dtype=np.int32)
    first, second = run(memory, prompt), run(memory, prompt)
    first.publish(prompt)
    assert memory.counts().free == 32 - 6
    second.publish(prompt)
    assert memory.counts().free == 32 - 4
    assert second.pages(0, 8)[0].tolist() == first.pages(0, 8)[0].tolist()
    memory.audit()


def test_a_prompt_published_in_chunks_is_one_node():
    memory = make()
    prompt = np.arange(24, dtype=np.int32)
    lease = memory.leases.open(memory.match("", prompt))
    for end in (8, 16, 24):
        lease.extend(8)
        lease.commit(8)
        lease.publish(prompt[:end])
    assert sum(1 for node in memory.tree.nodes() if node.parent) == 1
    memory.audit()


def test_a_node_that_another_lease_ends_at_does_not_grow():
    memory = make()
    prompt = np.arange(8, dtype=np.int32)
    first = run(memory, prompt)
    first.publish(prompt)
    longer = np.arange(16, dtype=np.int32)
    second = run(memory, longer)
    assert second.node is first.node
    second.publish(longer)
    assert second.node is not first.node
    assert first.node.end == 8
    memory.audit()


def test_extend_is_all_or_nothing_over_rows():
    memory = make(pages=6)
    leases = [memory.leases.open(memory.match("", tokens(i))) for i in range(2)]
    rows = np.array([lease.row for lease in leases])
    before = memory.counts()
    with pytest.raises(OutOfPages):
        memory.leases.extend(rows, np.array([16, 12]))
    assert memory.counts() == before
    assert [lease.allocated for lease in leases] == [0, 0]
    memory.leases.extend(rows, np.array([12, 12]))
    assert memory.counts().free == 0


def test_release_twice_raises_and_so_does_use_after():
    memory = make()
    lease = run(memory, tokens(1, 2, 3))
    lease.release()
    for use in (lease.release, lambda: lease.extend(1), lambda: lease.trim(0), lambda: lease.publish(tokens())):
        with pytest.raises(LeaseError, match="has been released"):
            use()


def test_commit_beyond_allocation_raises():
    memory = make()
    lease = memory.leases.open(memory.match("", tokens(1)))
    lease.extend(4)
    with pytest.raises(LeaseError, match="no step had reserved"):
        lease.commit(5)


def test_trim_gives_whole_pages_back_and_never_the_trees():
    memory = make()
    prompt = np.arange(10, dtype=np.int32)
    lease = run(memory, prompt)
    lease.trim(5)
    assert (lease.committed, lease.allocated) == (5, 8)
    lease.publish(prompt)
    with pytest.raises(LeaseError, match="belong to the tree"):
        lease.trim(3)
    memory.audit()


def test_a_stale_match_is_refused():
    memory = make()
    prompt = np.arange(9, dtype=np.int32)
    stale = memory.match("", prompt)
    run(memory, prompt).publish(prompt)
    with pytest.raises(LeaseError, match="changed since the match"):
        memory.leases.open(stale)


def test_released_pages_wait_for_the_step_that_may_touch_them():
    memory = make(pages=4)
    lease = run(memory, np.arange(8, dtype=np.int32))
    step = memory.epochs.submit()
    memory.leases.submit(np.array([lease.row]), step)
    row = lease.row
    lease.release()
    assert (memory.counts().free, memory.counts().limbo) == (2, 2)
    assert row not in memory.leases._free_rows
    memory.complete(step)
    assert memory.counts().free == 4
    assert row in memory.leases._free_rows


def test_room_is_made_of_what_rejected_drafts_left_before_anything_is_evicted():
    memory = make(pages=4)
    lease = memory.leases.open(memory.match("", tokens(1)))
    row = np.array([lease.row])
    memory.leases.extend(row, np.array([16]))
    memory.leases.commit(row, np.array([5]), np.array([5]))
    assert memory.counts().free == 0
    other = memory.leases.open(memory.match("", tokens(2)))
    assert memory.room.make(np.array([other.row]), np.array([8]))
    assert (lease.allocated, lease.reserved, memory.counts().free) == (8, 5, 2)
    # The row that gives back may be the one that asks.
    memory.leases.extend(row, np.array([16]))
    memory.leases.commit(row, np.array([5]), np.array([5]))
    assert memory.room.make(row, np.array([12]))
    memory.leases.extend(row, np.array([12]))


def test_a_tail_continues_its_own_sequence_only():
    memory = make(pages=8)
    prompt = np.arange(10, dtype=np.int32)
    lease = run(memory, prompt)
    lease.publish(prompt)
    lease.park("chat", prompt)
    lease.release()
    assert memory.counts().tail == 1
    memory.audit()
    longer = np.arange(12, dtype=np.int32)
    hit = memory.look_up("", longer, session="chat")
    assert hit.match.length == 8
    assert hit.tail is not None
    assert memory.look_up("", longer, session="other").tail is None
    assert memory.look_up("", prompt, session="chat").tail is None, "the last token is always computed"
    assert memory.look_up("", longer, 9, session="chat").tail is None, "the limit is within it"
    assert memory.look_up("", longer, 10, session="chat").tail is hit.tail
    different = longer.copy()
    different[9] = 99
    assert memory.look_up("", different, session="chat").tail is None
    assert memory.look_up("salt", longer, session="chat").tail is None
    resumed = memory.leases.open(hit.match)
    resumed.adopt(hit.tail)
    assert (resumed.shared, resumed.committed, resumed.allocated) == (8, 10, 12)
    memory.audit()
    resumed.release()
    assert memory.counts().tail == 0


def test_tails_are_given_up_before_prefixes_oldest_first():
    memory = make(pages=5)
    for i in range(2):
        prompt = np.arange(6, dtype=np.int32) + 10 * i
        lease = run(memory, prompt)
        lease.publish(prompt)
        lease.park(f"s{i}", prompt)
        lease.release()
    assert (memory.counts().free, memory.counts().tail, memory.counts().tree) == (1, 2, 2)
    other = memory.leases.open(memory.match("", tokens(1)))
    assert memory.room.make(np.array([other.row]), np.array([8]))
    assert [name for name, _ in memory.tails] == ["s1"]
    assert memory.counts().tree == 2
    assert memory.room.reachable.tolist() == [5]


@pytest.mark.parametrize(("policy", "first_gone"), [("lru", 1), ("lfu", 2), ("fifo", 0), ("priority", 1)])
def test_eviction_policies(policy, first_gone):
    """Three prefixes: 0 is oldest, hit often and important, 1 is least recently used, 2 is never hit."""
    memory = make(eviction_policy=policy)
    prompts = [np.full(5, i, np.int32) for i in range(3)]
    for i, prompt in enumerate(prompts):
        lease = run(memory, prompt)
        lease.publish(prompt, priority=1 if i in (0, 2) else 0)
        lease.release()
    for i in (1, 1, 2, 0, 0, 0):
        if i == 2 and policy == "lfu":
            continue
        lease = memory.leases.open(memory.match("", prompts[i]))
        lease.use()
        lease.release()
    memory.tree.evictor.evict(1, "a test")
    gone = [i for i, prompt in enumerate(prompts) if memory.match("", prompt).length == 0]
    assert gone == [first_gone]


def test_unpinning_without_a_pin_raises():
    memory = make()
    prompt = np.arange(9, dtype=np.int32)
    lease = run(memory, prompt)
    lease.publish(prompt)
    with pytest.raises(LeaseError, match="no OPERATOR pin"):
        memory.tree.holds.unpin(lease.node, PinKind.OPERATOR, 0)


def test_explain_tells_who_holds_a_page_and_why_it_stays():
    memory = make()
    prompt = np.arange(9, dtype=np.int32)
    lease = run(memory, prompt)
    private = int(lease.pages(8, 9)[0][0])
    assert f"lease {lease.serial}" in explain(memory, private)
    assert "positions 8..11" in explain(memory, private)
    lease.publish(prompt)
    shared = int(lease.pages(4, 8)[0][0])
    assert "positions 4..7" in explain(memory, shared)
    assert "pinned by 1 lease" in explain(memory, shared)
    lease.release()
    assert "evictable" in explain(memory, shared)
    assert "free -> lease 1" in explain(memory, shared)
    assert explain(memory, 0).startswith("page 0: padding")
    with pytest.raises(ValueError, match="page must be"):
        explain(memory, 33)


def test_the_audit_finds_what_the_ledger_does_not_know():
    memory = make()
    lease = run(memory, np.arange(9, dtype=np.int32))
    page = lease.pages(8, 9)[0][0]
    memory.pools[0].owner[page] = owners.node(77)
    with pytest.raises(AuditError, match="registered to node 77 but held by lease 1"):
        memory.audit()
    memory.pools[0].owner[page] = lease.owner
    memory.audit()
    memory.tree.page_count += 1
    with pytest.raises(AuditError, match="tree counts"):
        memory.audit()


def accepts(page_size: int) -> bool:
    try:
        MemoryShape(8, page_size)
    except ValueError:
        return False
    return True


def test_shapes_that_cannot_work_are_refused():
    assert [size for size in range(300) if size and accepts(size)] == [1, 2, 4, 16, 64, 256]
    with pytest.raises(ValueError, match="page_size must be one of"):
        make(page_size=3)
    with pytest.raises(ValueError, match="eviction policy must be one of"):
        make(eviction_policy="random")
    with pytest.raises(ValueError, match="at least one cache group"):
        MemoryShape(8, groups=())
    with pytest.raises(ValueError, match="tenant_quota must be a share between 0 and 1, not 2"):
        make(tenant_quota=2.0)


def kept_bytes(memory: Memory) -> int:
    """Bytes that the arrays of all nodes keep in memory."""
    arrays = [array for node in memory.tree.nodes() for array in (node.tokens, *node.pages)]
    return sum((array if array.base is None else array.base).nbytes for array in arrays)


def test_nodes_keep_nothing_of_what_was_cut_off():
    """A long prefix is split often, then evicted to a page: no view of the whole stays."""
    memory = make(pages=5000)
    for i in range(8):
        prompt = np.concatenate([np.arange(8), np.full(2000, i + 100)]).astype(np.int32)
        lease = run(memory, prompt)
        lease.publish(prompt)
        lease.release()
    for end in (12, 100, 400):
        memory.leases.open(memory.match("", prompt[: end + 1])).release()
    assert kept_bytes(memory) == 4 * (memory.tree.page_count * 4 + memory.tree.page_count)
    memory.tree.evictor.evict(memory.tree.page_count - 4, "a test")
    assert 0 < kept_bytes(memory) <= 2 * 4 * (4 * 4 + 4)


def test_what_old_weights_computed_goes_with_its_last_holder():
    """A lease goes on with what it has; nobody else can ever find it, so nothing of it is published, parked or kept."""
    memory = make()
    prompt = np.arange(13, dtype=np.int32)
    lease = run(memory, prompt)
    memory.publish(lease, prompt[:9])
    memory.replace_weights()
    assert memory.counts().pinned == 2
    memory.publish(lease, prompt)
    assert lease.shared == 8, "nothing more is published"
    assert memory.retain(lease, Retention(), 0.0) == 0
    memory.park(lease, "session", prompt)
    assert not list(memory.tails)
    lease.release()
    memory.audit()
    assert memory.counts().free == memory.shape.page_count
    assert not memory.tree.roots


@pytest.mark.parametrize("before", [(), (4,), (8, 4)])
@pytest.mark.parametrize("after", [(), (4,), (8,), (8, 4)])
def test_every_page_that_a_reader_saw_waits_for_its_step(before, after):
    """A reader of a path of one, two or three nodes ends while its step is in flight; then nodes are split. Whatever
    is evicted waits."""
    memory = make()
    prompt = np.arange(13, dtype=np.int32)
    lease = run(memory, prompt)
    lease.publish(prompt)
    lease.release()

    def split(ends):
        for end in ends:
            node = memory.match("", prompt[: end + 1]).node
            if node.end > end:
                memory.tree.split(node, end)

    split(before)
    reader = memory.leases.open(memory.match("", prompt))
    assert len(memory.tree.path(reader.node)) == 1 + len(before)
    step = memory.epochs.submit()
    memory.leases.submit(np.array([reader.row]), step)
    reader.release()
    split(after)
    for left in (2, 1, 0):
        memory.tree.evictor.evict(1, "a test")
        assert memory.counts().tree == left
        assert memory.counts().limbo == 3 - left, "a page that the step may still read is not free"
        memory.audit()
    memory.complete(step)
    assert memory.counts().limbo == 0


def test_both_halves_of_a_split_are_as_old_and_as_wanted_as_the_whole():
    memory = make()
    prompt = np.arange(13, dtype=np.int32)
    lease = run(memory, prompt)
    lease.publish(prompt, priority=3)
    memory.retain(lease, Retention(40, ttl=9.0), 1.0)
    lease.release()
    for priority in (4, 5, 1):
        lease = memory.leases.open(memory.match("", prompt))
        lease.use(priority)
        lease.release()
    node = memory.match("", prompt).node
    names = ("created", "last_used", "used_at", "hits", "priority", "fence", "level", "ttl", "fades_at")
    before = {name: getattr(node, name) for name in names}
    assert (before["hits"], before["priority"], before["level"]) == (3, 5, 40)
    upper = memory.tree.split(node, 4)
    assert [{name: getattr(half, name) for name in names} for half in (upper, node)] == [before, before]


def test_tails_go_with_the_weights_that_computed_them():
    memory = make()
    prompts = [np.arange(start, start + 7, dtype=np.int32) for start in (0, 100)]
    early, late = (run(memory, prompt) for prompt in prompts)
    memory.park(early, "early", prompts[0])
    early.release()
    assert memory.counts().tail == 0, "a tail follows what is published"
    early = run(memory, prompts[0])
    for lease, prompt in ((early, prompts[0]), (late, prompts[1])):
        memory.publish(lease, prompt)
    memory.park(early, "early", prompts[0])
    early.release()
    assert memory.counts().tail == 1
    memory.replace_weights()
    assert memory.counts().tail == 0
    memory.park(late, "late", prompts[1])
    assert memory.counts().tail == 0
    late.release()
    memory.audit()
    assert memory.counts().free == memory.shape.page_count


def test_a_tail_belongs_to_its_namespace():
    """Another tenant has the same tokens cached, and uses the same name."""
    memory = make()
    prompt = np.arange(11, dtype=np.int32)
    for salt in ("mine", "theirs"):
        lease = run(memory, prompt, salt)
        lease.publish(prompt)
        if salt == "mine":
            lease.park("chat", prompt)
        lease.release()
    longer = np.append(prompt, [7, 8]).astype(np.int32)
    assert memory.look_up("mine", longer, session="chat").tail is not None
    assert memory.match("theirs", longer).length == 8
    assert memory.look_up("theirs", longer, session="chat").tail is None


def test_a_stale_hit_is_refused_before_anything_changes():
    memory = make()
    prompt = np.arange(11, dtype=np.int32)
    lease = run(memory, prompt)
    lease.publish(prompt)
    lease.park("chat", prompt)
    lease.release()
    longer = np.append(prompt, [7, 8]).astype(np.int32)
    hit = memory.look_up("", longer, session="chat")
    memory.tails.give_up(1)
    lease = memory.leases.open(hit.match)
    with pytest.raises(LeaseError, match="has been given up"):
        lease.adopt(hit.tail)
    memory.audit()
    lease.release()
    memory.tree.evictor.evict(1, "a test")
    with pytest.raises(LeaseError, match="has changed since the match"):
        memory.leases.open(hit.match)
    memory.audit()


def test_a_tail_of_the_same_name_is_another_one():
    memory = make()
    prompt = np.arange(11, dtype=np.int32)
    longer = np.append(prompt, [7, 8]).astype(np.int32)
    hits = []
    for _ in range(2):
        lease = run(memory, prompt)
        lease.publish(prompt)
        lease.park("chat", prompt)
        lease.release()
        hits.append(memory.look_up("", longer, session="chat"))
    lease = memory.leases.open(hits[1].match)
    with pytest.raises(LeaseError):
        lease.adopt(hits[0].tail)
    lease.adopt(hits[1].tail)
    lease.release()
    memory.audit()
