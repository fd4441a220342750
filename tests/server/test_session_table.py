"""Sessions without HTTP: turns, closing, the store."""

import pytest

from freehold.conversation import Conversation
from freehold.errors import NoSuchSession, SessionBusy, TurnRefused
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Ended
from freehold.server.access.clients import Client
from freehold.server.sessions.store import SessionStore
from freehold.server.sessions.table import SessionSettings, SessionTable


class Engine:
    """Notes what it is told."""

    def __init__(self):
        self.forgotten: list[str] = []
        self.aborted: list[str] = []

    def forget_session(self, name: str) -> None:
        self.forgotten.append(name)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def ended(kind: str) -> Ended:
    return Ended("r", kind, 1, 0, 1, 0, 0.0)


def table(path: str | None = None) -> tuple[SessionTable, Engine]:
    engine = Engine()
    return SessionTable(engine, SessionStore(path)), engine


def test_a_turn_that_has_ended_makes_room_for_the_next_and_cannot_end_it():
    sessions, _ = table()
    session = sessions.open("s", SessionSettings())
    first = sessions.begin(session, [1, 2])
    with pytest.raises(SessionBusy):
        sessions.begin(session, [3])
    first.observe([7], "x", None)
    first.observe([8], "y", ended("length"))
    assert session.conversation.tokens == [1, 2, 7, 8]
    second = sessions.begin(session, [3])
    first.close()
    assert session.turn is second
    assert second.tokens == [1, 2, 7, 8, 3]
    second.observe([9], "z", ended("abort"))
    assert session.turn is None
    assert session.conversation.tokens == [1, 2, 7, 8]


def test_an_empty_turn_needs_history():
    sessions, _ = table()
    session = sessions.open(None, SessionSettings())
    with pytest.raises(TurnRefused, match="no tokens"):
        sessions.begin(session, [])
    assert session.turn is None
    sessions.begin(session, [1]).observe([2], "", ended("stop"))
    assert sessions.begin(session, []).tokens == [1, 2]


def test_closing_waits_for_the_turn_or_aborts_it():
    sessions, engine = table()
    session = sessions.open("s", SessionSettings())
    turn = sessions.begin(session, [1])
    turn.request_id = "r1"
    sessions.close(session)
    with pytest.raises(SessionBusy, match="close was requested"):
        sessions.begin(session, [2])
    assert not engine.forgotten
    sessions.close(session, abort=True)
    assert engine.aborted == ["r1"]
    turn.observe([], "", ended("abort"))
    assert engine.forgotten == ["s"]
    with pytest.raises(NoSuchSession):
        sessions.get("s", Client())


def test_what_is_committed_is_on_disk_and_what_is_not_is_not(tmp_path):
    path = str(tmp_path / "sessions.db")
    sessions, _ = table(path)
    session = sessions.open("s", SessionSettings(timeout=9.0, capacity=100, namespace="salt"))
    sessions.begin(session, [1, 2]).observe([3], "x", ended("stop"))
    sessions.begin(session, [4]).observe([5], "y", None)
    sessions.open("closed", SessionSettings())
    sessions.close(sessions.get("closed", Client()))
    again, _ = table(path)
    assert [found.id for found in again] == ["s"]
    found = again.get("s", Client())
    assert found.conversation.tokens == [1, 2, 3]
    assert found.settings == SessionSettings(9.0, 100, "salt")
    assert again.begin(found, [4]).tokens == [1, 2, 3, 4]


def test_a_conversation_takes_one_turn_at_a_time():
    conversation = Conversation()
    whole = conversation.begin([1, 2])
    with pytest.raises(TurnRefused):
        conversation.begin([3])
    conversation.commit(whole, [9])
    assert conversation.begin([3]) == [1, 2, 9, 3]


def test_a_fork_has_a_history_of_its_own():
    conversation = Conversation()
    conversation.commit(conversation.begin([1, 2]), [9])
    fork = conversation.fork()
    fork.rewind(1)
    assert (conversation.tokens, fork.tokens) == ([1, 2, 9], [1])


def test_an_abort_ends_the_request_of_that_id_and_no_other(monkeypatch):
    engine = AsyncEngine()
    for request_id in ("r1", "r10"):
        stream = f"{request_id}-0"
        engine._jobs[request_id] = engine._streams | {stream: None}
    sent: list[str] = []
    monkeypatch.setattr(engine, "_send_soon", lambda command: sent.append(command.id))
    engine.abort("r1")
    assert sent == ["r1-0"]
    engine.abort_by_prefix("r1")
    assert sent == ["r1-0", "r1-0", "r10-0"]
