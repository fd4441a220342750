"""Interfaces for following the contents of the prefix tree."""

from __future__ import annotations

from typing import Protocol

from freehold.contract.arrays import Int64
from freehold.memory.prefix.node import Node


class Watcher(Protocol):
    """Notified after each change, column by column of a node. It must not change the tree.

    It sees only pages of the current weights: when the weights change (`cleared`) all older pages count as gone, and
    nothing more is reported of those still held.
    """

    def appeared(self, node: Node, group: int, columns: Int64) -> None:
        """Note that the node now has pages of a group in `columns` [n]."""
        ...

    def vanished(self, node: Node, group: int, columns: Int64) -> None:
        """Note that these pages go; called while the node still has the keys of these columns."""
        ...

    def cleared(self) -> None:
        """Note that the weights changed: nothing can be found any more."""
        ...

    def left(self, node: Node) -> None:
        """Note that the node is no longer in the tree."""
        ...

    def cut(self, upper: Node, node: Node) -> None:
        """Note that the first columns of the node were split off into `upper`."""
        ...

    def used(self, node: Node) -> None:
        """Note that a request resumes from the end of the node."""
        ...


class Rescuer(Protocol):
    """Takes over pages that the tree evicts."""

    def take(self, node: Node, group: int, columns: Int64) -> Int64:
        """Return those of `columns` [n] whose pages it moved to its own owner. The others are the caller's."""
        ...
