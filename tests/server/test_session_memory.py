"""Histories in memory: within their bound, and what they were when they are read again."""

import json
import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from freehold.conversation import with_messages
from freehold.errors import SessionBusy, SessionsFull, StoreFailed
from freehold.ipc.protocol import Ended
from freehold.ipc.streams import Delta
from freehold.server.access.clients import Client
from freehold.server.native.schema import SessionParams
from freehold.server.sessions.branch_turn import BranchTurn
from freehold.server.sessions.store import SessionStore
from freehold.server.sessions.table import SessionSettings, SessionTable, Turn
from freehold.text.answers.events import Content

ENGINE = SimpleNamespace(forget_session=lambda name: None, abort=lambda request_id: None)
LIMIT = 20_000


def ended(kind: str) -> Delta:
    return Delta(0, "yes", [7, 8], [], Ended("r", kind, 1, 0, 1, 0, 0.0), events=[Content("yes")])


@dataclass
class Known:
    """What must have become of a session."""

    tokens: list[int] = field(default_factory=list)
    turns: int = 0
    messages: list[dict] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return 4 * len(self.tokens) + 4 * self.turns + len(json.dumps(self.messages))


class Life:
    """Random changes to a table, and what is known of it."""

    def __init__(self, path: Path | None, seed: int):
        self.rng = random.Random(seed)
        self.path = path
        self.known: dict[str, Known] = {}
        self.flights: list[tuple[str, Turn, list[dict] | None]] = []
        self.refused = 0
        self.start()

    def start(self) -> None:
        self.store = SessionStore(None if self.path is None else str(self.path))
        self.table = SessionTable(ENGINE, self.store, LIMIT)
        assert self.table.memory.nbytes == 0, "nothing is read at the start"

    def session(self, name: str):
        return self.table.get(name, Client())

    @property
    def flight_bytes(self) -> int:
        return sum(turn.tokens.nbytes + len(turn._messages or "") for _, turn, _ in self.flights)

    def check_refusal(self, nbytes: int) -> None:
        """It is refused only if there was no room."""
        kept = 0 if self.path else sum(known.nbytes for known in self.known.values())
        assert kept + self.flight_bytes + nbytes > LIMIT
        self.refused += 1

    def open(self, name: str) -> None:
        if name not in self.known:
            self.table.open(name, SessionSettings())
            self.known[name] = Known()

    def begin(self, name: str) -> None:
        if self.session(name).turn is not None:
            return
        known, turn = self.known[name], self.table.line_up(self.session(name))
        new = [self.rng.randrange(100) for _ in range(self.rng.choice([1, 50, 800]))]
        chat = [{"role": "user", "content": "x" * self.rng.choice([1, 500])}] if self.rng.random() < 0.5 else None
        messages = None if chat is None else with_messages(json.dumps(known.messages), chat)
        try:
            turn.begin(np.array(new, np.int32), messages=messages)
        except SessionsFull:
            turn.close()
            self.check_refusal(4 * len(known.tokens + new) + len(messages or ""))
        else:
            assert turn.tokens.tolist() == known.tokens + new
            self.flights.append((name, turn, chat))

    def end(self, _: str) -> None:
        if not self.flights:
            return
        name, turn, chat = self.flights.pop(self.rng.randrange(len(self.flights)))
        kind = self.rng.choice(["stop", "stop", "abort"])
        turn.observe(ended(kind))
        if kind == "stop":
            known = self.known[name]
            known.tokens, known.turns = [*turn.tokens.tolist(), 7, 8], known.turns + 1
            if chat is not None:
                known.messages = [*known.messages, *chat, {"role": "assistant", "content": "yes"}]

    def fork(self, name: str) -> None:
        child = f"{name[0]}{self.rng.randrange(100)}"
        if child in self.known:
            return
        known = self.known[name]
        try:
            self.table.fork(self.session(name), child)
        except SessionsFull:
            self.check_refusal(known.nbytes)
        else:
            self.known[child] = Known(known.tokens, known.turns, known.messages)

    def rewind(self, name: str) -> None:
        try:
            self.table.rewind(self.session(name), 0)
        except SessionBusy:
            return
        self.known[name] = Known()

    def close(self, name: str) -> None:
        if self.session(name).turn is None:
            self.table.close(self.session(name))
            del self.known[name]

    def restart(self, _: str) -> None:
        if self.path is not None:
            self.store.close()
            self.flights.clear()
            self.start()

    def step(self) -> None:
        changes = {
            self.open: 5, self.begin: 30, self.end: 35, self.fork: 5, self.rewind: 5, self.close: 5, self.restart: 1,
        }  # fmt: skip
        (change,) = self.rng.choices([*changes], [*changes.values()])
        if self.known or change == self.open:
            change(self.rng.choice([*self.known, *"abcdef"] if change == self.open else [*self.known]))

    def check(self) -> None:
        memory = self.table.memory
        assert memory.nbytes <= LIMIT + 500, "only output may exceed it"
        assert memory.nbytes == sum(one.nbytes for one in memory._kept.values()) + self.flight_bytes
        assert {one.id: (one.tokens, one.turns) for one in self.table} == {
            name: (len(known.tokens), known.turns) for name, known in self.known.items()
        }

    def check_histories(self) -> None:
        for name, known in self.known.items():
            conversation = self.table.conversation(self.session(name))
            assert conversation.tokens.tolist() == known.tokens
            assert json.loads(conversation.messages) == known.messages
            assert conversation.nbytes == known.nbytes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("on_disk", [True, False])
def test_memory_is_bounded_and_histories_are_kept(tmp_path, on_disk, seed):
    life, most = Life(tmp_path / "sessions" if on_disk else None, seed), 0
    for number in range(600):
        life.step()
        life.check()
        most = max(most, sum(known.nbytes for known in life.known.values()))
        if number % 50 == 0:
            life.check_histories()
            life.check()
    life.check_histories()
    assert most > LIMIT * (1.2 if on_disk else 0.8)
    assert life.refused


def stored(path: Path, count: int) -> None:
    table = SessionTable(ENGINE, SessionStore(str(path)), LIMIT)
    for number in range(count):
        turn = table.line_up(table.open(f"s{number}", SessionSettings()))
        turn.begin(np.full(1000, number, np.int32))
        turn.observe(ended("stop"))
    table.memory._store.close()


def test_the_one_used_least_recently_is_given_up_first(tmp_path):
    stored(tmp_path / "sessions", 5)
    table = SessionTable(ENGINE, SessionStore(str(tmp_path / "sessions")), LIMIT)
    for number in (0, 1, 2, 3, 0, 4):
        assert table.conversation(table.get(f"s{number}", Client())).tokens[0] == number
    assert list(table.memory._kept) == ["s2", "s3", "s0", "s4"]


BROKEN = {
    "a number of bytes that is not of tokens": "tokens = X'0102030405'",
    "tokens that are a text": "tokens = '12345678'",
    "messages that are no JSON": "messages = '['",
    "messages that are no text": "messages = CAST(X'22ff22' AS TEXT)",
    "settings that are no object": "settings = '3'",
    "ends that are no lengths": "settings = '{\"ends\": [99999999999]}'",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_damaged_session_is_noticed_at_the_start_and_when_it_is_read(tmp_path, how):
    path = tmp_path / "sessions"
    stored(path, 3)
    table = SessionTable(ENGINE, SessionStore(str(path)), LIMIT)
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"UPDATE sessions SET {BROKEN[how]} WHERE id = 's1'")
    with pytest.raises(StoreFailed, match="can't be read from the store"):
        table.line_up(table.get("s1", Client())).begin(np.array([1], np.int32))
    table.memory._store.close()
    with pytest.raises(ValueError, match=r"is damaged .* --session-store-recover"):
        SessionStore(str(path))
    recovered = SessionTable(ENGINE, SessionStore(str(path), recover=True), LIMIT)
    assert [one.id for one in recovered] == ["s0", "s2"]
    assert recovered.conversation(recovered.get("s2", Client())).tokens.tolist() == [*[2] * 1000, 7, 8]


def test_a_store_of_a_version_without_ends_is_read(tmp_path):
    path = tmp_path / "sessions"
    stored(path, 1)
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("UPDATE sessions SET turns = 3, settings = '{\"capacity\": 9}'")
    table = SessionTable(ENGINE, SessionStore(str(path)), LIMIT)
    session = table.get("s0", Client())
    assert (session.turns, session.settings) == (3, SessionSettings(capacity=9))
    assert table.conversation(session).ends.tolist() == [1002] * 3


def test_branches_count_until_their_session_is_closed():
    table = SessionTable(ENGINE, SessionStore(None), LIMIT)
    session, root = table.open("b", SessionSettings(branching=True)), SessionParams(rid="r1")

    def branch(rid: str, params: SessionParams, count: int) -> BranchTurn:
        turn = BranchTurn(session, table.memory, rid)
        turn.begin(params, session.branches.whole(params, np.ones(count, np.int32)))
        return turn

    idle = table.memory.nbytes
    first = branch("r1", SessionParams(), 2000)
    first.observe(ended("stop"))
    assert len(branch("r2", root, 500).tokens) == 2502
    used = table.memory.nbytes - idle
    assert used == 4 * (2002 + 2502)
    with pytest.raises(SessionsFull, match=r"10,008 bytes more .* of the 20,000 bytes .*session_memory_bytes"):
        branch("r3", root, 500)
    assert (list(session.branches.branches), table.memory.nbytes - idle) == (["r1", "r2"], used)
    branch("r4", SessionParams(replace=True), 10)
    assert table.memory.nbytes - idle == 40
    table.close(session)
    assert table.memory.nbytes == 0
    with pytest.raises(SessionBusy):
        branch("r5", SessionParams(), 1)
    assert table.memory.nbytes == 0
