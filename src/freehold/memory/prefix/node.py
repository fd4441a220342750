"""The parts of the prefix tree: namespaces, pins, nodes and matches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from freehold.contract.arrays import Int32, Int64


class Namespace(NamedTuple):
    """A tenant (`salt`), a version of the weights, and the fingerprint of the adapter, if any. Namespaces share no
    prefix."""

    salt: str = ""
    weights: int = 0
    adapter: str = ""


class PinKind(IntEnum):
    """Why a node may not be evicted."""

    LEASE = 0
    OPERATOR = 1  # requested by the operator of the server
    BACKUP = 2  # it is being copied to the host
    LOAD = 3  # its continuation is being loaded


# Identifies the first page after a prefix: the namespace, the serial of the node at whose end the prefix ends (0: the
# root), and the page's tokens.
PageKey = tuple[Namespace, int, bytes]


def page_key(namespace: Namespace, node: Node | None, rest: Int32, page_size: int) -> PageKey | None:
    """Return the key of the page after the prefix that ends at the end of `node`; `rest` [n] are the tokens that
    follow.

    Two sequences that would compute the same page have the same key: equal keys mean equal prefix and equal next page.
    Return None if no whole page follows."""
    if len(rest) < page_size:
        return None
    serial = 0 if node is None or node.parent is None else node.serial
    return namespace, serial, rest[:page_size].tobytes()


# Where `PrefixHistory` recorded evicted continuations of a node: the place they are recorded under, and the distance in
# tokens from the node's end to the first of them.
Ghost = tuple[Hashable, int]


class Node:
    """A run of whole pages of tokens, and each cache group's pages with their KV: `pages` has an int32 [page columns]
    for each group, 0 where there is none. Only bounded groups have such holes.

    `end` is the number of tokens from the root to the end of the node. `holds` counts the node's pins and its held
    children. `keys` has the digest of each column (`prefix_keys`), if keys are in use; of a root the seed. A node
    without holds and children can be evicted. So a pin on the deepest node of a path protects the whole path.
    """

    __slots__ = (
        "children", "created", "end", "fades_at", "fence", "ghost", "hits", "holds", "kept", "keys", "last_used",
        "level", "namespace", "pages", "parent", "pins", "priority", "serial", "tokens", "ttl", "used_at",
    )  # fmt: skip

    def __init__(self, serial: int, namespace: Namespace, parent: Node | None, tokens: Int32, pages: list[Int32]):
        self.serial = serial
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.keys: list[bytes] = []
        self.end: int = (parent.end if parent else 0) + len(tokens)
        self.children: dict[bytes, Node] = {}
        self.pins = [0] * len(PinKind)
        self.holds = 0
        self.kept = 0  # like `holds`, for operators' pins alone
        self.created = self.last_used = self.hits = self.priority = 0
        self.used_at = 0  # the number of steps submitted when it was last used
        self.level = 0  # retention level: higher levels are evicted later, negative ones first
        self.fades_at = self.ttl = 0.0  # when the level is next halved, and the seconds between halvings
        self.ghost: Ghost | None = None
        self.fence = 0  # the last step that may read these pages under a dropped pin

    @property
    def start(self) -> int:
        return self.end - len(self.tokens)

    def inherit(self, whole: Node) -> None:
        """Copy the use, retention and fence of `whole`, which this node was cut from."""
        self.created, self.last_used, self.used_at = whole.created, whole.last_used, whole.used_at
        self.hits, self.priority = whole.hits, whole.priority
        self.level, self.ttl, self.fades_at = whole.level, whole.ttl, whole.fades_at
        self.fence = whole.fence

    def shorten(self, page_count: int, page_size: int) -> None:
        """Keep the first `page_count` pages."""
        self.end = self.start + page_count * page_size
        self.tokens = _shortened(self.tokens, page_count * page_size)
        self.pages = [_shortened(part, page_count) for part in self.pages]
        del self.keys[page_count:]

    def keys_at(self, columns: Int64) -> list[bytes]:
        """Return the keys of `columns` [n]."""
        return [self.keys[int(column)] for column in columns]

    @property
    def page_count(self) -> int:
        """Page columns: pages in each full group, and at most as many in bounded ones."""
        return len(self.pages[0])

    @property
    def place(self) -> Hashable:
        """Identifies the prefix that ends here while the node exists. The place of a root is its namespace, which
        outlives it."""
        return self.serial if self.parent is not None else self.namespace

    @property
    def evictable(self) -> bool:
        return self.parent is not None and self.holds == 0 and not self.children

    def __repr__(self) -> str:
        return f"<node {self.serial} tokens {self.start}..{self.end} holds {self.holds}>"


def _shortened(array: Int32, length: int) -> Int32:
    """Return the first `length` numbers: a view while it is at least half of the array it keeps alive, else a copy. So
    evicting a node page by page copies O(n) numbers in total."""
    whole = array if array.base is None else array.base
    kept = array[:length]
    return kept if 2 * length >= len(whole) else kept.copy()


@dataclass(frozen=True)
class Match:
    """The longest cached prefix of a sequence from which every cache group can resume: `length` tokens, which end
    inside or at the end of `node`. `node` is None in an empty namespace. The tree knows the first `known` tokens, which
    end in `last`; between `length` and `known`, pages of a bounded group are missing. A match holds no resource. It is
    valid while `version` equals the tree's."""

    namespace: Namespace
    node: Node | None
    length: int
    known: int
    version: int
    last: Node | None = None

    def without_nodes(self) -> Match:
        """Return a copy that is safe to keep: it does not hold nodes that leave the tree in memory."""
        return replace(self, node=None, last=None)
