"""Divides a step into work for threads: tokens, items and parts of items (`items.py`).

This runs each step, so it is compiled: kernels of a small step take no longer than some hundred NumPy calls. Loops are
explicit, since NumPy's functions take seconds each to compile.
"""

import numpy as np
from numba import njit

from freehold.engine.cpu.ascending import ascending
from freehold.engine.cpu.items import MANY, QUERIES, SEGMENT, TOGETHER, WHOLE
from freehold.engine.cpu.softmax import KEYS

ITEMS_SPLIT = 8  # with more of them, each thread has work without parts of items


@njit(inline="always")
def _place_tokens(tables, page_size, rows, starts, counts):
    """Return the tokens' positions and slots."""
    total = np.sum(counts)
    positions, slots = np.empty(total, np.int64), np.empty(total, np.int64)
    token = 0
    for i in range(len(rows)):
        for position in range(starts[i], starts[i] + counts[i]):
            positions[token] = position
            slots[token] = np.int64(tables[rows[i], position // page_size]) * page_size + position % page_size
            token += 1
    return positions, slots


@njit(inline="always")
def _make_members(rows, starts, counts, threads):
    """Split sequences into members of a few tokens. Return [4, members]: row, first token, count, first position; and
    the first member of each sequence."""
    queries = 2 * QUERIES if np.sum(counts) >= MANY * 2 * QUERIES * threads else QUERIES
    firsts = np.empty(len(rows) + 1, np.int64)
    firsts[0] = 0
    for i in range(len(rows)):
        firsts[i + 1] = firsts[i] + (counts[i] + queries - 1) // queries
    members, token = np.empty((4, firsts[-1]), np.int64), 0
    for i in range(len(rows)):
        for number in range(firsts[i], firsts[i + 1]):
            done = (number - firsts[i]) * queries
            members[0, number], members[1, number] = rows[i], token + done
            members[2, number], members[3, number] = min(counts[i] - done, queries), starts[i] + done
        token += counts[i]
    return members, firsts


@njit(inline="always")
def _comes_before(tables, pages, one, other, rows, starts):
    """Compare sequences in an order that makes those with a common prefix neighbours, judged by columns 0, 1, 2, 4, 8
    and so on."""
    column = 0
    while column < pages:
        a, b = tables[rows[one], column], tables[rows[other], column]
        if a != b:
            return a < b
        column = 2 * column if column else 1
    return starts[one] < starts[other]


@njit(inline="always")
def _common(tables, page_size, pages, one, other, rows, starts):
    """Return how many positions two sequences share, in whole blocks, up to the shorter one: table entries beyond are
    left from the last user."""
    column = 0
    while column < pages and tables[rows[one], column] == tables[rows[other], column]:
        column += 1
    return min(column * page_size, min(starts[one], starts[other])) // KEYS * KEYS


@njit(inline="always")
def _group_singles(tables, page_size, rows, starts, singles, sizes, shared):
    """Sort sequences with one token each so that those with shared pages are adjacent, and group them. Return the
    number of items. Write each item's number of sequences to `sizes`, and of shared positions to `shared`."""
    furthest = 0
    for i in range(len(singles)):
        furthest = max(furthest, starts[singles[i]])
    pages = max(furthest // page_size, 1)
    for i in range(1, len(singles)):
        one, low, high = singles[i], 0, i
        while low < high:
            middle = (low + high) // 2
            if _comes_before(tables, pages, one, singles[middle], rows, starts):
                high = middle
            else:
                low = middle + 1
        for k in range(i, low, -1):
            singles[k] = singles[k - 1]
        singles[low] = one
    items = 0
    for i in range(len(singles)):
        common = _common(tables, page_size, pages, singles[i - 1], singles[i], rows, starts) if i else 0
        if common and sizes[items - 1] < TOGETHER:
            shared[items - 1] = common if sizes[items - 1] == 1 else min(shared[items - 1], common)
            sizes[items - 1] += 1
        else:
            sizes[items], shared[items] = 1, 0
            items += 1
    return items


@njit(inline="always")
def _make_items(tables, page_size, rows, starts, counts, firsts, may_share):
    """Return the members of all items, their number in each, and the positions they share."""
    count = firsts[-1]
    order, sizes, shared = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    items, alone = 0, 0
    singles = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        if may_share and counts[i] == 1:
            singles[alone] = i
            alone += 1
            continue
        for number in range(firsts[i], firsts[i + 1]):
            order[items], sizes[items], shared[items] = number, 1, 0
            items += 1
    groups = _group_singles(tables, page_size, rows, starts, singles[:alone], sizes[items:], shared[items:])
    for i in range(alone):
        order[items + i] = firsts[singles[i]]
    return order, sizes[: items + groups], shared[: items + groups]


@njit(inline="always")
def _balance(members, order, sizes):
    """Return the order of items, and where each one's members begin. Light and heavy items alternate to balance
    threads, each of which takes a contiguous stretch."""
    work, begins, at = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64), 0
    for i in range(len(sizes)):
        work[i], begins[i] = 0, at
        for k in range(at, at + sizes[i]):
            number = order[k]
            work[i] += (members[3, number] + members[2, number]) * members[2, number]
        at += sizes[i]
    order_of_work, turns = ascending(work), np.empty(len(sizes), np.int64)
    for i in range(len(sizes)):
        turns[i] = order_of_work[i // 2 if i % 2 == 0 else len(sizes) - 1 - i // 2]
    return turns, begins


@njit(inline="always")
def _make_parts(members, firsts):
    """Divide items into parts; members are in order. A few items with long contexts are split. Return parts [3, parts],
    joined items [3, items], and the number of kept queries."""
    items = len(firsts) - 1
    segments, queries = np.empty(items, np.int64), np.empty(items, np.int64)
    joins, count = 0, 0
    for item in range(items):
        segments[item], queries[item] = 0, 0
        for number in range(firsts[item], firsts[item + 1]):
            end = members[3, number] + members[2, number]
            segments[item] = max(segments[item], (end + SEGMENT - 1) // SEGMENT)
            queries[item] += members[2, number]
        if items > ITEMS_SPLIT:
            segments[item] = 1
        joins += segments[item] > 1
        count += max(segments[item], 1)
    parts = np.empty((3, count), np.int64)
    joined, kept, part, join = np.empty((3, joins), np.int64), 0, 0, 0
    for item in range(items):
        if segments[item] <= 1:
            parts[0, part], parts[1, part], parts[2, part] = item, WHOLE, 0
            part += 1
            continue
        joined[0, join], joined[1, join], joined[2, join] = item, segments[item], kept
        join += 1
        for segment in range(segments[item]):
            parts[0, part], parts[1, part], parts[2, part] = item, segment, kept
            part, kept = part + 1, kept + queries[item]
    return parts, joined, kept


@njit(inline="always")
def _all_whole(items):
    parts = np.empty((3, items), np.int64)
    for item in range(items):
        parts[0, item], parts[1, item], parts[2, item] = item, WHOLE, 0
    return parts, np.empty((3, 0), np.int64), 0


@njit(inline="always")
def _describe(record, positions, slots, tables, firsts, shared, members, parts, joined):
    """Store all addresses in the record."""
    of = record[0]
    of.positions, of.slots = positions.ctypes.data, slots.ctypes.data
    of.tables, of.columns = tables.ctypes.data, tables.shape[1]
    of.item_members, of.item_shared = firsts.ctypes.data, shared.ctypes.data
    of.rows, of.tokens = members[0].ctypes.data, members[1].ctypes.data
    of.counts, of.starts = members[2].ctypes.data, members[3].ctypes.data
    of.parts, of.part_items = parts.shape[1], parts[0].ctypes.data
    of.part_segments, of.part_places = parts[1].ctypes.data, parts[2].ctypes.data
    of.joins, of.joined_items = joined.shape[1], joined[0].ctypes.data
    of.joined_segments, of.joined_places = joined[1].ctypes.data, joined[2].ctypes.data


@njit(cache=True, error_model="numpy")
def divide(tables, page_size, rows, starts, counts, may_share, threads, record):
    """Divide a step. Sequence i has `counts[i]` new tokens from position `starts[i]`, its pages in `tables[rows[i]]`;
    `threads` threads attend. Fill `record`, a BATCH. Return positions and slots of tokens; the first member of each
    item and one more, and the positions they share; members [4, n]; parts [3, n], joined items [3, n], and the number
    of queries of parts."""
    positions, slots = _place_tokens(tables, page_size, rows, starts, counts)
    found, of_sequences = _make_members(rows, starts, counts, threads)
    order, sizes, common = _make_items(tables, page_size, rows, starts, counts, of_sequences, may_share)
    turns, begins = _balance(found, order, sizes)
    members, firsts = np.empty(found.shape, np.int64), np.empty(len(sizes) + 1, np.int64)
    shared, at = np.empty(len(sizes), np.int64), 0
    for i in range(len(sizes)):
        item = turns[i]
        firsts[i], shared[i] = at, common[item]
        for k in range(begins[item], begins[item] + sizes[item]):
            for field in range(4):
                members[field, at] = found[field, order[k]]
            at += 1
    firsts[len(sizes)] = at
    parts, joined, kept = _make_parts(members, firsts) if may_share else _all_whole(len(sizes))
    _describe(record, positions, slots, tables, firsts, shared, members, parts, joined)
    return positions, slots, firsts, shared, members, parts, joined, kept
