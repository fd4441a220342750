"""Branching sessions: what replacing a request drops."""

import numpy as np

from freehold.server.native.schema import SessionParams
from freehold.server.sessions.branches import BranchTree

ONE = np.array([1], np.int32)


def chain(length: int) -> BranchTree:
    """r0, r1 after it, and so on; all but the last have finished."""
    tree, before = BranchTree(), None
    for number in range(length):
        tree.begin(f"r{number}", SessionParams(id="s", rid=before), ONE)
        before = f"r{number}"
        if number < length - 1:
            tree.finish(before, ONE)
    return tree


def test_replacing_what_follows_the_first_of_a_long_chain_drops_it_all():
    tree = chain(1500)
    assert tree.begin("new", SessionParams(id="s", rid="r0", replace=True), ONE) == ["r1499"]
    assert list(tree.branches) == ["r0", "new"]


def test_a_request_that_took_the_name_of_the_one_it_continues_is_no_endless_chain():
    """The name of a finished request may be used again."""
    tree = chain(3)
    tree.finish("r2", ONE)
    tree.begin("r0", SessionParams(id="s", rid="r2"), ONE)
    tree.finish("r0", ONE)
    assert tree.begin("new", SessionParams(id="s", rid="r0", replace=True), ONE) == []
    assert list(tree.branches) == ["r0", "new"]
