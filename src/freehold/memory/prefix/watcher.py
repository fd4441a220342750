"""Those who want to know what the prefix tree has."""

from __future__ import annotations

from typing import Protocol

from freehold.contract.arrays import Int64
from freehold.memory.prefix.node import Node


class Watcher(Protocol):
    """Told after each change, column by column of a node. It must not change the tree.

    Pages that weights from before have computed are none of its business: it is told that all have gone when the
    weights change (`cleared`), and nothing more of those that are still held.
    """

    def appeared(self, node: Node, group: int, columns: Int64) -> None:
        """The node has pages of a group in `columns` [n] now."""
        ...

    def vanished(self, node: Node, group: int, columns: Int64) -> None:
        """It will have none there: told before the node forgets the keys of these columns."""
        ...

    def cleared(self) -> None:
        """Other weights compute from now on: what they find is nothing."""
        ...

    def left(self, node: Node) -> None:
        """The node is no longer in the tree."""
        ...

    def cut(self, upper: Node, node: Node) -> None:
        """The first columns of the node are those of `upper` now."""
        ...

    def used(self, node: Node) -> None:
        """A request goes on from the end of the node."""
        ...


class Rescuer(Protocol):
    """Takes pages over that the tree gives up."""

    def take(self, node: Node, group: int, columns: Int64) -> Int64:
        """-> those of `columns` [n] whose pages it has moved to an owner of its own. The others are the caller's."""
        ...
