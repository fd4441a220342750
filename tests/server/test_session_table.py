"""Sessions without HTTP: turns, closing, the store."""

import contextlib
import json
import shutil
import sqlite3
from types import SimpleNamespace

import numpy as np
import pytest

from freehold.conversation import Conversation, with_messages
from freehold.errors import NoSuchSession, SessionBusy, StoreFailed, TurnRefused
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Ended
from freehold.ipc.streams import Delta
from freehold.sampling_params import SamplingParams
from freehold.server.access.clients import Client
from freehold.server.sessions.store import SessionStore
from freehold.server.sessions.table import Session, SessionSettings, SessionTable, Turn
from freehold.server.sessions.turns import closed_on_failure
from freehold.text.answers.events import Content


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


def news(tokens: list[int], text: str, end: Ended | None) -> Delta:
    return Delta(0, text, tokens, [], end, events=[Content(text)])


def table(path: str | None = None, memory_bytes: int = 1 << 20) -> tuple[SessionTable, Engine]:
    engine = Engine()
    return SessionTable(engine, SessionStore(path), memory_bytes), engine


def begin(sessions: SessionTable, session: Session, new: list[int]) -> Turn:
    """As a route does it: a turn that can't begin gives its place on."""
    turn = sessions.line_up(session)
    with closed_on_failure(turn):
        turn.begin(np.array(new, np.int32))
    return turn


def tokens(sessions: SessionTable, session: Session) -> list[int]:
    return sessions.conversation(session).tokens.tolist()


def test_a_turn_that_has_ended_makes_room_for_the_next_and_cannot_end_it():
    sessions, _ = table()
    session = sessions.open("s", SessionSettings())
    first = begin(sessions, session, [1, 2])
    with pytest.raises(SessionBusy):
        begin(sessions, session, [3])
    first.observe(news([7], "x", None))
    first.observe(news([8], "y", ended("length")))
    assert tokens(sessions, session) == [1, 2, 7, 8]
    second = begin(sessions, session, [3])
    first.close()
    assert session.turn is second
    assert second.tokens.tolist() == [1, 2, 7, 8, 3]
    second.observe(news([9], "z", ended("abort")))
    assert session.turn is None
    assert tokens(sessions, session) == [1, 2, 7, 8]


def test_an_empty_turn_needs_history():
    sessions, _ = table()
    session = sessions.open(None, SessionSettings())
    with pytest.raises(TurnRefused, match="no tokens"):
        begin(sessions, session, [])
    assert session.turn is None
    begin(sessions, session, [1]).observe(news([2], "", ended("stop")))
    assert begin(sessions, session, []).tokens.tolist() == [1, 2]


def test_closing_waits_for_the_turn_or_aborts_it():
    sessions, engine = table()
    session = sessions.open("s", SessionSettings())
    turn = begin(sessions, session, [1])
    turn.request_id = "r1"
    sessions.close(session)
    with pytest.raises(SessionBusy, match="close was requested"):
        begin(sessions, session, [2])
    assert not engine.forgotten
    sessions.close(session, abort=True)
    assert engine.aborted == ["r1"]
    turn.observe(news([], "", ended("abort")))
    assert engine.forgotten == ["s"]
    with pytest.raises(NoSuchSession):
        sessions.get("s", Client())


def test_what_is_committed_is_on_disk_and_what_is_not_is_not(tmp_path):
    path = str(tmp_path / "sessions.db")
    sessions, _ = table(path)
    session = sessions.open("s", SessionSettings(timeout=9.0, capacity=100, namespace="salt"))
    begin(sessions, session, [1, 2]).observe(news([3], "x", ended("stop")))
    begin(sessions, session, [4]).observe(news([5], "y", None))
    sessions.open("closed", SessionSettings())
    sessions.close(sessions.get("closed", Client()))
    for file in tmp_path.glob("sessions.db*"):  # as a kill at this moment would leave it
        shutil.copy(file, tmp_path / file.name.replace("sessions", "left"))
    again, _ = table(str(tmp_path / "left.db"))
    assert [found.id for found in again] == ["s"]
    found = again.get("s", Client())
    assert tokens(again, found) == [1, 2, 3]
    assert found.settings == SessionSettings(9.0, 100, "salt")
    assert begin(again, found, [4]).tokens.tolist() == [1, 2, 3, 4]


def full(sessions: SessionTable, is_full: bool = True) -> None:
    """The disk has no room for a single page more, or has again."""
    database = sessions.memory._store._database
    assert database is not None
    database.execute(f"PRAGMA max_page_count={1 if is_full else 1 << 30}")


def test_a_turn_that_is_not_on_disk_has_not_happened(tmp_path):
    path = str(tmp_path / "sessions.db")
    sessions, _ = table(path)
    session = sessions.open("s", SessionSettings())
    begin(sessions, session, [1, 2]).observe(news([3], "x", ended("stop")))
    full(sessions)
    large = list(range(100_000))
    turn = begin(sessions, session, large)
    with pytest.raises(StoreFailed, match="can't be written"):
        turn.observe(news([5], "y", ended("stop")))
    assert session.turn is None
    assert (tokens(sessions, session), session.turns) == ([1, 2, 3], 1)
    assert [one.id for one in sessions] == ["s"]
    full(sessions, False)
    begin(sessions, session, large).observe(news([5], "y", ended("stop")))
    assert (session.tokens, session.turns) == (100_004, 2)


def test_a_session_is_closed_whatever_the_disk_says(tmp_path, monkeypatch):
    path = str(tmp_path / "sessions.db")
    sessions, _ = table(path)
    session = sessions.open("s", SessionSettings())
    store = sessions.memory._store
    real, store._database = store._database, sqlite3.connect(":memory:")  # has no such table: every write fails
    sessions.close(session)
    assert len(sessions) == 0
    store._database = real
    sessions.open("t", SessionSettings())
    store.close()
    again, _ = table(path)
    assert [found.id for found in again] == ["t"]


def test_a_store_has_one_server(tmp_path):
    path = str(tmp_path / "sessions.db")
    first = SessionStore(path)
    with pytest.raises(ValueError, match="in use by another server"):
        SessionStore(path)
    first.close()
    SessionStore(path).close()


def test_a_damaged_store_is_said_to_be_and_what_can_be_read_is_kept(tmp_path):
    path = tmp_path / "sessions.db"
    sessions, _ = table(str(path))
    for name in ("a", "b", "c"):
        session = sessions.open(name, SessionSettings())
        begin(sessions, session, [1, 2]).observe(news([3], "x", ended("stop")))
    sessions.memory._store.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("UPDATE sessions SET settings = '{' WHERE id = 'b'")
    with pytest.raises(ValueError, match=r"is damaged .* --session-store-recover"):
        SessionStore(str(path))
    store = SessionStore(str(path), recover=True)
    assert sorted(one.id for one in store) == ["a", "c"]
    store.close()
    assert len(list(tmp_path.glob("*.damaged-*"))) >= 1
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(ValueError, match="is damaged"):
        SessionStore(str(path))
    store = SessionStore(str(path), recover=True)
    assert list(store) == []
    store.close()


def test_capacity_counts_output():
    sessions, _ = table()
    session = sessions.open("s", SessionSettings(capacity=10))
    turn = begin(sessions, session, [1] * 7)
    assert turn.fitted(SamplingParams(max_tokens=50, min_tokens=20)).max_tokens == 3
    turn.close()
    with pytest.raises(TurnRefused, match="capacity is 10"):
        begin(sessions, session, [1] * 10)


def test_a_rewind_forgets_the_turns_behind_it():
    sessions, _ = table()
    session = sessions.open("s", SessionSettings())
    for _ in range(3):
        begin(sessions, session, [1, 2]).observe(news([3], "x", ended("stop")))
    sessions.rewind(session, 7)
    assert (session.tokens, session.turns) == (7, 2)
    with pytest.raises(TurnRefused) as refused:
        sessions.rewind(session, 8)
    assert refused.value.field == "to"


def test_a_conversation_is_a_value():
    empty = Conversation()
    whole = empty.begin(np.array([1, 2], np.int32))
    one = empty.after(whole, [9])
    two = one.after(one.begin(np.array([3], np.int32)), [8])
    assert (empty.tokens.tolist(), one.tokens.tolist(), two.tokens.tolist()) == ([], [1, 2, 9], [1, 2, 9, 3, 8])
    assert one.parts[0] is whole, "the prompt is the history, without a copy"
    assert (one.rewound(1).tokens.tolist(), one.tokens.tolist()) == ([1], [1, 2, 9])
    assert two.rewound(4).ends.tolist() == [3]
    assert two.nbytes == 4 * 5 + 4 * 2 + len("[]")
    assert whole.dtype == two.tokens.dtype == np.int32


def test_messages_are_a_list_however_many_come():
    parts = [[{"a": "]"}], [], [{"b": [1]}, {"c": "\ud800"}]]
    text = "[]"
    for part in parts:
        text = with_messages(text, part)
    assert json.loads(text) == [*parts[0], *parts[2]]


def test_an_abort_ends_the_request_of_that_id_and_no_other(monkeypatch):
    engine = AsyncEngine()
    for request_id in ("r1", "r10"):
        stream = f"{request_id}-0"
        engine._jobs[request_id] = engine._streams | {stream: None}
    sent: list[str] = []
    child = SimpleNamespace(send_soon=lambda command: sent.append(command.id))
    monkeypatch.setattr(engine, "_child", child, raising=False)
    engine.abort("r1")
    assert sent == ["r1-0"]
    engine.abort_by_prefix("r1")
    assert sent == ["r1-0", "r1-0", "r10-0"]
