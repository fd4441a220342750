"""Where the tokens of a step go, what they see, and who attends together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freehold.arrays import Float32, Int32, Int64, ragged
from freehold.engine.cpu.attention import BATCH
from freehold.engine.cpu.items import QUERIES, SEGMENT, TOGETHER, WHOLE, Joined, Parts
from freehold.engine.cpu.operation import address
from freehold.engine.cpu.softmax import KEYS

ITEMS_SPLIT = 8  # with more of them, each thread has work without parts of items


@dataclass(frozen=True)
class CpuBatch:
    """Item i has members `item_members[i]` up to `item_members[i + 1]`, which share their first `item_shared[i]`
    positions, a multiple of 64. `member_...` describe `Members`; the segments that are parts have `kept_queries`
    queries together. `record`: what operations are told, a BATCH."""

    positions: Int64  # [tokens]
    slots: Int64  # [tokens]
    tables: Int32  # [rows, pages]
    item_members: Int64  # [items + 1]
    item_shared: Int64  # [items]
    member_rows: Int64
    member_tokens: Int64
    member_counts: Int64
    member_positions: Int64
    parts: Parts
    kept_queries: int
    joined: Joined
    record: np.ndarray
    kept: list[Float32]  # room for the softmaxes of parts

    @classmethod
    def of(
        cls, tables: Int32, page_size: int, rows: Int64, starts: Int64, counts: Int64, may_share: bool = True
    ) -> CpuBatch:
        """Sequence i has `counts[i]` new tokens from position `starts[i]`, its pages in `tables[rows[i]]`. Layers that
        look back so far and no further may not share: where they don't look, tables name nobody's pages."""
        sequence, index = ragged(counts)
        first = np.cumsum(counts) - counts
        positions = starts[sequence] + index
        pages = tables[rows[sequence], positions // page_size].astype(np.int64)
        members = -(-counts // QUERIES)
        member, number = ragged(members)
        offset = number * QUERIES
        member_positions = starts[member] + offset
        member_counts = np.minimum(counts[member] - offset, QUERIES)
        items = _items(tables, page_size, rows, starts, counts, members, may_share)
        ends = member_positions + member_counts
        items = _balanced(items, ends * member_counts)
        order = np.concatenate([of for of, _ in items]) if items else np.zeros(0, np.int64)
        segments = [-(-int(ends[of].max()) // SEGMENT) for of, _ in items]
        queries = [int(member_counts[of].sum()) for of, _ in items]
        parts, kept_queries, joined = _parts(segments, queries, may_split=may_share)
        batch = cls(
            positions=positions,
            slots=pages * page_size + positions % page_size,
            tables=tables,
            item_members=np.cumsum([0, *(len(of) for of, _ in items)]),
            item_shared=np.array([shared for _, shared in items], np.int64),
            member_rows=rows[member][order],
            member_tokens=(first[member] + offset)[order],
            member_counts=member_counts[order],
            member_positions=member_positions[order],
            parts=parts,
            kept_queries=kept_queries,
            joined=joined,
            record=np.zeros(1, BATCH),
            kept=[],
        )
        batch._describe()
        return batch

    def _describe(self) -> None:
        positions, slots, tables = address(self.positions), address(self.slots), address(self.tables)
        items = address(self.item_members), address(self.item_shared)
        members = (self.member_rows, self.member_tokens, self.member_counts, self.member_positions)
        parts, joined = (address(array) for array in self.parts), (address(array) for array in self.joined)
        self.record[0] = (
            positions, slots, tables, self.tables.shape[1], *items, *(address(one) for one in members),
            len(self.parts.items), *parts, len(self.joined.items), *joined, 0, 0, 0,
        )  # fmt: skip

    def make_room(self, heads: int, size: int) -> None:
        """For what is kept of parts, in a layer with so many heads and numbers of a value, and in smaller ones."""
        rows = self.kept_queries * heads
        if not rows or (self.kept and len(self.kept[0]) >= rows * size):
            return
        self.kept[:] = [np.empty(count, np.float32) for count in (rows * size, rows, rows)]
        for name, room in zip(("kept_sums", "kept_highest", "kept_weights"), self.kept, strict=True):
            self.record[name] = address(room)


def _parts(segments: list[int], queries: list[int], may_split: bool) -> tuple[Parts, int, Joined]:
    """What threads take of items with so many segments and queries. A few items with long contexts are split."""
    parts: list[tuple[int, int, int]] = []
    joined: list[tuple[int, int, int]] = []
    kept = 0
    for item, count in enumerate(segments):
        if not may_split or len(segments) > ITEMS_SPLIT or count < 2:
            parts.append((item, WHOLE, 0))
            continue
        joined.append((item, count, kept))
        parts += [(item, segment, kept + segment * queries[item]) for segment in range(count)]
        kept += count * queries[item]
    return Parts(*_columns(parts)), kept, Joined(*_columns(joined))


def _columns(rows: list[tuple[int, int, int]]) -> Int64:
    return np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, 3).T)


def _items(
    tables: Int32, page_size: int, rows: Int64, starts: Int64, counts: Int64, members: Int64, may_share: bool
) -> list[tuple[list[int], int]]:
    """The members of each item, numbered through the members of all sequences, and how many positions they share."""
    if not may_share:
        return [([member], 0) for member in range(int(members.sum()))]
    first = np.cumsum(members) - members
    items: list[tuple[list[int], int]] = [([m], 0) for m in np.flatnonzero(np.repeat(counts > 1, members)).tolist()]
    for group, shared in _sharing(tables, page_size, rows, starts, np.flatnonzero(counts == 1)):
        items.append((first[group].tolist(), shared))
    return items


def _balanced(items: list[tuple[list[int], int]], work: Int64) -> list[tuple[list[int], int]]:
    """The lightest and the heaviest take turns: a thread takes a stretch of the list, and each should have as
    much to do. `work` is what each member costs."""
    items = sorted(items, key=lambda item: int(work[item[0]].sum()))
    half = (len(items) + 1) // 2
    ordered = items.copy()
    ordered[::2], ordered[1::2] = items[:half], items[half:][::-1]
    return ordered


def _sharing(tables: Int32, page_size: int, rows: Int64, starts: Int64, single: Int64) -> list[tuple[list[int], int]]:
    """Group the sequences `single`, which have one new token each, by the pages they begin with."""
    if len(single) < 2:
        return [([int(i)], 0) for i in single]
    pages = max(int(starts[single].max()) // page_size, 1)
    begins = tables[rows[single], :pages]
    columns = [0, *(1 << k for k in range(1, pages.bit_length()) if 1 << k < pages)]
    order = np.lexsort((starts[single], *(begins[:, column] for column in reversed(columns))))
    single, begins = single[order], begins[order]
    same = begins[1:] == begins[:-1]
    common = np.where(same.all(axis=1), pages, same.argmin(axis=1)) * page_size
    # No further than both have come: what lies beyond in a table is left from its last user.
    common = np.minimum(common, np.minimum(starts[single[1:]], starts[single[:-1]])) // KEYS * KEYS
    groups: list[tuple[list[int], int]] = []
    members, shared = [int(single[0])], 0
    for sequence, overlap in zip(single[1:].tolist(), common.tolist(), strict=True):
        if overlap and len(members) < TOGETHER:
            shared = overlap if len(members) == 1 else min(shared, overlap)
            members.append(sequence)
        else:
            groups.append((members, shared))
            members, shared = [sequence], 0
    return [*groups, (members, shared)]
