"""Sessions without HTTP: turns, closing, and values of conversations. `test_session_machine.py` has the rest."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from opened_sessions import Opened, news

from freehold.contract.errors import NoSuchSession, SessionBusy, SessionsFull, TurnRefused
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc.async_engine import AsyncEngine
from freehold.server.access.clients import Client
from freehold.server.native.schema import SessionParams
from freehold.server.sessions.branches import branch_of
from freehold.server.sessions.conversation import OBJECT_BYTES, Conversation, with_messages
from freehold.server.sessions.settings import SessionSettings
from freehold.server.sessions.table import Session
from freehold.server.sessions.turns import closed_on_failure


@pytest.fixture
def opened():
    return Opened()


@pytest.fixture
def session(opened):
    return opened(opened.table.open("s", SessionSettings()))


def test_a_turn_that_has_ended_makes_room_for_the_next_and_cannot_end_it(opened, session):
    first = opened.begin(session, [1, 2])
    with pytest.raises(SessionBusy):
        opened.begin(session, [3])
    opened(first.observe(news([7], "x")))
    opened(first.observe(news([8], "y", "length")))
    assert opened.tokens(session) == [1, 2, 7, 8]
    second = opened.begin(session, [3])
    first.close()
    assert session.running == [second]
    assert second.tokens.tolist() == [1, 2, 7, 8, 3]
    opened(second.observe(news([9], "z", "abort")))
    assert not session.running
    assert opened.tokens(session) == [1, 2, 7, 8]


def test_an_empty_turn_needs_history(opened, session):
    with pytest.raises(TurnRefused, match="no tokens"):
        opened.begin(session, [])
    assert not session.running
    opened.turn(session, [1], [2])
    assert opened.begin(session, []).tokens.tolist() == [1, 2]


def test_closing_waits_for_the_turn_or_aborts_it(opened, session):
    turn = opened.begin(session, [1])
    turn.request_id = "r1"
    opened.table.close(session)
    with pytest.raises(SessionBusy, match="close was requested"):
        opened.begin(session, [2])
    assert not opened.engine.forgotten
    opened.table.close(session, abort=True)
    assert opened.engine.aborted == ["r1"]
    opened(turn.observe(news([], "", "abort")))
    assert opened.engine.forgotten == ["s"]
    with pytest.raises(NoSuchSession):
        opened.session("s")


def test_capacity_counts_output(opened):
    session = opened(opened.table.open("t", SessionSettings(capacity=10)))
    turn = opened.begin(session, [1] * 7)
    assert turn.fitted(SamplingParams(max_tokens=50, min_tokens=20)).max_tokens == 3
    turn.close()
    with pytest.raises(TurnRefused, match="capacity is 10"):
        opened.begin(session, [1] * 10)


def test_a_rewind_forgets_the_turns_behind_it(opened, session):
    for _ in range(3):
        opened.turn(session, [1, 2], [3])
    opened(opened.table.rewind(session, 7))
    assert (session.tokens, session.turns) == (7, 2)
    with pytest.raises(TurnRefused) as refused:
        opened(opened.table.rewind(session, 8))
    assert refused.value.field == "to"


# -- branches --------------------------------------------------------------------------------------------------


def branch(opened, session, name, new=1, **params):
    found = opened(opened.table.history(session))
    base, replacement = branch_of(session, found, SessionParams(id="b", **params))
    turn = opened.table.line_up(session, name=name)
    with closed_on_failure(turn):
        turn.begin(base, np.ones(new, np.int32), replacement=replacement)
    return turn


def finish(opened, turn, output=(7,)):
    opened(turn.observe(news([*output], "", "stop")))


@pytest.fixture
def branching(opened):
    return opened(opened.table.open("b", SessionSettings(branching=True)))


def test_branches_share_what_they_begin_with(opened, branching):
    finish(opened, branch(opened, branching, "r0", 1000))
    for number in range(1, 101):
        finish(opened, branch(opened, branching, f"r{number}", rid=f"r{number - 1}"))
        finish(opened, branch(opened, branching, f"o{number}", rid=f"r{number - 1}", offset=900))
    assert opened.table.memory.nbytes < 4 * 1300 + 201 * (OBJECT_BYTES + 150)
    assert opened.tokens(branching) == [1] * 901 + [7]


def test_a_chain_of_ten_thousand_turns_does_not_recurse(tmp_path):
    opened = Opened(tmp_path / "s.db", 1 << 30)
    point, points = None, {}
    for number in range(1, 10_001):
        added = np.full(2, number, np.int32)
        points[f"r{number}"] = point = Conversation(point, 2 * number - 2, added, 1, number, number=number)
    session = opened(opened.table.open("long", SessionSettings(branching=True), points))
    child = opened(opened.table.fork(session, "child"))
    assert (child.tokens, child.turns) == (20_000, 10_000)
    finish(opened, branch(opened, child, "new", rid="r2", replace=True))
    assert list(opened(opened.table.history(child)).points) == ["r1", "r2", "new"]
    opened.close()
    again = Opened(tmp_path / "s.db", 1 << 30)
    assert len(opened_points := again(again.table.history(again.session("long"))).points) == 10_000
    assert opened_points["r10000"].length == 20_000
    assert list(again(again.table.history(again.session("child"))).points) == ["r1", "r2", "new"]
    again.close()


def test_a_replacement_that_is_refused_replaces_nothing(opened, branching):
    finish(opened, branch(opened, branching, "root"))
    finish(opened, branch(opened, branching, "one", rid="root"))
    running = branch(opened, branching, "two", rid="one")
    for params in ({"rid": "root"}, {}, {"rid": "two"}):
        turn = branch(opened, branching, "new", replace=True, **params)
        opened(turn.observe(news([], "", "error")))  # as an engine whose line is full says it
        turn.close()
        opened.table.memory._limit = 0
        with pytest.raises(SessionsFull):
            branch(opened, branching, "new", replace=True, **params)
        opened.table.memory._limit = 1 << 20
    assert not opened.engine.aborted
    finish(opened, running)
    assert list(opened(opened.table.history(branching)).points) == ["root", "one", "two"]


def points(opened, session) -> dict[str, list[int]]:
    return {name: one.tokens.tolist() for name, one in opened(opened.table.history(session)).points.items()}


def test_a_replacement_concerns_what_was_there_when_it_began(opened, branching):
    finish(opened, branch(opened, branching, "root"))
    finish(opened, branch(opened, branching, "one", rid="root"))
    slow, other = branch(opened, branching, "slow", rid="one"), branch(opened, branching, "other")
    new = branch(opened, branching, "new", rid="root", replace=True)
    late = branch(opened, branching, "late", rid="one")
    finish(opened, branch(opened, branching, "later", rid="root"))
    opened(new.observe(news([9])))
    assert opened.engine.aborted == ["slow"]
    finish(opened, slow)  # as one that ends before it hears of that
    assert [*points(opened, branching)] == ["root", "one", "later"]
    for turn in (new, late, other):
        finish(opened, turn)
    assert points(opened, branching) == {
        "root": [1, 7], "later": [1, 7, 1, 7], "new": [1, 7, 1, 9, 7], "late": [1, 7, 1, 7, 1, 7], "other": [1, 7],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["stop", "abort"])
def test_of_an_unfinished_request_that_is_replaced_the_input_stays_or_all_of_it(opened, branching, kind):
    finish(opened, branch(opened, branching, "root"))
    slow = branch(opened, branching, "slow", rid="root", new=2)
    opened(slow.observe(news([5])))
    new = branch(opened, branching, "new", rid="slow", replace=True)
    opened(new.observe(news([9])))
    assert opened.engine.aborted == ["slow"]
    opened(slow.observe(news([], "", kind)))
    finish(opened, new)
    left = [1, 7, 1, 1] if kind == "abort" else [1, 7, 1, 1, 5]
    assert points(opened, branching) == {"root": [1, 7], "slow": left, "new": [1, 7, 1, 1, 1, 9, 7]}


def test_branches_without_a_store_are_bounded(opened, branching):
    opened.table.memory._limit = 100_000
    for number in range(69):  # of 4 * 201 + 512 + 102 bytes and a little
        finish(opened, branch(opened, branching, f"r{number}", 200))
    with pytest.raises(SessionsFull, match="session_memory_bytes"):
        branch(opened, branching, "more", 1000)
    assert 90_000 < opened.table.memory.nbytes <= 100_000
    opened.table.close(branching)
    assert opened.table.memory.nbytes == 0


# -- values ----------------------------------------------------------------------------------------------------


def test_a_conversation_is_a_value():
    empty = Conversation()
    whole = empty.begin(np.array([1, 2], np.int32))
    one = empty.after(whole, [9], number=1)
    two = one.after(one.begin(np.array([3], np.int32)), [8], number=2)
    assert (empty.tokens.tolist(), one.tokens.tolist(), two.tokens.tolist()) == ([], [1, 2, 9], [1, 2, 9, 3, 8])
    assert two.before is one
    assert (one.rewound(1).tokens.tolist(), one.tokens.tolist()) == ([1], [1, 2, 9])
    assert [two.rewound(to).turns for to in range(6)] == [0, 0, 0, 1, 1, 2]
    assert two.nbytes == 4 * 2 + len("[]") + OBJECT_BYTES
    assert whole.dtype == two.tokens.dtype == np.int32


def test_what_is_written_again_leaves_nothing_behind():
    """As with a template that drops thoughts of earlier turns, or one that says the time at its beginning."""
    for kept in (0, 5, 40):
        told = Conversation()
        for number in range(1, 200):
            base = told.shortened(min(kept, told.length))
            whole = base.begin(np.full(50 - base.length, number, np.int32))
            told = base.after(whole, [7], json.dumps([number]), number)
        assert told.length == 51
        assert len([*told.path]) <= 3
        assert json.loads(told.messages) == list(range(1, 200))
        assert told.turns == 199


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


def test_forks_beside_each_other_stay_within_the_memory_of_sessions(opened, session):
    opened.turn(session, list(range(60_000)), [7])
    memory = opened.table.memory

    async def forks() -> list[Session | BaseException]:
        many = (opened.table.fork(session, f"fork-{number}") for number in range(20))
        return await asyncio.gather(*many, return_exceptions=True)

    found = opened(forks())
    assert memory.nbytes <= 1 << 20
    assert sum(isinstance(one, Session) for one in found) == 3
    assert all(isinstance(one, Session | SessionsFull) for one in found)
    assert opened.tokens(opened.session("fork-0")) == [*range(60_000), 7]


@pytest.mark.parametrize(("owner", "asked"), [("team/ada", "ada/s"), ("team/ada/x", "ada/x/s"), ("team", "team/s")])
def test_no_name_of_a_session_leads_to_that_of_another_key(opened, owner, asked):
    opened(opened.table.open("s", SessionSettings(owner=owner)))
    for name in ("team", ""):
        with pytest.raises(NoSuchSession):
            opened.table.get(asked if name else f"{owner}/s", Client(name))
    assert opened.table.get("s", Client(owner)).settings.owner == owner


@pytest.mark.parametrize("on_disk", [False, True])
def test_no_client_takes_the_memory_of_sessions_from_the_others(tmp_path, on_disk):
    opened = Opened(tmp_path / "sessions" if on_disk else None)
    table = opened.table
    session = opened(table.open("s", SessionSettings(owner="eve")))
    opened.turn(session, list(range(20_000)), [7])

    def fork(session: Session) -> bool:
        try:
            opened(table.fork(session, None))
        except SessionsFull:
            return False
        return True

    made = [fork(session) for _ in range(20)]
    assert made == ([True] * 20 if on_disk else [True] * 8 + [False] * 12)
    other = opened(table.open("s", SessionSettings(owner="ada")))
    opened.turn(other, list(range(20_000)), [7])
    assert fork(other)
    turns = [table.line_up(opened(table.open(None, SessionSettings(owner="eve")))) for _ in range(20)]
    for turn in turns[: 9 if on_disk else 0]:
        turn.begin(Conversation(), np.arange(20_000, dtype=np.int32))
    with pytest.raises(SessionsFull, match="786,432 bytes that they may have"):
        turns[-1].begin(Conversation(), np.arange(20_000, dtype=np.int32))
    for turn in turns:
        turn.close()
    opened.turn(other, [1], [7])
    for one in list(table):
        table.close(one)
    assert (table.memory.nbytes, table.memory._owned) == (0, {})


def test_sessions_are_bounded_and_one_client_can_not_open_all(opened, monkeypatch):
    monkeypatch.setattr("freehold.server.sessions.histories.SESSIONS_MAX", 8)

    def opens(owner: str) -> int:
        for number in range(10):
            try:
                opened(opened.table.open(None, SessionSettings(owner=owner)))
            except SessionsFull:
                return number
        return 10

    assert [opens("eve"), opens("ada"), opens("")] == [6, 2, 0]
    opened.table.close(next(iter(opened.table)))
    assert [opens("eve"), opens("ada"), opens("")] == [1, 0, 0]


def test_what_replaces_all_before_it_drops_the_input_of_an_earlier_one_that_was_kept_meanwhile(opened):
    session = opened(opened.table.open("b", SessionSettings(branching=True)))

    def begun(name: str, **params):
        turn = opened.table.line_up(session, name=name)
        history = opened(opened.table.history(session))
        base, replacement = branch_of(session, history, SessionParams(id="b", **params))
        turn.begin(base, np.array([1], np.int32), replacement=replacement)
        return turn

    begun("first")
    replacing = begun("all", replace=True)
    opened(begun("later", rid="first", replace=True).observe(news([7], "x", "stop")))
    assert {*opened(opened.table.history(session)).points} == {"first", "later"}
    opened(replacing.observe(news([8], "x", "stop")))
    assert {*opened(opened.table.history(session)).points} == {"later", "all"}


def test_a_turn_whose_client_leaves_while_it_is_written_has_its_session_until_it_is(opened, session, monkeypatch):
    """Else the next one would begin without what the first has said."""
    table, written = opened.table, asyncio.Event()
    change = table.change

    async def slow(*changed):
        await written.wait()
        await change(*changed)

    first = opened.begin(session, [1, 2])
    monkeypatch.setattr(table, "change", slow)

    async def leave():
        reading = asyncio.ensure_future(first.observe(news([7], "x", "length")))
        await asyncio.sleep(0)
        second = table.line_up(session, waits=True)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        first.close()
        assert not second.has_come.is_set()
        written.set()
        await second.wait(10)
        return (await table.conversation(session)).tokens.tolist()

    assert opened(leave()) == [1, 2, 7]
