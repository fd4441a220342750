"""A queue whose keys change while items wait."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.memory.prefix.keyed_queue import KeyedQueue


@dataclass(eq=False)
class Item:
    key: int | None = None


VERBS = st.sampled_from(["set", "put", "forget", "pop", "due", "drop", "grow"])
ACTIONS = st.lists(st.tuples(VERBS, st.integers(0, 5), st.integers(0, 9)))


@settings(max_examples=300)
@given(ACTIONS)
def test_items_come_out_in_the_order_of_their_keys(actions):
    items, inside = [Item(0) for _ in range(6)], set()
    queue: KeyedQueue[Item] = KeyedQueue(lambda item: item.key)
    for verb, which, key in actions:
        item = items[which]
        if verb == "set":
            item.key = key
            if item in inside:
                queue.put(item)
        elif verb == "put" and item.key is not None:
            queue.put(item)
            inside.add(item)
        elif verb == "forget":
            queue.forget(item)
            inside.discard(item)
        elif verb == "drop":  # it is out of the question from now on, and nothing says so
            item.key = None
        elif verb == "grow" and item.key is not None:  # likewise
            item.key += key
        elif verb in ("pop", "due"):
            found = queue.pop() if verb == "pop" else queue.due(key)
            wanted = {one for one in inside if one.key is not None and (verb == "pop" or one.key <= key)}
            assert (found is None) == (not wanted)
            assert found is None or (found in wanted and found.key == min(one.key for one in wanted))
            inside = {one for one in inside if one in queue}
        assert all(one in queue for one in inside if one.key is not None)
        for _ in queue.checking():
            pass


def test_nothing_is_left_behind():
    queue: KeyedQueue[Item] = KeyedQueue(lambda item: item.key)
    items = [Item(0) for _ in range(10)]
    for turn in range(1000):
        for item in items:
            item.key = -turn
            queue.put(item)
        items[0].key = None
        queue.put(items[0])
        assert items[0] not in queue
        assert len(queue._sorted) == len(queue._items) == len(queue) == 9
