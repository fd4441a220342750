"""Branching sessions: each finished request is a point that later ones may continue from."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from freehold.arrays import Int32
from freehold.conversation import NO_TOKENS
from freehold.errors import TurnRefused
from freehold.server.native.schema import SessionParams


@dataclass
class Branch:
    """A request of the session: its whole input int32 [n] and, once it has finished, its output int32 [m]."""

    tokens: Int32
    output: Int32 | None = None
    parent: str | None = None


@dataclass(eq=False)
class BranchTree:
    """The requests of one session by id."""

    branches: dict[str, Branch] = field(default_factory=dict[str, Branch])

    @property
    def nbytes(self) -> int:
        outputs = [branch.output for branch in self.branches.values() if branch.output is not None]
        return sum(tokens.nbytes for tokens in (*outputs, *(branch.tokens for branch in self.branches.values())))

    def whole(self, params: SessionParams, new: Int32) -> Int32:
        """The whole input int32 [n] of a request with `new` tokens. Raises TurnRefused."""
        history = self._history(params)
        if params.offset is not None and params.offset >= 0:
            history = history[: params.offset]
        whole = np.concatenate([history, new])
        if not len(whole):
            raise TurnRefused("the turn has no tokens")
        return whole

    def _history(self, params: SessionParams) -> Int32:
        if params.rid is None:
            return NO_TOKENS
        branch = self.branches.get(params.rid)
        if branch is None:
            raise TurnRefused(f"session_params.rid: request {params.rid} is not one of the session's")
        if branch.output is None and not params.replace:
            raise TurnRefused(f"session_params.rid: request {params.rid} has not finished")
        if branch.output is None or params.drop_previous_output:
            return branch.tokens
        return np.concatenate([branch.tokens, branch.output])

    def begin(self, rid: str, params: SessionParams, whole: Int32) -> list[str]:
        """Add a request with this input -> the ids of requests to abort, which it replaces."""
        gone: list[str] = []
        if params.replace and params.rid is None:
            gone = [name for name, branch in self.branches.items() if branch.output is None]
            self.branches.clear()
        elif params.replace and params.rid is not None:
            gone = self._drop_children(params.rid)
            parent = self.branches[params.rid]
            if parent.output is None:
                gone.append(params.rid)
                parent.output = NO_TOKENS
        self.branches[rid] = Branch(whole, parent=params.rid)
        return gone

    def _drop_children(self, rid: str) -> list[str]:
        """Drop all requests that follow `rid` -> the names of the unfinished ones. A client may use a name twice, so
        the chain of parents may contain a cycle."""
        following: dict[str | None, list[str]] = {}
        for name, branch in self.branches.items():
            if name != rid:
                following.setdefault(branch.parent, []).append(name)
        gone, left = [], [rid]
        while left:
            children = following.get(left.pop(), [])
            gone += [name for name in children if self.branches.pop(name).output is None]
            left += children
        return gone

    def finish(self, rid: str, output: Int32) -> None:
        if rid in self.branches:
            self.branches[rid].output = output

    def abandon(self, rid: str) -> None:
        """An aborted request was never there, unless something continues from it."""
        branch = self.branches.get(rid)
        if branch is not None and branch.output is None:
            del self.branches[rid]
