"""Hints, pins and quotas: who goes first, who stays, and what it may cost the others."""

import numpy as np
import pytest

from freehold.memory import Memory, MemoryShape, Retention
from freehold.memory.prefix.hints import FADED_MAX
from freehold.memory.prefix.pins import PINS_MAX

SIZE = 4


def make(pages=40, **options) -> Memory:
    return Memory(MemoryShape(pages, SIZE, 8, pages * SIZE, **options))


def tokens(first: int, pages: int = 2) -> np.ndarray:
    return np.arange(first, first + pages * SIZE + 1, dtype=np.int32)


def compute(memory: Memory, prompt: np.ndarray, hint: Retention | None = None, salt: str = "", now: float = 0.0) -> int:
    """As a request would -> tokens retained."""
    lease = memory.leases.open(memory.match(salt, prompt))
    lease.use()
    lease.extend(len(prompt) - lease.committed)
    step = memory.epochs.submit()
    memory.leases.submit(np.array([lease.row]), step)
    memory.complete(step)
    lease.commit(len(prompt) - lease.committed)
    lease.publish(prompt)
    kept = 0 if hint is None else memory.retain(lease, hint, now)
    lease.release()
    memory.audit()
    return kept


def cached(memory: Memory, prompt: np.ndarray, salt: str = "") -> int:
    return memory.match(salt, prompt).length


def evict(memory: Memory, pages: int) -> None:
    memory.tree.evictor.evict(pages, "a test")
    memory.audit()


def test_what_is_retained_goes_last_whatever_its_age():
    memory = make()
    assert compute(memory, tokens(0), Retention(50)) == 8
    compute(memory, tokens(100))
    compute(memory, tokens(200), Retention(20))
    for gone, left in ((100, [0, 200]), (200, [0]), (0, [])):
        evict(memory, 2)
        assert [first for first in (0, 100, 200) if cached(memory, tokens(first))] == left, gone


def test_hints_that_are_renewed_for_ever_leave_nothing_behind():
    memory = make()
    compute(memory, tokens(100))
    (node,) = (node for node in memory.tree.nodes() if node.parent is not None)
    for now in range(5000):
        memory.tree.hints.retain(node, Retention(3, ttl=0.5), now)
        memory.pass_time(now + 0.6)
    (queue, *others) = memory.tree.candidates._queues[""]._queues
    assert len(queue) == len(memory.tree.hints.fading) == 1
    assert not any(len(other) for other in others)
    for now in range(5000):
        memory.tree.hints.retain(node, Retention(3, ttl=1e5), now)
    assert len(memory.tree.hints.fading) <= 2
    evict(memory, 2)
    assert memory.counts().free == memory.shape.page_count


def test_done_goes_first_but_not_what_others_share():
    memory = make()
    system = tokens(0, 2)[:-1]
    mine, theirs = np.append(system, tokens(300)), np.append(system, tokens(400))
    compute(memory, tokens(100))
    compute(memory, theirs)
    compute(memory, mine, Retention(0))
    evict(memory, 2)
    assert cached(memory, mine) == len(system), "newest, yet first to go"
    assert cached(memory, theirs) > len(system)
    assert cached(memory, tokens(100))


def test_done_leaves_alone_what_somebody_is_using():
    memory = make()
    system = tokens(0, 2)[:-1]
    compute(memory, tokens(100))
    compute(memory, np.append(system, tokens(400)[:1]))
    other = memory.leases.open(memory.match("", np.append(system, tokens(500))))
    compute(memory, np.append(system, tokens(300)), Retention(0))
    other.release()
    evict(memory, 2)
    assert cached(memory, np.append(system, tokens(300))) == len(system), "what only the finished one had"
    evict(memory, 2)
    assert cached(memory, np.append(system, tokens(300))) == len(system), "used later than the other prefix"
    assert not cached(memory, tokens(100))


def test_done_is_forgotten_when_somebody_comes_back():
    memory = make()
    compute(memory, tokens(100))
    compute(memory, tokens(0), Retention(0))
    compute(memory, tokens(0))
    evict(memory, 2)
    assert cached(memory, tokens(0)), "used last"


@pytest.mark.parametrize(
    ("field", "value"), [("priority", 101), ("priority", -1), ("ttl", 0), ("ttl", 1e9), ("end", -1)]
)
def test_hints_have_limits(field, value):
    with pytest.raises(ValueError, match=field):
        Retention(**{field: value})


# -- pins ---------------------------------------------------------------------------------------------------


def test_a_pin_keeps_what_it_can_within_its_budget():
    memory = make(pinned_share=0.1)
    compute(memory, tokens(0, 6))
    pin = memory.pin("a", "", tokens(0, 6), None)
    memory.audit()
    assert pin is not None
    assert pin.tokens == 16
    assert memory.pins.page_count == 4
    evict(memory, 40)
    assert cached(memory, tokens(0, 6)) == 16
    compute(memory, tokens(100))
    assert memory.pin("b", "", tokens(100), None) is None, "the budget is used up"
    assert memory.pin("c", "", tokens(0, 6), None), "what is pinned already costs nothing"
    assert memory.pin("d", "nobody", tokens(0, 6), None) is None, "nothing is cached there"
    with pytest.raises(ValueError, match="already"):
        memory.pin("a", "", tokens(0, 6), None)
    assert memory.pins.unpin("a")
    assert not memory.pins.unpin("a")
    evict(memory, 40)
    assert cached(memory, tokens(0, 6)) == 16, "the other pin"
    memory.pins.unpin("c")
    evict(memory, 40)
    assert not cached(memory, tokens(0, 6))


def test_a_pin_expires_and_goes_with_the_weights():
    memory = make()
    compute(memory, tokens(0))
    memory.pin("a", "", tokens(0), 5.0)
    memory.pass_time(4.9)
    assert len(memory.pins) == 1
    memory.pass_time(5.0)
    memory.audit()
    assert len(memory.pins) == memory.pins.page_count == 0
    memory.pin("a", "", tokens(0), 1000.0)
    memory.replace_weights()
    assert not memory.pins._expiries, "nothing is left of a pin that goes before its time"
    memory.audit()
    assert memory.counts().free == memory.shape.page_count


def test_pins_are_given_up_before_a_request_starves():
    memory = make(pages=8, pinned_share=0.5)
    compute(memory, tokens(0, 4))
    memory.pin("a", "", tokens(0, 4), None)
    lease = memory.leases.open(memory.match("", tokens(100)))
    rows, targets = np.array([lease.row]), np.array([8 * SIZE])
    assert not memory.room.make(rows, targets)
    assert len(memory.pins) == 1
    assert memory.room.make(rows, targets, may_unpin=True)
    assert memory.pins.given_up_count == 1
    memory.leases.extend(rows, targets)
    memory.audit()


# -- tenants --------------------------------------------------------------------------------------------------


def test_a_tenant_over_its_quota_gives_first():
    memory = make(tenant_quota=0.2)
    compute(memory, tokens(0, 3), salt="small")
    for first in (100, 200, 300, 400):
        compute(memory, tokens(first, 3), salt="big")
    evict(memory, 3)
    assert cached(memory, tokens(0, 3), "small"), "oldest of all"
    assert not cached(memory, tokens(100, 3), "big")
    evict(memory, 3)
    assert cached(memory, tokens(0, 3), "small")
    assert memory.tree.page_count == 9
    evict(memory, 3)
    assert not cached(memory, tokens(0, 3), "small"), "now nobody is over, and it is the oldest"


def test_without_quotas_the_oldest_goes():
    memory = make()
    compute(memory, tokens(0, 3), salt="small")
    for first in (100, 200, 300):
        compute(memory, tokens(first, 3), salt="big")
    evict(memory, 3)
    assert not cached(memory, tokens(0, 3), "small")


def test_pins_are_limited_and_end_in_time_whatever_their_number():
    memory = make(pages=40, pinned_share=1.0)
    prompt = tokens(0)
    compute(memory, prompt)
    for i in range(PINS_MAX):
        memory.pin(f"p{i}", "", prompt, None if i % 2 else float(i))
    with pytest.raises(ValueError, match="there are 1024 pins already"):
        memory.pin("one more", "", prompt, None)
    memory.pass_time(100.0)
    assert len(memory.pins) == PINS_MAX - 51
    memory.audit()
    memory.pins.unpin("p200")
    for now in (150.0, 1e9):
        memory.pass_time(now)
        memory.audit()
    assert len(memory.pins) == PINS_MAX // 2
    assert not memory.pins._expiries
    with pytest.raises(ValueError, match="must be a number, not nan"):
        memory.pin("nan", "", prompt, float("nan"))


def test_many_hints_fade_a_few_at_a_time():
    memory = make(pages=600, retained_share=1.0)
    for i in range(300):
        compute(memory, tokens(1000 * i, pages=1), Retention(50, ttl=1.0))
    memory.pass_time(1.5)
    assert 0 < sum(node.level == 25 for node in memory.tree.nodes()) <= FADED_MAX
    for _ in range(10):
        memory.pass_time(1.5)
    assert sum(node.level == 25 for node in memory.tree.nodes()) == 300


def test_a_tenant_without_pages_is_forgotten():
    memory = make(tenant_quota=0.0)
    for i in range(300):
        compute(memory, tokens(0, pages=1), salt=f"tenant {i}")
        evict(memory, 1)
    queue = memory.tree.candidates
    assert not queue._queues
    assert not queue._tenants
