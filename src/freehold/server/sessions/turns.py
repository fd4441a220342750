"""Session turns for routes: waiting in line, and tokenizing a chat's new messages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from fastapi import Request

from freehold.contract.arrays import Int32
from freehold.contract.errors import InvalidParameter
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc.async_engine import AsyncEngine
from freehold.server.access.clients import client_of
from freehold.server.openai.schema import Message, SamplingBody, for_template
from freehold.server.requests.prompt import Rendering
from freehold.server.requests.response import unless_disconnected
from freehold.server.sessions.continuation import continuation
from freehold.server.sessions.table import SessionTable, Turn


@contextlib.contextmanager
def closed_on_failure(turn: Turn | None) -> Iterator[None]:
    """Close the turn, if any, when the enclosed code fails. After success its response closes it."""
    try:
        yield
    except BaseException:
        if turn is not None:
            turn.close()
        raise


@contextlib.asynccontextmanager
async def turn_of(
    table: SessionTable, request: Request, body: SamplingBody, params: SamplingParams
) -> AsyncIterator[Turn | None]:
    """Yield a turn that holds the session named in the body, waiting in line if allowed; None without a session. It is
    `closed_on_failure`. Raises NoSuchSession, SessionBusy, TimedOut, Aborted or InvalidParameter."""
    if body.session_id is None:
        yield None
        return
    if params.n > 1:
        raise InvalidParameter("n", "must be 1 for a turn of a session")
    session = table.get(body.session_id, client_of(request))
    if session.settings.branching:
        raise InvalidParameter("session_id", "is that of a branching session, which takes requests of /generate")
    turn = table.line_up(session, bool(body.session_wait))
    with closed_on_failure(turn):
        if not turn.has_come.is_set():
            await unless_disconnected(request, turn.wait(body.timeout))
        yield turn


async def begin_chat(
    turn: Turn, table: SessionTable, engine: AsyncEngine, messages: list[Message], rendering: Rendering
) -> str:
    """Begin a turn with new `messages`. Return the whole chat's text. Raises InvalidParameter and what `Turn.begin`
    does."""
    tokenizer, conversation = engine.tokenizer, await table.conversation(turn.session)
    history = json.loads(conversation.messages)
    new = for_template(messages, history)
    whole = rendering.text(tokenizer, [*history, *new])
    rest = whole
    if history:
        before = replace(rendering, add_generation_prompt=False).text(tokenizer, history)
        rest = continuation(tokenizer, conversation.tokens, conversation.start, before, whole)
    if rest is None:
        tokens = await engine.encode(whole, False)
        conversation = conversation.shortened(_shared(conversation.tokens, tokens))
        turn.begin(conversation, tokens[conversation.length :], json.dumps(new))
    else:
        turn.begin(conversation, await engine.encode(rest, False), json.dumps(new))
    return whole


def _shared(one: Int32, other: Int32) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
