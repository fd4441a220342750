"""From the body of an OpenAI request with a session to a turn of that session."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from freehold.arrays import Int32
from freehold.errors import InvalidParameter, SessionBusy
from freehold.ipc.async_engine import AsyncEngine
from freehold.sampling_params import SamplingParams
from freehold.server.access.clients import Client
from freehold.server.answers.messages import check_calls
from freehold.server.openai.schema import Message, SamplingBody
from freehold.server.requests.prompt import Rendering
from freehold.server.sessions.table import Session, SessionTable, Turn
from freehold.text.tokenizer import Tokenizer


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
    new = [message.for_template() for message in messages]
    check_calls(new, history)
    whole = rendering.text(tokenizer, [*history, *new])
    keep, text = None, whole
    if history:
        before = replace(rendering, add_generation_prompt=False).text(tokenizer, history)
        keep, text = _continuation(session, tokenizer, before, whole)
    return ChatTurn(session, history, [*history, *new], whole, await engine.encode(text, False), keep)


def _continuation(session: Session, tokenizer: Tokenizer, before: str, whole: str) -> tuple[int | None, str]:
    """What text follows the session's tokens, which end with an answer -> (tokens of the session to keep, text).

    The answer's tokens stay as they were sampled. Where the template does not simply go on (it trims, drops thoughts of
    earlier turns, or writes calls in another way), the text is what it says, from the first token on.
    """
    written = _written(session, tokenizer)
    at = before.rfind(written)
    if not whole.startswith(before) or at < 0 or not written:
        return 0, whole
    text = whole[at + len(written) :]
    last = session.conversation.tokens[-1]
    if last in tokenizer.eos_tokens:
        text = text.removeprefix(tokenizer.piece(last, False).decode(errors="replace"))
    return None, text


def _written(session: Session, tokenizer: Tokenizer) -> str:
    """What the model wrote in the last turn, and what it was asked: with thoughts and calls as they were."""
    tokens, ends = session.conversation.tokens, session.conversation.ends
    begin = ends[-2] if len(ends) > 1 else 0
    end = len(tokens) - (tokens[-1] in tokenizer.eos_tokens)
    return tokenizer.decode(tokens[begin:end], skip_special_tokens=False).lstrip()
