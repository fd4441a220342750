"""How long a session may be idle: measured where nobody sets the clock, and only while nothing uses it."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from freehold.ipc.protocol import Ended
from freehold.ipc.streams import Delta
from freehold.server.sessions.store import SessionStore
from freehold.server.sessions.table import SessionSettings, SessionTable

ENGINE = SimpleNamespace(forget_session=lambda name: None, abort=lambda request_id: None)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(path, clock: Clock) -> tuple[SessionTable, SessionStore]:
    store = SessionStore(None if path is None else str(path))
    return SessionTable(ENGINE, store, clock=clock), store


def names(sessions: SessionTable) -> list[str]:
    sessions.close_idle()
    return sorted(session.id for session in sessions)


@pytest.mark.parametrize("jump", [1e9, -1e9])
def test_setting_the_wall_clock_closes_nothing_and_keeps_nothing_open(clock, monkeypatch, jump):
    sessions, _ = opened(None, clock)
    sessions.open("s", SessionSettings(timeout=10))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump)
    assert names(sessions) == ["s"]
    assert abs(sessions.last_used(next(iter(sessions))) - (now + jump)) < 1
    clock.now += 9
    assert names(sessions) == ["s"]
    clock.now += 2
    assert names(sessions) == []


def test_by_default_the_clock_is_one_that_nobody_sets():
    assert SessionTable(ENGINE, SessionStore(None)).clock is time.monotonic


def test_what_uses_a_session_keeps_it_open_and_its_idle_time_begins_behind_it(clock):
    sessions, _ = opened(None, clock)
    session = sessions.open("s", SessionSettings(timeout=10))
    turn = sessions.line_up(session)
    turn.begin(np.array([1], np.int32))
    clock.now += 100
    assert names(sessions) == ["s"]
    turn.observe(Delta(0, "", [7], [], Ended("r", "stop", 1, 0, 1, 0, 0.0)))
    clock.now += 9
    assert names(sessions) == ["s"]
    with sessions.in_use(session):  # as a route that restores it
        clock.now += 100
        assert names(sessions) == ["s"]
    clock.now += 9
    assert names(sessions) == ["s"]
    sessions.rewind(session, 1)
    clock.now += 9
    sessions.fork(session, "t")
    clock.now += 9
    assert names(sessions) == ["s", "t"]
    clock.now += 2
    assert names(sessions) == []


def test_after_a_restart_a_session_has_its_whole_time(tmp_path, clock):
    sessions, store = opened(tmp_path / "s.db", clock)
    sessions.open("s", SessionSettings(timeout=10))
    clock.now += 9
    store.close()
    clock.now = 5.0  # a machine that has started again
    sessions, store = opened(tmp_path / "s.db", clock)
    clock.now += 9
    assert names(sessions) == ["s"]
    clock.now += 2
    assert names(sessions) == []
    store.close()
    sessions, store = opened(tmp_path / "s.db", clock)
    assert names(sessions) == []
    store.close()
