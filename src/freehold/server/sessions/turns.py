"""From the body of an OpenAI request with a session to a turn of that session."""

from __future__ import annotations

from dataclasses import replace

from freehold.errors import InvalidParameter, SessionBusy
from freehold.ipc.async_engine import AsyncEngine
from freehold.sampling_params import SamplingParams
from freehold.server.access.clients import Client
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


async def begin_chat_turn(
    table: SessionTable, session: Session, engine: AsyncEngine, messages: list[Message], rendering: Rendering
) -> Turn:
    """A turn of a chat: `messages` are only the new ones."""
    tokenizer = engine.tokenizer
    new = [message.for_template() for message in messages]
    whole = rendering.text(tokenizer, [*session.messages, *new])
    keep, text = None, whole
    if session.messages:
        before = replace(rendering, add_generation_prompt=False).text(tokenizer, session.messages)
        keep, text = _continuation(session, tokenizer, before, whole)
    history = session.messages
    tokens = await engine.encode(text, False)
    if session.messages is not history:
        raise SessionBusy(f"session {session.id} has changed meanwhile")
    turn = table.begin(session, tokens.tolist(), keep)
    turn.messages = [*history, *new]
    return turn


def _continuation(session: Session, tokenizer: Tokenizer, before: str, whole: str) -> tuple[int | None, str]:
    """What text follows the session's tokens, which end with an answer -> (tokens of the session to keep, text).

    The answer's tokens stay as they were sampled. Where the template does not simply go on (it trims,
    or drops thoughts of earlier turns), the text is what it says, from the first token on.
    """
    answer = session.messages[-1].get("content") or ""
    at = before.rfind(answer)
    if not whole.startswith(before) or at < 0 or not answer:
        return 0, whole
    text = whole[at + len(answer) :]
    last = session.conversation.tokens[-1]
    if last in tokenizer.eos_tokens:
        text = text.removeprefix(tokenizer.piece(last, False).decode(errors="replace"))
    return None, text
