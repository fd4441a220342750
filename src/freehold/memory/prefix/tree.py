"""The prefix tree: a radix tree over pages of tokens, one root for each namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from freehold.contract.arrays import Int32
from freehold.contract.prefix_keys import chain
from freehold.memory.group import CacheGroup, longest_boundary
from freehold.memory.ledger import owner
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.pool import PagePool
from freehold.memory.prefix.bounded import BoundedPages
from freehold.memory.prefix.eviction import FairEviction
from freehold.memory.prefix.evictor import Evictor
from freehold.memory.prefix.hints import Hints
from freehold.memory.prefix.history import PrefixHistory
from freehold.memory.prefix.holds import Holds
from freehold.memory.prefix.node import Match, Namespace, Node, PageKey, page_key
from freehold.memory.prefix.watcher import Rescuer, Watcher


class PrefixTree:
    """Owns the pages of prefixes that may be reused. All lengths are multiples of `page_size`.

    The tree never allocates. Pages come from leases through `insert` and leave through `remove_tail`. `holds` decides
    what may not be evicted, `evictor` evicts, and `hints` retains what requests asked to keep.
    """

    def __init__(
        self,
        pools: list[PagePool],
        epochs: Epochs,
        policy: str = "reuse",
        quota: int | None = None,
        retained_limit: int | None = None,
        groups: Sequence[CacheGroup] | None = None,
    ):
        groups = [CacheGroup()] * len(pools) if groups is None else groups
        self.pools = pools
        self.bounded = [
            BoundedPages(self, number, group, pools[number]) for number, group in enumerate(groups) if group.is_bounded
        ]
        self.page_size = pools[0].page_size
        self.epochs = epochs
        self.version = 0
        self.weights = 0  # counts replacements
        self.tick = 0  # counts uses
        self.page_count = 0  # page columns in the tree: pages of each full group
        self.history = PrefixHistory(self.page_size)
        self.roots: dict[Namespace, Node] = {}
        self._nodes: dict[int, Node] = {}  # by serial, roots included
        self.watchers: list[Watcher] = []
        self.rescuer: Rescuer | None = None
        self.seed: Callable[[Namespace], bytes] | None = None  # seed of node keys; None: nodes have no keys
        self.candidates = FairEviction(policy, quota, self.history.reuse, lambda: self.tick)
        self.holds = Holds(self)
        self.evictor = Evictor(self)
        self.hints = Hints(self, pools[0].capacity if retained_limit is None else retained_limit)
        self._serial = 0

    @property
    def evictable_page_count(self) -> int:
        """Pages that eviction could free, in each full group."""
        return self.page_count - self.holds.page_count

    # -- looking ------------------------------------------------------------------------------------

    def namespace(self, salt: str, adapter: str = "") -> Namespace:
        """Return the namespace of KV computed now for a tenant, with the adapter of that fingerprint."""
        return Namespace(salt, self.weights, adapter)

    def match(self, namespace: Namespace, tokens: Int32, limit: int | None = None) -> Match:
        """Return the longest prefix of `tokens` [n], in whole pages and at most `limit` tokens, from which every group
        can resume in `namespace`."""
        node = self.roots.get(namespace)
        if node is None:
            return Match(namespace, None, 0, 0, self.version)
        limit = len(tokens) if limit is None else min(limit, len(tokens))
        limit -= limit % self.page_size
        at = 0
        while at < limit:
            child = node.children.get(tokens[at : at + self.page_size].tobytes())
            if child is None:
                break
            same = self._same_tokens(child, tokens[at:limit])
            at += same
            node = child
            if same < len(child.tokens):
                break
        length, last = self._boundary(node, at) if self.bounded else at, node
        while node.parent is not None and node.start >= length:
            node = node.parent
        return Match(namespace, node, length, at, self.version, last)

    def _boundary(self, node: Node, end: int) -> int:
        """Return the longest part of the first `end` tokens, ending in `node`, from which all bounded groups can
        resume."""
        if all(bounded.needed_at(node, end).all() for bounded in self.bounded):
            return end
        present = [self.pages_to(node, end, bounded.number) != 0 for bounded in self.bounded]
        return longest_boundary([bounded.group for bounded in self.bounded], self.page_size, present)

    def pages_to(self, node: Node, end: int, group: int) -> Int32:
        """Return a group's pages of the first `end` tokens, which end in `node`, int32 [columns]."""
        parts = [part.pages[group] for part in self.path(node)]
        return np.concatenate([*parts, np.empty(0, np.int32)])[: end // self.page_size]

    def next_page_key(self, match: Match, tokens: Int32) -> PageKey | None:
        """Return the key of the first page after a match. Return None if no whole page follows, or if the match ends
        inside a node: then the tree already has a different continuation."""
        if match.node is not None and match.node.end != match.length:
            return None
        return page_key(match.namespace, match.node, tokens[match.length :], self.page_size)

    def _same_tokens(self, node: Node, tokens: Int32) -> int:
        """Return how many tokens, in whole pages, `node` and `tokens` have in common."""
        count = min(len(node.tokens), len(tokens))
        differ = node.tokens[:count] != tokens[:count]
        first = int(differ.argmax())
        same = first if differ[first] else count
        return same - same % self.page_size

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from the root's child down to `node`."""
        nodes: list[Node] = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def nodes(self) -> Iterator[Node]:
        """Yield every node of this moment that still exists at its turn, roots included. The tree may change meanwhile;
        nodes that leave it are not kept in memory."""
        there = (self._nodes.get(serial) for serial in list(self._nodes))
        return (node for node in there if node is not None)

    def has(self, node: Node) -> bool:
        """Return whether a node is still in the tree."""
        return self._nodes.get(node.serial) is node

    def node(self, serial: int) -> Node:
        """Return the node with a serial number. Raise KeyError."""
        return self._nodes[serial]

    def use(self, node: Node, priority: int = 0) -> None:
        """Count a hit: a request resumes from the prefix that ends at `node`."""
        self.tick += 1
        for used in self.path(node):
            self.history.hit(used, self.epochs.submitted, self.tick)
            used.hits += 1
            self._touch(used, priority)
        for watcher in self.watchers:
            watcher.used(node)

    # -- growing and shrinking ----------------------------------------------------------------------

    def insert(self, at: Node, tokens: Int32, pages: list[Int32], source: int, priority: int = 0) -> tuple[Node, int]:
        """Continue the prefix that ends at `at` by `tokens` [n], n a multiple of the page size, whose KV is in `pages`
        (one array for each group, owned by `source`, 0 where a bounded group has none).

        Known pages stay; holes and new tokens get the caller's pages, which change owners. Return the unpinned node
        that ends where the tokens end, and the number of leading tokens already known: of those the caller's pages are
        duplicates where `pages_after` has others.
        """
        assert len(tokens) % self.page_size == 0
        self.tick += 1
        node, done = at, 0
        while done < len(tokens):
            child = node.children.get(tokens[done : done + self.page_size].tobytes())
            if child is None:
                break
            same = self._same_tokens(child, tokens[done:])
            if same < len(child.tokens):
                child = self.split(child, child.start + same)
            self._fill(child, pages, done // self.page_size, source)
            node, done = child, done + same
            self._touch(node, priority)
        if done < len(tokens):
            first = done // self.page_size
            rest = [part[first:] for part in pages]
            after = ((node.place, 0), node.ghost)
            # A leaf pinned only by the caller grows in place, so that a prompt published chunk by chunk becomes one
            # long node. Other pins rely on where the node ends, and so do hints.
            alone = not node.children and node.holds == (node is at) and node.level == 0
            keys = self._keys_after(node, tokens[done:])
            if node.parent is not None and alone:
                self._grow(node, tokens[done:], rest)
            else:
                node = self._append(node, tokens[done:], rest)
            node.keys += keys
            for pool, part in zip(self.pools, rest, strict=True):
                pool.move(part[part != 0] if self.bounded else part, source, owner.node(node.serial))
            for bounded in self.bounded:
                bounded.added(node, int(np.count_nonzero(rest[bounded.number])))
            self.history.returned(node, after, tokens[done:], self.tick)
            self._touch(node, priority)
            self._tell_appeared(node, rest)
        return node, done

    def _keys_after(self, node: Node, tokens: Int32) -> list[bytes]:
        return [] if self.seed is None else chain(node.keys[-1], tokens, self.page_size)

    def followers(self, node: Node) -> list[Watcher]:
        """Return the watchers of pages that a node gets or loses."""
        return self.watchers if node.namespace.weights == self.weights else []

    def _tell_appeared(self, node: Node, pages: list[Int32]) -> None:
        """Notify watchers of the last columns of a node, new with `pages` of each group."""
        for watcher in self.followers(node):
            for group, part in enumerate(pages):
                watcher.appeared(node, group, node.page_count - len(part) + part.nonzero()[0])

    def _fill(self, node: Node, pages: list[Int32], first: int, source: int) -> None:
        """Fill the holes of a node, which begins at column `first` of `pages`."""
        for bounded in self.bounded:
            have = node.pages[bounded.number]
            mine = pages[bounded.number][first : first + len(have)]
            holes = (have == 0) & (mine != 0)
            if holes.any():
                self.version += 1
                bounded.pool.move(mine[holes], source, owner.node(node.serial))
                have[holes] = mine[holes]
                bounded.added(node, int(np.count_nonzero(holes)))
                for watcher in self.followers(node):
                    watcher.appeared(node, bounded.number, holes.nonzero()[0])

    def pages_after(self, at: Node, node: Node, group: int) -> Int32:
        """Return the pages between the ends of `at` and of `node`, which continues it."""
        parts: list[Int32] = []
        while node is not at:
            parts.append(node.pages[group])
            assert node.parent is not None
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)

    def _touch(self, node: Node, priority: int) -> None:
        node.last_used = self.tick
        node.used_at = self.epochs.submitted
        node.priority = max(node.priority, priority)
        node.level = max(node.level, 0)
        self.reconsider(node)

    def _grow(self, node: Node, tokens: Int32, pages: list[Int32]) -> None:
        self.version += 1
        node.tokens = np.concatenate([node.tokens, tokens])
        node.pages = [np.concatenate(both) for both in zip(node.pages, pages, strict=True)]
        node.end += len(tokens)
        self._count(node, len(pages[0]))
        self.holds.grown(node, len(pages[0]))

    def _append(self, parent: Node, tokens: Int32, pages: list[Int32]) -> Node:
        self.version += 1
        node = self._new_node(parent, tokens.copy(), [part.copy() for part in pages])
        parent.children[self._key(node)] = node
        self._count(node, len(pages[0]))
        self.candidates.put(node)
        return node

    def _count(self, node: Node, pages: int) -> None:
        """Count pages added to a node, or removed if negative."""
        self.page_count += pages
        self.candidates.count(node.namespace.salt, pages)
        if node.level > 0:
            self.hints.page_count += pages

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` at `at` tokens from the root. Return the new upper part. The node itself stays the deeper part:
        pins name the end of a prefix, and that end does not move."""
        assert node.parent is not None
        assert node.start < at < node.end
        assert at % self.page_size == 0
        self.version += 1
        cut = at - node.start
        page_cut = cut // self.page_size
        # Copies: a view would keep the whole original in memory.
        upper = self._new_node(node.parent, node.tokens[:cut].copy(), [p[:page_cut].copy() for p in node.pages])
        upper.inherit(node)
        upper.keys, node.keys = node.keys[:page_cut], node.keys[page_cut:]
        for pool, part in zip(self.pools, upper.pages, strict=True):
            pool.move(part[part != 0] if self.bounded else part, owner.node(node.serial), owner.node(upper.serial))
        node.parent.children[self._key(upper)] = upper
        node.parent = upper
        node.tokens = node.tokens[cut:].copy()
        node.pages = [part[page_cut:].copy() for part in node.pages]
        upper.children[self._key(node)] = node
        upper.holds, upper.kept = int(node.holds > 0), int(node.kept > 0)
        self.hints.split(upper)
        for bounded in self.bounded:
            bounded.offer(upper)
            bounded.offer(node)
        for watcher in self.watchers:
            watcher.cut(upper, node)
        return upper

    def remove_tail(self, node: Node, page_count: int) -> None:
        """Remove the last pages of a leaf, or all of it, from the tree. The caller gives them back."""
        self.version += 1
        first = node.page_count - page_count
        for watcher in self.followers(node):
            for group, pages in enumerate(node.pages):
                watcher.vanished(node, group, first + pages[first:].nonzero()[0])
        self._count(node, -page_count)
        if page_count < node.page_count:
            node.shorten(node.page_count - page_count, self.page_size)
            self.candidates.put(node)
            return
        parent = node.parent
        assert parent is not None
        del parent.children[self._key(node)]
        node.parent = None
        del self._nodes[node.serial]
        self.candidates.forget(node)
        self.hints.fading.forget(node)
        for bounded in self.bounded:
            bounded.forget(node)
        for watcher in self.watchers:
            watcher.left(node)
        self._offer(parent)

    def trim(self, node: Node) -> None:
        """Cut an evictable leaf to its last column with a page. In a model without a full group nothing else would ever
        remove the rest."""
        if len(self.bounded) < len(self.pools):
            return
        while node.evictable:
            there = np.flatnonzero(np.any(np.stack(node.pages) != 0, axis=0))
            kept = int(there[-1]) + 1 if len(there) else 0
            if kept == node.page_count:
                return
            parent = node.parent
            assert parent is not None
            self.remove_tail(node, node.page_count - kept)
            if kept:
                return
            node = parent

    def released(self, node: Node) -> None:
        """Handle a node that lost its last hold."""
        if node.namespace.weights != self.weights:
            self.evictor.drop(node, "new weights")
        self.trim(node)
        self._offer(node)

    def _offer(self, node: Node) -> None:
        """Make an unneeded node a candidate for eviction, or remove the root of an empty namespace."""
        if node.evictable:
            self.candidates.put(node)
        elif node.parent is None and not node.children and not node.holds and self.roots.get(node.namespace) is node:
            del self.roots[node.namespace]
            del self._nodes[node.serial]
            self.version += 1

    def replace_weights(self) -> None:
        """Make KV of the old weights unfindable. It may be dropped now, and leaves the tree when its last pin is
        dropped."""
        for watcher in self.watchers:
            watcher.cleared()
        self.weights += 1

    def reconsider(self, node: Node) -> None:
        """Requeue a node whose eviction key has changed."""
        if node in self.candidates or node.evictable:
            self.candidates.put(node)
        for bounded in self.bounded:
            bounded.reconsider(node)

    # -- parts --------------------------------------------------------------------------------------

    def _key(self, node: Node) -> bytes:
        return node.tokens[: self.page_size].tobytes()

    def _new_node(
        self, parent: Node | None, tokens: Int32, pages: list[Int32], namespace: Namespace | None = None
    ) -> Node:
        scope = parent.namespace if parent else namespace
        assert scope is not None
        self._serial += 1
        node = self._nodes[self._serial] = Node(self._serial, scope, parent, tokens, pages)
        node.created = node.last_used = self.tick
        node.used_at = self.epochs.submitted
        return node

    def root(self, namespace: Namespace) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            empty = np.empty(0, np.int32)
            root = self._new_node(None, empty, [empty for _ in self.pools], namespace)
            root.keys = [] if self.seed is None else [self.seed(namespace)]
            self.roots[namespace] = root
        return root
