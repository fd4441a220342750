"""From the body of an OpenAI request with a session to a turn of that session."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from freehold.arrays import Int32
from freehold.errors import InvalidParameter, SessionBusy
from freehold.ipc.async_engine import AsyncEngine
from freehold.sampling_params import SamplingParams
from freehold.server.access.clients import Client
from freehold.server.openai.schema import Message, SamplingBody, for_template
from freehold.server.requests.prompt import Rendering
from freehold.server.sessions.continuation import continuation
from freehold.server.sessions.table import Session, SessionTable, Turn


async def session_of(table: SessionTable, client: Client, body: SamplingBody, params: SamplingParams) -> Session | None:
    """The session that the body names, idle if it may wait for that. Raises NoSuchSession or
    InvalidParameter."""
    if body.session_id is None:
        return None
    if params.n > 1:
        raise InvalidParameter("n", "must be 1 for a turn of a session")
    session = table.get(body.session_id, client)
    while body.session_wait and session.turn is not None and not session.closing:
        await table.wait_until_idle(session)
    return session


@dataclass(frozen=True)
class ChatTurn:
    """A turn of a chat that has not begun. `text` is all that the answer follows; of the session's tokens the first
    `keep` stay, all if that is None, with `new` ones behind them. `messages` are all of the chat's."""

    session: Session
    history: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    text: str
    new: Int32
    keep: int | None

    def begin(self, table: SessionTable) -> Turn:
        """Raises SessionBusy or TurnRefused; then nothing has changed."""
        if self.session.messages is not self.history:
            raise SessionBusy(f"session {self.session.id} has changed meanwhile")
        turn = table.begin(self.session, self.new.tolist(), self.keep)
        turn.messages = self.messages
        return turn


async def chat_turn(session: Session, engine: AsyncEngine, messages: list[Message], rendering: Rendering) -> ChatTurn:
    """`messages` are only the new ones. Raises InvalidParameter."""
    tokenizer, history = engine.tokenizer, session.messages
    new = for_template(messages, history)
    whole = rendering.text(tokenizer, [*history, *new])
    keep, text = None, whole
    if history:
        before = replace(rendering, add_generation_prompt=False).text(tokenizer, history)
        ends = session.conversation.ends
        begin = ends[-2] if len(ends) > 1 else 0
        rest = continuation(tokenizer, session.conversation.tokens, begin, before, whole)
        keep, text = (0, whole) if rest is None else (None, rest)
    return ChatTurn(session, history, [*history, *new], whole, await engine.encode(text, False), keep)
