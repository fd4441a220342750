"""A request of a branching session in flight."""

from __future__ import annotations

import numpy as np

from freehold.arrays import Int32
from freehold.conversation import NO_TOKENS
from freehold.ipc.streams import Delta
from freehold.server.native.schema import SessionParams
from freehold.server.sessions.histories import Histories
from freehold.server.sessions.table import Session


class BranchTurn:
    """It begins, is observed and is closed like the turn of a conversation, but beside others of its session."""

    def __init__(self, session: Session, memory: Histories, rid: str):
        self.session = session
        self.session_id = session.id
        self.request_id = rid
        self.tokens = NO_TOKENS  # until it has begun
        self._memory = memory
        self._output: list[int] = []

    def begin(self, params: SessionParams, whole: Int32) -> list[str]:
        """With the whole input int32 [n] -> the ids of requests to abort. Raises SessionBusy or SessionsFull; then
        nothing has changed."""
        self.session.check_open()
        tree = self.session.branches
        self._memory.hold(tree, tree.nbytes + whole.nbytes)
        gone = tree.begin(self.request_id, params, whole)
        self._memory.hold(tree, tree.nbytes)
        self.tokens = whole
        return gone

    def observe(self, delta: Delta) -> None:
        self._output += delta.tokens
        if delta.ended is not None and delta.ended.is_complete:
            self.session.branches.finish(self.request_id, np.array(self._output, np.int32))

    def close(self) -> None:
        """Idempotent."""
        if len(self.tokens):
            self.session.branches.abandon(self.request_id)
