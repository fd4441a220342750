"""The file of sessions and responses: damage, disks that are full or slow, versions before, and what a turn costs."""

import asyncio
import contextlib
import json
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
from opened_sessions import Opened, database, news

from freehold.contract.errors import SessionBusy, StoreFailed
from freehold.server.database import open_database
from freehold.server.responses.store import ResponseStore, StoredResponse
from freehold.server.salvage import salvaged
from freehold.server.sessions.settings import SessionSettings
from freehold.server.sessions.store import SessionStore


@contextlib.contextmanager
def changed(path: Path):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def stored(path: Path, count: int, turns: int = 1) -> None:
    opened = Opened(path)
    for number in range(count):
        session = opened(opened.table.open(f"s{number}", SessionSettings()))
        for _ in range(turns):
            opened.turn(session, [number] * 1000, [7, 8])
    opened.close()


# -- damage ----------------------------------------------------------------------------------------------------

BROKEN = {
    "a number of bytes that is not of tokens": "turns SET added = X'0102030405'",
    "tokens that are a text": "turns SET added = '12345678'",
    "messages that are no JSON": "turns SET said = '['",
    "messages that are no text": "turns SET said = CAST(X'5b22ff225d' AS TEXT)",
    "a turn that continues none": "turns SET before = 77",
    "a turn that begins behind the end of the one before": "turns SET start = 5",
    "a point that is none": "points SET number = 77",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_damaged_session_is_noticed_at_the_start_and_the_others_are_kept(tmp_path, how):
    path = tmp_path / "sessions"
    stored(path, 3)
    with changed(path) as connection:
        connection.execute(f"UPDATE {BROKEN[how]} WHERE session = 's1'")
    with pytest.raises(ValueError, match=r"is damaged .* --session-store-recover"):
        database(path)
    opened = Opened(path, recover=True)
    assert opened.names == ["s0", "s2"]
    assert opened.tokens(opened.session("s2")) == [*[2] * 1000, 7, 8]
    opened.close()
    assert len(list(tmp_path.glob("sessions.damaged-*"))) >= 1
    Opened(path).close()  # it is whole now


FLIPPED = {  # what is in the file, and what a damaged disk makes of it
    "the id of a session": (b"ada/s1{", b"ada/\xf31{"),
    "the name of a setting": (b'"capacity": 111', b'"cApacity": 111'),
    "a setting that is no text": (b'"namespace": "salt1"', b'"namespace": "s\xe1lt1"'),
    "the owner among the settings": (b'"capacity": 111, "namespace": "salt1", "branching": false, "owner": "ada"',
                                     b'"capacity": 111, "namespace": "salt1", "branching": false, "owner": "adb"'),
    "the session of a turn": (b"ada/s1\x04\x02\x0c", b"ada/\xf31\x04\x02\x0c"),
}  # fmt: skip


@pytest.mark.parametrize("how", FLIPPED)
def test_a_byte_that_makes_no_sense_is_damage_like_any_other(tmp_path, how):
    path = tmp_path / "sessions"
    opened = Opened(path)
    for number in range(3):
        settings = SessionSettings(60.0, 110 + number, f"salt{number}", owner="ada")
        session = opened(opened.table.open(f"s{number}", settings))
        for _ in range(2):
            opened.turn(session, [number] * 10, [7, 8])
    opened.close()
    raw, (before, after) = path.read_bytes(), FLIPPED[how]
    assert before in raw
    path.write_bytes(raw.replace(before, after))
    with pytest.raises(ValueError, match="is damaged"):
        database(path)
    opened = Opened(path, recover=True)
    kept = [session.id for session in opened.table]
    assert kept == ["s0", "s2"]
    assert all(session.tokens == 24 for session in opened.table)
    opened.close()
    Opened(path).close()


def test_an_index_that_lacks_a_row_is_damage_and_costs_nothing(tmp_path):
    path = tmp_path / "sessions"
    stored(path, 3)
    raw = path.read_bytes()
    at = pages_of(path, "sqlite_autoindex_points_1")[0] * 4096
    path.write_bytes(raw[: at - 4096] + raw[at - 4096 : at].replace(b"s2", b"s3") + raw[at:])
    with pytest.raises(ValueError, match="is damaged"):
        database(path)
    opened = Opened(path, recover=True)
    assert opened.names == ["s0", "s1", "s2"]
    assert opened.tokens(opened.session("s2")) == [*[2] * 1000, 7, 8]
    opened.close()


def test_a_disk_that_is_full_ends_a_recovery_and_the_file_stays(tmp_path):
    path = tmp_path / "sessions"
    stored(path, 50)

    def prepare(connection: sqlite3.Connection) -> None:
        SessionStore.tables.prepare(connection)
        connection.execute("PRAGMA max_page_count = 20")

    with pytest.raises(sqlite3.OperationalError, match="full"):
        salvaged(path, prepare, SessionStore.tables.names)
    opened = Opened(path)
    assert len(opened.names) == 50
    opened.close()


@pytest.mark.parametrize("how", list(BROKEN)[:5])
def test_a_session_that_is_damaged_while_it_is_open_is_noticed_when_it_is_read(tmp_path, how):
    path = tmp_path / "sessions"
    stored(path, 2)
    opened = Opened(path)
    with changed(path) as connection:
        connection.execute(f"UPDATE {BROKEN[how]} WHERE session = 's1'")
    with pytest.raises(StoreFailed, match="can't be read from the store"):
        opened.begin(opened.session("s1"), [1])
    assert not opened.session("s1").running
    opened.close()


def response(number: int) -> StoredResponse:
    return StoredResponse({"id": f"r{number}"}, [{"id": "i"}], [{"role": "user", "content": "x" * 300}], [1, 2, 3])


def both(path: Path, recover: bool = False):
    return open_database(str(path), [SessionStore.tables, ResponseStore.tables], recover=recover)


def pages_of(path: Path, name: str) -> list[int]:
    """Of a table or an index."""
    with changed(path) as connection:
        try:
            found = connection.execute("SELECT pageno FROM dbstat WHERE name = ? ORDER BY pageno", (name,))
            return [number for (number,) in found]
        except sqlite3.OperationalError:
            pytest.skip("this SQLite can't say where its pages are")


@pytest.mark.parametrize(
    ("name", "most"),
    [("sqlite_autoindex_sessions_1", 0), ("sqlite_autoindex_turns_1", 0), ("sqlite_autoindex_responses_1", 0),
     ("sqlite_autoindex_points_1", 0), ("points", 0), ("turns", 3), ("responses", 14)],
)  # fmt: skip
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_what_is_beside_a_damaged_page_is_kept(tmp_path, name, most, where):
    path = tmp_path / "sessions"
    stored(path, 50)
    opened = both(path)
    responses = ResponseStore(opened, 60)
    for number in range(50):
        asyncio.run(responses.put(response(number), "ada"))
    opened.close()
    pages = pages_of(path, name)
    at = pages[{"first": 1 % len(pages), "middle": len(pages) // 2, "last": -1}[where]]
    with open(path, "r+b") as file:
        file.seek((at - 1) * 4096)
        file.write(b"\xaa" * 4096)
    with pytest.raises(ValueError, match="is damaged"):
        both(path).close()
    opened = both(path, recover=True)
    sessions, responses = SessionStore(opened), ResponseStore(opened, 60)
    found = [one.row.id for one in sessions]
    for one in found:
        assert asyncio.run(sessions.load(one)).head.tokens.tolist() == [int(one[1:])] * 1000 + [7, 8]
    kept = 0
    for number in range(50):
        with contextlib.suppress(Exception):
            kept += asyncio.run(responses.get(f"r{number}", "ada")) == response(number)
    lost = 100 - len(found) - kept
    assert lost <= most
    opened.close()


def test_a_file_behind_a_link_belongs_to_one_server_and_is_recovered_where_it_is(tmp_path):
    (tmp_path / "data").mkdir()
    path, link = tmp_path / "data" / "sessions", tmp_path / "link"
    link.symlink_to(path)
    opened = Opened(link)
    opened.turn(opened(opened.table.open("s", SessionSettings())), [1], [7])
    with pytest.raises(ValueError, match="in use by another server"):
        database(path)
    opened.close()
    with changed(path) as connection:
        connection.execute("UPDATE turns SET said = '['")
    Opened(link, recover=True).close()
    assert link.is_symlink()
    assert len([*path.parent.glob("sessions.damaged-*")]) == 1
    Opened(path).close()


def test_a_file_that_is_no_database_is_put_aside(tmp_path):
    path = tmp_path / "sessions"
    path.write_bytes(b"this is no database" * 1000)
    with pytest.raises(ValueError, match="is damaged"):
        database(path)
    opened = Opened(path, recover=True)
    assert opened.names == []
    opened.close()
    (aside,) = tmp_path.glob("sessions.damaged-*")
    assert aside.read_bytes().startswith(b"this is no")


def test_a_recovery_that_is_killed_can_be_repeated(tmp_path, monkeypatch):
    path = tmp_path / "sessions"
    stored(path, 3)
    with changed(path) as connection:
        connection.execute("UPDATE turns SET said = '[' WHERE session = 's1'")
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            database(path, recover=True)
    opened = Opened(path, recover=True)
    assert opened.names == ["s0", "s2"]
    opened.close()


# -- versions --------------------------------------------------------------------------------------------------


def test_a_store_in_which_a_session_is_one_row_is_read(tmp_path):
    path = tmp_path / "sessions"
    tokens, said = np.arange(9, dtype=np.int32).tobytes(), json.dumps([{"role": "user", "content": "x"}])
    rows = [
        ("s0", tokens, 3, said, '{"capacity": 90, "ends": [2, 4, 9]}'),
        ("s1", b"", 0, "[]", '{"capacity": 9}'),
        ("b", b"", 0, "[]", '{"branching": true, "ends": []}'),  # of which no branch was kept
    ]
    with changed(path) as connection:
        connection.execute(
            "CREATE TABLE sessions (id TEXT PRIMARY KEY, tokens BLOB NOT NULL, turns INTEGER NOT NULL, "
            "messages TEXT NOT NULL, settings TEXT NOT NULL)"
        )
        connection.executemany("INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", rows)
    for _ in range(2):
        opened = Opened(path)
        assert opened.names == ["s0", "s1"]
        session = opened.session("s0")
        assert (session.turns, session.settings) == (3, SessionSettings(capacity=90))
        assert opened.tokens(session) == [*range(9)]
        assert opened(opened.table.conversation(session)).messages == said
        opened.close()
    opened = Opened(path)
    opened.turn(opened.session("s0"), [9], [10])
    opened.turn(opened.session("s1"), [9], [10])
    assert opened.session("s0").turns == 4
    opened.close()


# -- one file, one server, one thread ----------------------------------------------------------------------------


def test_a_store_has_one_server(tmp_path):
    first = database(tmp_path / "s")
    with pytest.raises(ValueError, match="in use by another server"):
        database(tmp_path / "s")
    first.close()
    database(tmp_path / "s").close()


@pytest.mark.parametrize(("sync", "level"), [("normal", 1), ("full", 2)])
def test_how_safe_a_turn_is_can_be_chosen(tmp_path, sync, level):
    opened = database(tmp_path / "s", sync=sync)
    assert opened.submit(lambda it: it.execute("PRAGMA synchronous").fetchone()).result() == (level,)
    opened.close()


async def longest_wait(work) -> float:
    """Seconds that anything else had to wait while that went on."""
    task, longest, before = asyncio.ensure_future(work), 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    await task
    return longest


def test_nothing_waits_for_another_that_writes_to_the_file(tmp_path):
    """Sessions and responses: they wait for it, and nothing waits for them."""
    file = both(tmp_path / "s")
    responses = ResponseStore(file, 60)
    file.close()
    opened = Opened(tmp_path / "s")
    session = opened(opened.table.open("s", SessionSettings()))
    responses = ResponseStore(opened.database, 60)
    turn = opened.begin(session, [1])

    async def at_once() -> None:
        async def release() -> None:
            await asyncio.sleep(1)  # the time that the other one takes
            other.execute("COMMIT")

        await asyncio.gather(turn.observe(news([7], "", "stop")), responses.put(response(1), "ada"), release())

    with changed(tmp_path / "s") as other:
        other.execute("BEGIN IMMEDIATE")
        assert opened(longest_wait(at_once())) < 0.5
    assert opened.tokens(session) == [1, 7]
    opened.close()


def test_a_turn_whose_client_leaves_while_it_is_written_has_the_session_until_then(tmp_path):
    opened = Opened(tmp_path / "s")
    session = opened(opened.table.open("s", SessionSettings()))
    turn = opened.begin(session, [1])

    async def leave() -> None:
        writing = asyncio.ensure_future(turn.observe(news([7], "", "stop")))
        for _ in range(3):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
        turn.close()
        assert writing.cancelled()
        with pytest.raises(SessionBusy):
            opened.table.line_up(session)
        other.execute("COMMIT")
        await turn.is_over.wait()

    with changed(tmp_path / "s") as other:
        other.execute("BEGIN IMMEDIATE")
        opened(leave())
    assert opened.begin(session, [2]).tokens.tolist() == [1, 7, 2]
    opened.close()


def test_a_turn_appends_and_writes_no_other_again(tmp_path):
    opened = Opened(tmp_path / "s", 1 << 30)
    session = opened(opened.table.open("s", SessionSettings()))
    opened.turn(session, [1] * 131_000, [7])
    opened.database.submit(lambda it: it.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()).result()
    for _ in range(5):
        opened.turn(session, [1] * 10, [7])
    assert (tmp_path / "s-wal").stat().st_size < 5 * 12 * 4096
    opened.close()


# -- disks that fail -------------------------------------------------------------------------------------------


def full(opened: Opened, is_full: bool = True) -> None:
    """The disk has no room for a single page more, or has again."""
    pages = 1 if is_full else 1 << 30
    opened.database.submit(lambda it: it.execute(f"PRAGMA max_page_count={pages}").fetchone()).result()


def test_a_turn_that_is_not_on_disk_has_not_happened(tmp_path):
    opened = Opened(tmp_path / "s", 1 << 30)
    session = opened(opened.table.open("s", SessionSettings()))
    opened.turn(session, [1, 2], [3])
    full(opened)
    with pytest.raises(StoreFailed, match="can't be written"):
        opened.turn(session, [1] * 100_000, [5])
    assert not session.running
    assert (opened.tokens(session), session.turns) == ([1, 2, 3], 1)
    with pytest.raises(StoreFailed, match="can't be written"):
        opened(opened.table.open("t", SessionSettings(), {"": opened.begin(session, [1] * 9000).asked()}))
    assert opened.names == ["s"]
    session.running[0].close()
    full(opened, False)
    opened.turn(session, [1] * 100_000, [5])
    assert (session.tokens, session.turns) == (100_004, 2)
    opened(opened.table.open("t", SessionSettings()))
    opened.close()


def test_a_session_is_closed_whatever_the_disk_says_and_its_name_is_free(tmp_path):
    opened = Opened(tmp_path / "s")
    for name in "stu":
        opened(opened.table.open(name, SessionSettings()))
    opened.database.submit(lambda it: it.execute("PRAGMA query_only=1")).result()
    for name in "st":
        opened.table.close(opened.session(name))
    opened(opened.store.settle())
    assert opened.names == ["u"]
    assert opened.store._closed == {"s", "t"}
    opened.database.submit(lambda it: it.execute("PRAGMA query_only=0")).result()
    opened(opened.table.open("s", SessionSettings(capacity=5)))
    assert not opened.store._closed
    opened.close()
    again = Opened(tmp_path / "s")
    assert again.names == ["s", "u"]
    assert again.session("s").settings.capacity == 5
    again.close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_names_of_closed_sessions_do_not_pile_up(tmp_path, on_disk):
    opened = Opened(tmp_path / "s" if on_disk else None)
    for _ in range(20):
        opened.table.close(opened(opened.table.open(None, SessionSettings())))
    opened(opened.store.settle())
    assert not opened.store._closed
    opened.close()


# -- memory ----------------------------------------------------------------------------------------------------


def test_the_one_used_least_recently_is_given_up_first(tmp_path):
    stored(tmp_path / "s", 5)
    opened = Opened(tmp_path / "s", 20_000)
    assert opened.table.memory.nbytes == 0, "nothing is read at the start"
    for number in (0, 1, 2, 3, 0, 4):
        assert opened.tokens(opened.session(f"s{number}"))[0] == number
    assert list(opened.table.memory._kept) == ["s2", "s3", "s0", "s4"]
    opened.close()


def test_what_is_read_again_while_a_turn_runs_is_not_there_twice(tmp_path):
    stored(tmp_path / "s", 1, turns=3)
    opened = Opened(tmp_path / "s")
    session = opened.session("s0")
    turn = opened.begin(session, [1])
    opened.table.memory.give_up(session.key)
    opened(turn.observe(news([7], "", "stop")))
    history = opened(opened.table.history(session))
    assert {one.number: one for one in history.head.path} == history.turns
    opened.close()


def test_a_session_that_is_closed_while_it_is_read_is_not_kept(tmp_path):
    stored(tmp_path / "s", 1)
    opened = Opened(tmp_path / "s")
    session = opened.session("s0")

    async def read_and_close() -> None:
        reading = asyncio.ensure_future(opened.table.history(session))
        await asyncio.sleep(0)
        opened.table.close(session)
        await opened.table.open("s0", SessionSettings())
        with contextlib.suppress(Exception):
            await reading

    opened(read_and_close())
    assert opened.tokens(opened.session("s0")) == []
    assert list(opened.table.memory._kept) == ["s0"]
    opened.close()
