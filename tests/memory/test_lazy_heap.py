"""A heap whose keys change while items are in it."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.memory.prefix.lazy_heap import STALE_MAX, LazyHeap


@dataclass(eq=False)
class Item:
    key: int | None = None


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["set", "push", "forget", "pop", "drop"]), st.integers(0, 5), st.integers(0, 9))
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_items_come_out_in_the_order_of_their_keys(actions):
    items, inside = [Item(0) for _ in range(6)], set()
    heap: LazyHeap[Item] = LazyHeap(lambda item: item.key)
    for verb, which, key in actions:
        item = items[which]
        if verb == "set":
            is_lower = item.key is None or key < item.key
            item.key = key
            if is_lower and item in inside:
                heap.lower(item)
        elif verb == "push" and item.key is not None:
            heap.push(item)
            inside.add(item)
        elif verb == "forget":
            heap.forget(item)
            inside.discard(item)
        elif verb == "drop":  # it is out of the question from now on, and nothing says so
            item.key = None
        elif verb == "pop":
            found = heap.pop()
            wanted = {one for one in inside if one.key is not None}
            assert (found is None) == (not wanted)
            assert found is None or (found in wanted and found.key == min(one.key for one in wanted))
            inside = {one for one in wanted if one is not found} | {one for one in inside if one in heap}
        assert {one for one in inside if one.key is not None} <= set(heap)
        for _ in heap.checking():
            pass


def test_stale_entries_do_not_pile_up():
    heap: LazyHeap[Item] = LazyHeap(lambda item: item.key)
    items = [Item(0) for _ in range(10)]
    for round in range(1000):
        for item in items:
            item.key = -round
            heap.lower(item)
        items[0].key = None
        heap.lower(items[0])
        assert items[0] not in heap
        assert len(heap._heap) <= 2 * len(heap) + STALE_MAX + 1
    assert len(heap) == 9
