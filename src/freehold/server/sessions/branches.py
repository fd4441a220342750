"""Branching sessions: each finished request is a point that later ones may continue from."""

from __future__ import annotations

from dataclasses import dataclass, field

from freehold.errors import TurnRefused
from freehold.ipc.streams import Delta
from freehold.server.native.schema import SessionParams


@dataclass
class Branch:
    """A request of the session: its whole input and, once it has finished, its output."""

    tokens: list[int]
    output: list[int] | None = None
    parent: str | None = None


class BranchTurn:
    """A request of a branching session in flight; what it comes to is observed like the turn of a conversation."""

    def __init__(self, session_id: str, tree: BranchTree, rid: str, tokens: list[int]):
        self.session_id = session_id
        self.tokens = tokens
        self.request_id = rid
        self._tree = tree
        self._output: list[int] = []

    def observe(self, delta: Delta) -> None:
        self._output += delta.tokens
        if delta.ended is not None and delta.ended.is_complete:
            self._tree.finish(self.request_id, self._output)

    def close(self) -> None:
        """Idempotent."""
        self._tree.abandon(self.request_id)


@dataclass
class BranchTree:
    """The requests of one session by id."""

    branches: dict[str, Branch] = field(default_factory=dict[str, Branch])

    def begin(self, rid: str, params: SessionParams, new: list[int]) -> tuple[list[int], list[str]]:
        """Add a request -> (its whole input, the ids of requests to abort). Raises TurnRefused."""
        gone: list[str] = []
        if params.rid is None:
            history: list[int] = []
            if params.replace:
                gone = [name for name, branch in self.branches.items() if branch.output is None]
                self.branches.clear()
        else:
            history = self._history(params, gone)
        if params.offset is not None:
            history = history[: params.offset] if params.offset >= 0 else history
        whole = [*history, *new]
        if not whole:
            raise TurnRefused("the turn has no tokens")
        self.branches[rid] = Branch(whole, parent=params.rid)
        return whole, gone

    def _history(self, params: SessionParams, gone: list[str]) -> list[int]:
        branch = self.branches.get(params.rid or "")
        if branch is None:
            raise TurnRefused(f"session_params.rid: request {params.rid} is not one of the session's")
        if params.replace:
            gone += self._drop_children(params.rid or "")
            if branch.output is None:
                gone.append(params.rid or "")
                branch.output = []
        if branch.output is None:
            raise TurnRefused(f"session_params.rid: request {params.rid} has not finished")
        return branch.tokens if params.drop_previous_output else [*branch.tokens, *branch.output]

    def _drop_children(self, rid: str) -> list[str]:
        gone: list[str] = []
        for name in [name for name, branch in self.branches.items() if branch.parent == rid]:
            gone += self._drop_children(name)
            if self.branches.pop(name).output is None:
                gone.append(name)
        return gone

    def finish(self, rid: str, output: list[int]) -> None:
        if rid in self.branches:
            self.branches[rid].output = output

    def abandon(self, rid: str) -> None:
        """An aborted request was never there, unless something continues from it."""
        branch = self.branches.get(rid)
        if branch is not None and branch.output is None:
            del self.branches[rid]
