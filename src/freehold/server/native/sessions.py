"""Turns of sessions as the native API asks for them, streaming and branching."""

from __future__ import annotations

from freehold.errors import BadRequest, InvalidParameter, NoSuchSession, SessionBusy
from freehold.ipc.async_engine import AsyncEngine
from freehold.server.access.clients import Client
from freehold.server.native.schema import GenerateBody, SessionParams
from freehold.server.sessions.branches import BranchTurn
from freehold.server.sessions.table import Session, SessionTable, Turn
from freehold.text.tokenizer import Tokenizer


class NativeSessions:
    """The session that a body names, and its turns."""

    def __init__(self, engine: AsyncEngine, table: SessionTable):
        self._engine = engine
        self._table = table

    def find(self, body: GenerateBody, client: Client, outputs: int) -> Session | None:
        """None for a request without one. Raises BadRequest (as the contract says) for
        a session that can't take this turn."""
        params = body.session_params
        if params is None or params.id is None:
            return None
        if outputs != 1:
            raise InvalidParameter("session_params", "takes one prompt and one output, not a batch")
        try:
            session = self._table.get(params.id, client)
        except NoSuchSession as error:
            raise BadRequest(str(error), "session_params") from error
        if not session.settings.branching:
            _refuse_branching(params)
            if session.turn is not None:
                raise BadRequest(f"session {session.id} already has an active request")
        if session.closing:
            raise BadRequest(f"close was requested for session {session.id}")
        return session

    def begin(self, session: Session, params: SessionParams, rid: str, tokens: list[int]) -> Turn | BranchTurn:
        """Start a turn with new input, if the whole of it fits. Raises BadRequest;
        then nothing has changed."""
        new = _without_bos(tokens, session, self._engine.tokenizer)
        if not session.settings.branching:
            room(len(session.conversation.tokens) + len(new), self._engine)
            try:
                return self._table.begin(session, new)
            except SessionBusy as error:
                raise BadRequest(str(error)) from error
        whole, gone = session.branches.begin(rid, params, new)
        turn = BranchTurn(session.id, session.branches, rid, whole)
        try:
            room(len(whole), self._engine)
        except InvalidParameter:
            turn.close()
            raise
        for name in gone:
            self._engine.abort(name)
        return turn


def room(length: int, engine: AsyncEngine) -> int:
    """What the context leaves for output behind `length` tokens. Raises InvalidParameter."""
    limit = engine.info.max_model_len
    if length >= limit:
        raise InvalidParameter(
            "input_ids",
            f"the input has {length} tokens, the maximum allowed length (context length) is {limit} tokens "
            "including output",
        )
    return max(limit - length - 1, 1)


def _refuse_branching(params: SessionParams) -> None:
    for name in ("offset", "replace", "drop_previous_output"):
        if getattr(params, name):
            raise InvalidParameter(f"session_params.{name}", "is not for streaming sessions")


def _without_bos(tokens: list[int], session: Session, tokenizer: Tokenizer) -> list[int]:
    """A turn after the first does not begin with BOS again."""
    has_history = bool(session.conversation.tokens)
    return tokens[1:] if has_history and tokens[:1] == [tokenizer.bos_token] and tokenizer.adds_bos else tokens
