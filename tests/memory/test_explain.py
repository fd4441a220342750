"""Why a prefix missed, who holds a page, how old pages are."""

import threading

import numpy as np
import pytest

from freehold.memory import Memory, MemoryShape, OwnershipError
from freehold.memory.explain import NEIGHBOURS_MAX, explain_miss
from freehold.memory.explain import explain as explain_page
from freehold.memory.ledger import owner
from freehold.memory.prefix.history import PageAges
from freehold.memory.tails import TailTable


def make(pages=32, **options) -> Memory:
    return Memory(MemoryShape(pages, 4, 8, pages * 4, **options))


def compute(memory: Memory, tokens: np.ndarray, salt: str = "") -> None:
    """As a request would: match, extend, write, publish, release."""
    lease = memory.leases.open(memory.match(salt, tokens))
    lease.use()
    lease.extend(len(tokens) - lease.committed)
    step = memory.epochs.submit()
    memory.leases.submit(np.array([lease.row]), step)
    memory.complete(step)
    lease.commit(len(tokens) - lease.committed)
    lease.publish(tokens)
    lease.release()


def explain(memory: Memory, tokens: np.ndarray, salt: str = ""):
    return explain_miss(memory, memory.match(salt, tokens), tokens)


def sequence(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


PROMPT = np.arange(20, dtype=np.int32)


def test_nothing_like_it_was_seen():
    miss = explain(make(), PROMPT)
    assert (miss.cached, miss.reason) == (0, "never_seen")
    assert "no sequence that continues like this was computed" in str(miss)


def test_a_full_hit_says_why_the_rest_is_computed():
    memory = make()
    compute(memory, PROMPT)
    miss = explain(memory, PROMPT)
    assert (miss.cached, miss.reason) == (16, "hit")


@pytest.mark.parametrize("at", [6, 8, 11, 15])
def test_the_first_differing_tokens_on_both_sides(at):
    memory = make()
    compute(memory, PROMPT)
    other = PROMPT.copy()
    other[at:] += 100
    miss = explain(memory, other)
    assert (miss.cached, miss.reason, miss.common) == (at // 4 * 4, "different", at)
    assert miss.theirs == PROMPT[at : at + 8].tolist()
    assert miss.ours == other[at : at + 8].tolist()
    assert str(int(PROMPT[at])) in str(miss)


def test_of_a_prompt_with_one_page_left_the_difference_is_told():
    memory = make()
    compute(memory, PROMPT)
    miss = explain(memory, sequence(0, 1, 2, 3, 50, 51, 52, 53, 54))
    assert (miss.cached, miss.reason) == (4, "different")
    assert explain(memory, sequence(0, 1, 2, 3, 50, 51, 52, 53)).reason == "hit", "the last token is always computed"


def test_the_nearest_of_several_continuations_is_shown():
    memory = make()
    for last in (50, 60):
        compute(memory, sequence(0, 1, 2, 3, 4, 5, last, last, 9))
    miss = explain(memory, sequence(0, 1, 2, 3, 4, 5, 60, 77, 8, 8))
    assert (miss.cached, miss.common, miss.theirs[0], miss.ours[0]) == (4, 7, 60, 77)


class CountedChildren(dict):
    """Counts the children that are looked at."""

    looked_at = 0

    def values(self):
        for child in super().values():
            self.looked_at += 1
            yield child


def test_few_of_many_continuations_are_looked_at():
    memory = make(pages=3 * NEIGHBOURS_MAX)
    for number in range(2 * NEIGHBOURS_MAX):
        compute(memory, np.arange(5, dtype=np.int32) + 100 * number)
    root = memory.tree.root(memory.tree.namespace(""))
    root.children = CountedChildren(root.children)
    assert len(root.children) == 2 * NEIGHBOURS_MAX
    assert explain(memory, PROMPT + 7).reason == "never_seen"
    assert root.children.looked_at == NEIGHBOURS_MAX


def test_a_page_of_the_last_of_many_tails_is_found_without_looking_at_the_others():
    memory = make()
    for number in range(20):
        pages = [pool.allocate(np.full(1, owner.lease(1))) for pool in memory.pools]
        memory.tails.park(f"chat {number}", memory.tree.namespace(""), 0, PROMPT[:1], pages, owner.lease(1), 0)
    seen: list[str] = []
    memory.tails.__class__ = type("Watched", (TailTable,), {"__iter__": lambda self: iter(seen.append("all") or ())})
    assert "of parked session 'chat 19'" in explain_page(memory, int(pages[0][0]))
    assert not seen


def test_evicted_when_and_by_what():
    memory = make(pages=6)
    compute(memory, PROMPT)
    compute(memory, np.arange(100, 104, dtype=np.int32))
    other = memory.leases.open(memory.match("", sequence(7)))
    assert memory.room.make(np.array([other.row]), np.array([12]))
    miss = explain(memory, PROMPT)
    assert miss.reason == "evicted"
    assert miss.cached == 8
    assert "evicted at step 2 by a step that needed 3 pages" in str(miss)
    assert sum(memory.tree.history.ages.evicted) == 3
    memory.flush()
    assert "a flush of the cache" in str(explain(memory, PROMPT))


def test_another_namespace_or_other_weights_have_it():
    memory = make()
    compute(memory, PROMPT, "tenant")
    assert explain(memory, PROMPT).reason == "namespace"
    keep = memory.leases.open(memory.match("tenant", PROMPT))
    memory.replace_weights()
    assert memory.match("tenant", PROMPT).length == 0
    assert explain(memory, PROMPT, "tenant").reason == "weights"
    keep.release()


def test_another_namespace_that_has_no_more_is_no_reason():
    memory = make()
    compute(memory, PROMPT + 100, "tenant")
    assert explain(memory, PROMPT).reason == "never_seen"
    for salt in ("", "tenant"):
        compute(memory, PROMPT[:8], salt)
    assert explain(memory, PROMPT).reason == "never_seen"
    compute(memory, PROMPT[:12], "tenant")
    assert explain(memory, PROMPT).reason == "namespace"


@pytest.mark.parametrize(("limit", "reason"), [(None, "never_seen"), (4, "never_seen"), (3, "scored"), (0, "scored")])
def test_what_is_scored_is_no_miss(limit, reason):
    memory = make()
    assert explain_miss(memory, memory.match("", PROMPT, limit), PROMPT, limit).reason == reason


def test_switched_off():
    assert explain(make(prefix_cache=False), PROMPT).reason == "disabled"


def test_ages_of_hits():
    memory = make()
    compute(memory, PROMPT)
    for _ in range(9):
        memory.complete(memory.epochs.submit())
    lease = memory.leases.open(memory.match("", PROMPT))
    assert not memory.tree.history.ages.as_dict()["hit"], "to open a lease is no use yet"
    lease.use()
    lease.release()
    assert memory.tree.history.ages.as_dict()["hit"] == {"<16": 4}


def test_ages_are_told_by_powers_of_two():
    ages = PageAges()
    for count, age in enumerate((0, 1, 2, 3, 4, 2**22 - 1, 2**22, 2**40), 1):
        ages.hit[ages.bucket(age)] += count
    assert ages.as_dict() == {
        "hit": {"<1": 1, "<2": 2, "<4": 3 + 4, "<8": 5, "<4194304": 6, "<8388608": 7 + 8}, "evicted": {}
    }  # fmt: skip


def test_only_one_thread_moves_pages():
    memory = make()
    memory.epochs.bind_thread()
    lease = memory.leases.open(memory.match("", PROMPT))
    lease.extend(8)
    errors: list[Exception] = []

    def free() -> None:
        try:
            lease.release()
        except OwnershipError as error:
            errors.append(error)

    thread = threading.Thread(target=free, name="io")
    thread.start()
    thread.join()
    assert "thread 'io' is not the one that moves pages" in str(errors[0])
    memory.audit()


def test_of_a_prompt_shorter_than_a_page_nothing_is_a_hit():
    memory = Memory(MemoryShape(10, 4, 2, 64))
    for length in (1, 4):
        tokens = np.arange(length, dtype=np.int32)
        miss = explain_miss(memory, memory.match("", tokens), tokens)
        assert (miss.cached, miss.reason) == (0, "too_short")


def test_what_keeps_a_page_of_a_prefix():
    memory = make(pinned_share=0.5)
    other = PROMPT.copy()
    other[8:] += 100
    for tokens in (PROMPT, other):
        compute(memory, tokens, "tenant")

    def said() -> list[str]:
        """Of the last page that both have, and of the last one of the first."""
        node = memory.match("tenant", sequence(*PROMPT, 0)).node
        pages = [int(part.pages[0][-1]) for part in (node.parent, node)]
        return [explain_page(memory, page).splitlines()[0].partition("; ")[2] for page in pages]

    shared, last = (f"positions {at}..{at + 3} of a prefix in namespace 'tenant'" for at in (4, 16))
    assert said() == [f"{shared}; evictable after its 2 continuations", f"{last}; evictable"]
    memory.pin("a", "tenant", sequence(*PROMPT, 0), None)
    assert said() == [f"{shared}; a longer prefix in use continues it", f"{last}; pinned by 1 operator"]
