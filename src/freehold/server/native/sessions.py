"""Session turns of the native API, streaming and branching."""

from __future__ import annotations

from freehold.contract.arrays import Int32
from freehold.contract.errors import BadRequest, InvalidParameter, NoSuchSession, SessionBusy
from freehold.ipc.async_engine import AsyncEngine
from freehold.server.access.clients import Client
from freehold.server.native.schema import GenerateBody, SessionParams
from freehold.server.sessions.branches import branch_of
from freehold.server.sessions.conversation import Conversation
from freehold.server.sessions.table import SessionTable, Turn
from freehold.text.tokenizer import Tokenizer


class NativeSessions:
    """Turns of the sessions that bodies name."""

    def __init__(self, engine: AsyncEngine, table: SessionTable):
        self._engine = engine
        self._table = table

    def turn(self, body: GenerateBody, client: Client, rid: str, outputs: int) -> Turn | None:
        """Return a turn that holds its session, or None for a request without a session. The caller must close it.
        Raises BadRequest, part of the API, for a session that can't accept it."""
        params = body.session_params
        if params is None or params.id is None:
            return None
        if outputs != 1:
            raise InvalidParameter("session_params", "takes one prompt and one output, not a batch")
        try:
            session = self._table.get(params.id, client)
            if not session.settings.branching:
                _refuse_branching(params)
            return self._table.line_up(session, name=rid if session.settings.branching else "")
        except NoSuchSession as error:
            raise BadRequest(str(error), "session_params") from error
        except SessionBusy as error:
            raise BadRequest(str(error)) from error

    async def begin(self, turn: Turn, params: SessionParams, tokens: Int32) -> None:
        """Begin with new input int32 [n], if all of it fits. Raises BadRequest, leaving everything unchanged."""
        session = turn.session
        history = await self._table.history(session)
        base, replacement = history.head, None
        if session.settings.branching:
            base, replacement = branch_of(session, history, params)
        new = _without_bos(tokens, base, self._engine.tokenizer)
        room(base.length + len(new), self._engine)
        try:
            turn.begin(base, new, replacement=replacement)
        except SessionBusy as error:
            raise BadRequest(str(error)) from error


def room(length: int, engine: AsyncEngine) -> int:
    """Return the context left for output after `length` tokens. Raises InvalidParameter."""
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


def _without_bos(tokens: Int32, base: Conversation, tokenizer: Tokenizer) -> Int32:
    """Remove BOS from input that continues a conversation."""
    begins_again = tokenizer.adds_bos and base.length > 0 and tokens[:1].tolist() == [tokenizer.bos_token]
    return tokens[1:] if begins_again else tokens
