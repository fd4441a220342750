"""Work units of attention threads: items and parts of them."""

from typing import Any, NamedTuple

QUERIES = 32  # positions of one item
MANY = 4  # minimum items per thread in a step whose items have twice as many positions
SEGMENT = 1024  # positions per partial softmax
TOGETHER = 4  # maximum sequences of one item: more would leave a core idle
WHOLE = -1  # the segment of a part that has all segments of its item


class Members(NamedTuple):
    """Member m of a work item: `counts[m]` queries, the first of them token `tokens[m]` at position `positions[m]` of
    the sequence in table row `rows[m]`. All int64 [n]."""

    rows: Any
    tokens: Any
    counts: Any
    positions: Any


class Item(NamedTuple):
    """Members `first` up to `stop`, which share their first `shared` positions and have `rows` queries per KV head."""

    first: int
    stop: int
    shared: int
    rows: int


class Parts(NamedTuple):
    """Work of threads. Part p is segment `segments[p]` of item `items[p]`, or the WHOLE item. A segment's softmax is
    kept until its item is merged; `places[p]` counts the queries kept before it."""

    items: Any
    segments: Any
    places: Any


class Joined(NamedTuple):
    """Items split into `segments[j]` parts, the first of which is kept at `places[j]`."""

    items: Any
    segments: Any
    places: Any
