"""A queue of nodes waiting for a copy, with their pages counted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from freehold.memory.prefix.node import Node
from freehold.memory.tiers.backoff import Backoff


class NodesInLine:
    """First in, first out. `page_count`: page columns of the nodes, each as of its last `put`. `backoff`: the pause of
    the whole line after a failed copy."""

    def __init__(self, backoff: Backoff):
        self.backoff = backoff
        self.page_count = 0
        self._nodes: OrderedDict[int, tuple[Node, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return (node for node, _ in self._nodes.values())

    def __contains__(self, node: Node) -> bool:
        return node.serial in self._nodes

    def put(self, node: Node) -> None:
        """Add a node at the end; a waiting one keeps its place."""
        _, before = self._nodes.get(node.serial, (node, 0))
        self._nodes[node.serial] = node, node.page_count
        self.page_count += node.page_count - before

    def remove(self, node: Node) -> None:
        """Remove a node, if it waits."""
        _, pages = self._nodes.pop(node.serial, (node, 0))
        self.page_count -= pages

    def pop(self) -> Node:
        """Remove and return the first node. Raise KeyError if there is none."""
        _, (node, pages) = self._nodes.popitem(last=False)
        self.page_count -= pages
        return node
