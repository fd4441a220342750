"""How long a session may be idle: on the monotonic clock, and only while nothing uses it."""

import time

import pytest
from opened_sessions import Clock, Opened, news

from freehold.server.sessions.settings import SessionSettings


@pytest.fixture
def clock() -> Clock:
    return Clock()


def names(opened: Opened) -> list[str]:
    opened.table.close_idle()
    return opened.names


@pytest.mark.parametrize("jump", [1e9, -1e9])
def test_setting_the_wall_clock_closes_nothing_and_keeps_nothing_open(clock, monkeypatch, jump):
    opened = Opened(clock=clock)
    session = opened(opened.table.open("s", SessionSettings(timeout=10)))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump)
    assert names(opened) == ["s"]
    assert abs(opened.table.last_used(session) - (now + jump)) < 1
    clock.now += 9
    assert names(opened) == ["s"]
    clock.now += 2
    assert names(opened) == []


def test_by_default_the_clock_is_monotonic():
    assert Opened().table.clock is time.monotonic


@pytest.mark.parametrize("branching", [False, True])
def test_what_uses_a_session_keeps_it_open_and_its_idle_time_begins_behind_it(clock, branching):
    opened = Opened(clock=clock)
    session = opened(opened.table.open("s", SessionSettings(timeout=10, branching=branching)))
    turn = opened.begin(session, [1])
    clock.now += 100
    assert names(opened) == ["s"]
    opened(turn.observe(news([7], "", "stop")))
    clock.now += 9
    assert names(opened) == ["s"]
    with opened.table.in_use(session):  # as a route that restores it
        clock.now += 100
        assert names(opened) == ["s"]
    clock.now += 9
    if not branching:
        opened(opened.table.rewind(session, 1))
        clock.now += 9
    opened(opened.table.fork(session, "t"))
    clock.now += 9
    assert names(opened) == ["s", "t"]
    clock.now += 2
    assert names(opened) == []


def test_after_a_restart_a_session_has_its_whole_time(tmp_path, clock):
    opened = Opened(tmp_path / "s.db", clock=clock)
    opened(opened.table.open("s", SessionSettings(timeout=10)))
    clock.now += 9
    opened.close()
    clock.now = 5.0  # a machine that has started again
    opened = Opened(tmp_path / "s.db", clock=clock)
    clock.now += 9
    assert names(opened) == ["s"]
    clock.now += 2
    assert names(opened) == []
    opened.close()
    opened = Opened(tmp_path / "s.db", clock=clock)
    assert names(opened) == []
    opened.close()
