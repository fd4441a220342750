"""From the body of an OpenAI request with a session to a turn of that session."""

from __future__ import annotations

from typing import Any

from freehold.sampling_params import InvalidParameter, SamplingParams
from freehold.server.schema import Message, SamplingBody
from freehold.server.sessions import Session, SessionTable, Turn
from freehold.text.tokenizer import Tokenizer


async def session_of(table: SessionTable, body: SamplingBody, params: SamplingParams) -> Session | None:
    """The session that the body names, idle if it may wait for that. Raises NoSuchSession or
    InvalidParameter."""
    if body.session_id is None:
        return None
    if params.n > 1:
        raise InvalidParameter("n", "must be 1 for a turn of a session")
    session = table.get(body.session_id)
    while body.session_wait and session.turn is not None and not session.closing:
        await table.wait_until_idle(session)
    return session


def begin_chat_turn(
    table: SessionTable,
    session: Session,
    tokenizer: Tokenizer,
    messages: list[Message],
    add_generation_prompt: bool,
    variables: dict[str, Any],
) -> Turn:
    """A turn of a chat: `messages` are only the new ones."""
    if tokenizer.chat_template is None:
        raise InvalidParameter("messages", "the model has no chat template: use /v1/completions")
    render = tokenizer.chat_template.render
    new = [message.for_template() for message in messages]
    whole = render([*session.messages, *new], add_generation_prompt, **variables)
    keep, text = None, whole
    if session.messages:
        keep, text = _continuation(session, tokenizer, render(session.messages, False, **variables), whole)
    turn = table.begin(session, tokenizer.encode(text, False).tolist(), keep)
    turn.messages = [*session.messages, *new]
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
