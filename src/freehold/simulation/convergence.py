"""Tier contents: pages hold what their keys say, and reach the tiers that the policies ask for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from freehold.memory import WritePolicy
from freehold.memory.prefix.node import Node
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.backoff import RETRY_MAX_S
from freehold.memory.tiers.tiers import Tiers
from freehold.simulation.mover import SimulatedMover

ROUNDS = 400  # iterations until all has been copied


class NotConverged(AssertionError):
    """A page does not reach its tier, though nothing fails."""


def check_content(tree: PrefixTree, tiers: Tiers, mover: SimulatedMover) -> None:
    """Check that pages hold what their keys say, and that storage has what it was given."""
    for group, pages in enumerate(tiers.host.pages):
        entries = dict(pages.entries())
        mover.check_content(False, group, list(entries), np.array(list(entries.values()), np.int32))
        for node in tree.nodes():
            there = node.pages[group].nonzero()[0]
            mover.check_content(True, group, node.keys_at(there), node.pages[group][there])
        key = tiers.plan.group_keys[group]
        given = [one for one, page in entries.items() if pages.given.stored[page]]
        lost = [one for one in given if not mover.has_stored(one, key)]
        assert not lost, f"group {group}: {len(lost)} pages count as stored, and storage lacks them"


def converge(tree: PrefixTree, tiers: Tiers, mover: SimulatedMover, turn: Callable[[float], None]) -> None:
    """Let all transfers succeed until nothing is lacking. `turn` runs an iteration after some seconds. Raise
    NotConverged."""
    mover.heal()
    for _ in range(ROUNDS):
        turn(RETRY_MAX_S / 8)
        if not mover.pending and _lacking(tree, tiers) is None:
            return
    raise NotConverged(f"after {ROUNDS} iterations without a fault: {_lacking(tree, tiers)}")


def _lacking(tree: PrefixTree, tiers: Tiers) -> str | None:
    """Describe pages that a deeper tier lacks although the policy wants them there, or return None."""
    for group, pages in enumerate(tiers.host.pages):
        if tiers.storage is not None and (owed := int(np.count_nonzero(pages.given.owed))):
            return f"group {group}: storage lacks {owed} pages that it is owed"
        if pages.pool.free_count == 0 and tiers.storage is None:
            continue
        for node in filter(lambda node: _is_copied_ahead(node, tree, tiers), tree.nodes()):
            keys = node.keys_at(node.pages[group].nonzero()[0])
            lacking = ~(pages.has(keys) | pages.given.of_device(keys))
            if lacking.any():
                return f"group {group}: the host lacks {np.count_nonzero(lacking)} pages of {node!r}"
    return None


def _is_copied_ahead(node: Node, tree: PrefixTree, tiers: Tiers) -> bool:
    policy = tiers.plan.write_policy
    is_asked = policy is WritePolicy.WRITE_THROUGH or (policy is WritePolicy.SELECTIVE and node.hits > 0)
    return is_asked and node.namespace.weights == tree.weights
