"""A queue whose keys change while items wait."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.memory.prefix.keyed_queue import KeyedQueue


@dataclass(eq=False)
class Item:
    key: int | None = 0


class Plain:
    """The same, which looks at everything each time."""

    def __init__(self):
        self.entries, self.count = {}, 0  # by item: its key when it was put there, and which it was

    def put(self, item):
        if self.entries.get(item, (None, 0))[0] != item.key:
            self.count += 1
            self.entries[item] = item.key, self.count
        if item.key is None:
            self.entries.pop(item, None)

    def peek(self):
        while self.entries:
            item = min(self.entries, key=self.entries.get)
            if item.key == self.entries[item][0]:
                return item
            self.put(item)
        return None


VERBS = st.sampled_from(["set", "put", "forget", "pop", "due", "drop", "grow"])
ACTIONS = st.lists(st.tuples(VERBS, st.integers(0, 5), st.integers(0, 9)))


@settings(max_examples=300)
@given(ACTIONS)
def test_items_come_out_in_the_order_of_their_keys_and_leave_nothing_behind(actions):
    items, plain = [Item() for _ in range(6)], Plain()
    queue: KeyedQueue[Item] = KeyedQueue(lambda item: item.key)
    for verb, which, key in actions:
        item = items[which]
        if verb == "set":
            item.key = key
        elif verb == "drop":  # it is out of the question from now on, and nothing says so
            item.key = None
        elif verb == "grow" and item.key is not None:  # likewise
            item.key += key
        if verb == "put" or (verb == "set" and item in plain.entries):
            queue.put(item)
            plain.put(item)
        elif verb == "forget":
            queue.forget(item)
            plain.entries.pop(item, None)
        elif verb in ("pop", "due"):
            first = plain.peek()
            if verb == "due":
                assert queue.due(key) is (first if first is not None and first.key <= key else None)
            else:
                assert queue.pop() is first
                plain.entries.pop(first, None)
        assert [one in queue for one in items] == [one in plain.entries for one in items]
        assert len(queue._sorted) == len(queue._items) == len(queue) == len(plain.entries)
        for _ in queue.checking():
            pass
