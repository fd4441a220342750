"""The cache groups of the simulated models."""

from __future__ import annotations

from dataclasses import replace

from freehold.memory import CacheGroup

FULL = CacheGroup()
SHORT_WINDOW = CacheGroup("window", lookback=4)  # of 5 tokens, less than most pages
LONG_WINDOW = CacheGroup("window", lookback=63)  # more than most pages
STATE = CacheGroup("state", lookback=1, is_state=True)

GROUPS = {
    "full": (FULL,),
    "full+window5": (FULL, SHORT_WINDOW),
    "full+window64": (FULL, LONG_WINDOW),
    "window": (LONG_WINDOW,),
    "state": (STATE,),
    "full+state": (FULL, STATE),
    "full+window+state": (FULL, LONG_WINDOW, STATE),
}


def sized(
    groups: tuple[CacheGroup, ...], page_size: int, chunk: int, checkpoint_interval: int, rows: int
) -> tuple[CacheGroup, ...]:
    """Return the groups, with as many pages in bounded ones as `rows` rows need."""
    return tuple(
        replace(group, page_count=rows * group.pages_of_a_row(page_size, chunk, checkpoint_interval))
        if group.is_bounded
        else group
        for group in groups
    )
