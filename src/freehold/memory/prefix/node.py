"""The parts of the prefix tree: namespaces, pins, nodes and matches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from freehold.arrays import Int32


class Namespace(NamedTuple):
    """Whose prefixes. Neither tenants nor versions of the weights share anything."""

    salt: str = ""
    weights: int = 0


class PinKind(IntEnum):
    """Why a node may not be evicted."""

    LEASE = 0
    OPERATOR = 1  # asked for by whoever runs the server
    WRITE = 2
    LOAD = 3
    PREFETCH = 4


# The first page after a prefix: the namespace, the serial of the prefix's node (0: none), the page's tokens.
PageKey = tuple[Namespace, int, bytes]

# Where what once went on from a node's end is remembered: a place, and tokens that it lies behind the end.
Ghost = tuple[Hashable, int]


class Node:
    """A run of whole pages of tokens, and for each cache group the pages that hold their KV.

    `end` is the number of tokens from the root to the node's end. `holds` counts the node's pins and
    its children that are themselves held: a node with `holds == 0` and no children may be evicted. So
    pinning the deepest node of a path protects the path.
    """

    __slots__ = (
        "children", "created", "end", "fades_at", "fence", "ghost", "hits", "holds", "last_used", "level", "namespace",
        "pages", "parent", "pins", "priority", "queued", "serial", "tokens", "ttl", "used_at",
    )  # fmt: skip

    def __init__(self, serial: int, namespace: Namespace, parent: Node | None, tokens: Int32, pages: list[Int32]):
        self.serial = serial
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.end: int = (parent.end if parent else 0) + len(tokens)
        self.children: dict[bytes, Node] = {}
        self.pins = [0] * len(PinKind)
        self.holds = 0
        self.queued = False
        self.created = self.last_used = self.hits = self.priority = 0
        self.used_at = 0  # the newest step when it was last used
        self.level = 0  # of retention: higher stays longer, below 0 goes first
        self.fades_at = self.ttl = 0.0  # when the level is halved, and how long until the next time
        self.ghost: Ghost | None = None
        self.fence = 0  # the last step that may read these pages after the last pin went

    @property
    def start(self) -> int:
        return self.end - len(self.tokens)

    def shorten(self, page_count: int, page_size: int) -> None:
        """Keep the first `page_count` pages."""
        self.end = self.start + page_count * page_size
        self.tokens = _shortened(self.tokens, page_count * page_size)
        self.pages = [_shortened(part, page_count) for part in self.pages]

    @property
    def page_count(self) -> int:
        """In each group."""
        return len(self.pages[0])

    @property
    def place(self) -> Hashable:
        """Names the prefix that ends here, for as long as the node lives; a root's place outlives it."""
        return self.serial if self.parent is not None else self.namespace

    @property
    def evictable(self) -> bool:
        return self.parent is not None and self.holds == 0 and not self.children

    def __repr__(self) -> str:
        return f"<node {self.serial} tokens {self.start}..{self.end} holds {self.holds}>"


def _shortened(array: Int32, length: int) -> Int32:
    """The first `length` numbers. A view while it is at least half of what it keeps in memory, else a copy: so a node
    evicted page by page costs O(n) in all."""
    whole = array if array.base is None else array.base
    kept = array[:length]
    return kept if 2 * length >= len(whole) else kept.copy()


@dataclass(frozen=True)
class Match:
    """The longest cached prefix found: `length` tokens, the last of them inside (or at the end of)
    `node`, which is None in a namespace that holds nothing yet. A match takes no resource and changes
    nothing; it is good while `version` is the tree's."""

    namespace: Namespace
    node: Node | None
    length: int
    version: int
