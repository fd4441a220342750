"""The line before a session: first come, first served. A turn that leaves at any time leaves nothing behind."""

import asyncio
import random
from types import SimpleNamespace

import numpy as np
import pytest
from opened_sessions import Opened, news

from freehold.contract.errors import SessionBusy, TimedOut
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc.protocol import Options
from freehold.server.access.clients import Client
from freehold.server.openai.schema import CompletionBody
from freehold.server.sessions.conversation import Conversation
from freehold.server.sessions.settings import SessionSettings
from freehold.server.sessions.table import Session, SessionTable, Turn
from freehold.server.sessions.turns import turn_of

BODY = CompletionBody(prompt="", session_id="s", session_wait=True)


@pytest.fixture
def opened():
    return Opened()


@pytest.fixture
def sessions(opened):
    return opened.table


@pytest.fixture
def session(opened):
    return opened(opened.table.open("s", SessionSettings()))


async def finish(turn: Turn) -> None:
    await turn.observe(news([7], "", "stop"))


async def take(sessions: SessionTable, number: int) -> Turn:
    """A turn as a route has it: it waits, tokenizes, begins, and is its response's to close."""
    request = SimpleNamespace(state=SimpleNamespace(client=Client()), receive=asyncio.Event().wait)
    async with turn_of(sessions, request, BODY, SamplingParams()) as turn:
        assert turn is not None
        for _ in range(2):
            await asyncio.sleep(0)
        turn.begin(await sessions.conversation(turn.session), np.array([number], np.int32))
        return turn


async def check_idle(sessions: SessionTable, session: Session, tokens: list[int]) -> None:
    assert (await sessions.conversation(session)).tokens.tolist() == tokens
    assert (session.running, session.line) == ([], [])
    history = await sessions.history(session)
    assert sessions.memory.nbytes == history.nbytes, "something is held for ever"


async def cancel_first_of_two(sessions: SessionTable, session: Session, ticks: int) -> bool:
    """After so many turns of the event loop. The turn before both ends at the eighth -> whether there was anything to
    cancel."""
    before = await take(sessions, 1)
    first, second = (asyncio.create_task(take(sessions, number)) for number in (2, 3))
    for tick in range(ticks):
        if tick == 8:
            assert len(session.line) == 2
            await finish(before)
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    if not first.cancelled():
        await finish(first.result())
    if before in session.running:
        await finish(before)
    await finish(await asyncio.wait_for(second, 10))
    await check_idle(sessions, session, [1, 7, 3, 7] if first.cancelled() else [1, 7, 2, 7, 3, 7])
    return first.cancelled()


def test_a_turn_that_is_cancelled_at_any_await_gives_its_place_on(opened, sessions):
    cancelled = []
    for ticks in range(24):
        session = opened(sessions.open("s", SessionSettings()))
        cancelled.append(opened(cancel_first_of_two(sessions, session, ticks)))
        sessions.close(session)
    assert cancelled == sorted(cancelled, reverse=True)
    assert 12 <= sum(cancelled) < 20, "it was cancelled after each await, and last not at all"


def test_the_line_is_first_come_first_served(opened, sessions, session):
    rng, line = random.Random(0), []
    for _ in range(500):
        kind = rng.choice(["wait", "wait", "now", "leave", "finish"])
        if kind == "wait" or (kind == "now" and not line):
            line.append(sessions.line_up(session, waits=kind == "wait"))
        elif kind == "now":
            with pytest.raises(SessionBusy, match="active request"):
                sessions.line_up(session)
        elif kind == "leave" and line:
            line.pop(rng.randrange(len(line))).close()
        elif line:
            turn = line.pop(0)
            turn.begin(Conversation(), np.array([1], np.int32))
            opened(finish(turn))
            turn.close()  # a second time: the next one has the session
        assert [turn.has_come.is_set() for turn in line] == [True, *[False] * len(line)][: len(line)]
        assert session.running + session.line == line


def test_closing_refuses_turns_that_have_not_begun(opened, sessions, session):
    async def close_them() -> None:
        begun = await take(sessions, 1)
        waiting = [asyncio.create_task(take(sessions, number)) for number in (2, 3)]
        while len(session.line) < 2:
            await asyncio.sleep(0)
        sessions.close(session)
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, SessionBusy)
            assert "close was requested" in str(error)
        assert len(sessions) == 1
        await finish(begun)
        assert len(sessions) == 0

    opened(close_them())


def test_a_turn_that_tokenizes_while_its_session_is_closed_does_not_begin(sessions, session):
    turn = sessions.line_up(session)
    sessions.close(session, abort=True)
    with pytest.raises(SessionBusy, match="close was requested"):
        turn.begin(Conversation(), np.array([1], np.int32))
    turn.close()
    assert len(sessions) == 0
    assert turn.is_over.is_set()


def test_the_time_of_a_request_covers_its_waiting(sessions, session, monkeypatch):
    sessions.line_up(session)
    turn = sessions.line_up(session, waits=True)
    with pytest.raises(TimedOut, match=r"timed out after 0\.001 s"):
        asyncio.run(turn.wait(0.001))
    now = turn._lined_up + 4
    monkeypatch.setattr("time.monotonic", lambda: now)
    asked = Options(priority=3, timeout=10.0, client="c", adapter="a", namespace="other")
    assert turn.options(asked) == Options(priority=3, timeout=6.0, session="s", client="c", adapter="a")
    assert turn.options(Options(timeout=3.0)).timeout == 0.001
    assert turn.options(Options()).timeout is None


def test_a_turn_that_waits_has_the_time_that_the_server_gives_to_requests(sessions, session, monkeypatch):
    sessions.request_timeout = 0.001
    sessions.line_up(session)
    turn = sessions.line_up(session, waits=True)
    with pytest.raises(TimedOut, match=r"timed out after 0\.001 s"):
        asyncio.run(asyncio.wait_for(turn.wait(), 60))
    sessions.request_timeout = 10.0
    now = turn._lined_up + 4
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert turn.options(Options()).timeout == 6.0
    assert turn.options(Options(timeout=20.0)).timeout == 16.0
