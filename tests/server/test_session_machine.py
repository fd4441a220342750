"""Sessions beside a plain model of them: turns, chats, branches that replace others, forks, rewinds, timeouts and
clocks that jump, on too little memory. The disk fails at any moment, and the server is killed at any."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sqlite3
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from opened_sessions import Clock, Opened, news

from freehold.contract.errors import SessionBusy, SessionsFull, StoreFailed, TurnRefused
from freehold.server.native.schema import SessionParams
from freehold.server.sessions.branches import branch_of
from freehold.server.sessions.settings import SessionSettings
from freehold.server.sessions.table import Turn

MEMORY_BYTES = 12_000
NAMES, REQUESTS = "abc", "uvwxy"
timeouts = st.sampled_from([None, None, 10.0])
inputs = st.lists(st.integers(0, 9), max_size=4) | st.integers(0, 300).map(lambda count: [1] * count)
# When something happens to the disk, in steps of SQLite; most often never.
moments = st.sampled_from([None] * 60 + [1, 2, 4, 7, 11, 18, 25, 35, 50, 70, 100, 150, 250])


@dataclass(frozen=True)
class Point:
    """A finished turn: all that the model saw and said, the whole input of it, and the turns that it continues."""

    tokens: tuple[int, ...]
    asked: int
    turns: int
    number: int
    ancestors: frozenset[int] = frozenset()
    messages: tuple[str, ...] = ()


@dataclass
class Known:
    """What must have become of a session."""

    settings: SessionSettings
    used: float
    adapter: str = ""
    points: dict[str, Point] = field(default_factory=dict)

    @property
    def head(self) -> Point:
        return next(reversed(self.points.values()), Point((), 0, 0, 0))

    def put(self, name: str, point: Point, gone=()) -> Known:
        kept = {one: found for one, found in self.points.items() if one not in {*gone, name}}
        return Known(self.settings, self.used, self.adapter, {**kept, name: point})


@dataclass(eq=False)
class Flight:
    """A turn that has begun. What it replaces continues the turn `root`: 0 is before all."""

    session: str
    name: str
    turn: Turn
    base: Point  # what it continues
    root: int | None
    keeps: Point | None  # the input of an unfinished one, which stays
    number: int
    asked: Point
    said: str | None
    output: tuple[int, ...] = ()
    is_replaced: bool = False


class Sessions(RuleBasedStateMachine):
    @initialize(on_disk=st.booleans())
    def start(self, on_disk):
        self.folder = Path(tempfile.mkdtemp())
        self.kept = itertools.count()
        self.path = self.folder / "0.db" if on_disk else None
        self.clock, self.wall = Clock(), 1e9
        self.known: dict[str, Known] = {}
        self.flights: list[Flight] = []
        self.numbers = itertools.count(1)
        self.names = itertools.count()
        self.open_again()
        for name, branching in (("a", False), ("b", True)):
            made = SessionSettings(branching=branching)
            self.opened(self.opened.table.open(name, made))
            self.known[name] = Known(made, self.clock.now)

    def open_again(self):
        self.opened = Opened(self.path, MEMORY_BYTES, self.clock)
        for known in self.known.values():
            known.used = self.clock.now

    def teardown(self):
        if hasattr(self, "opened"):
            self.opened.close()
            shutil.rmtree(self.folder)

    # -- the disk ------------------------------------------------------------------------------------------

    def at_step(self, step: int | None, what):
        """`what` happens in so many steps of SQLite; whether something fails then is what it returns."""
        left = itertools.count(1)
        handler = None if step is None else lambda: next(left) == step and what()
        self.opened.database.submit(lambda it: it.set_progress_handler(handler, 1)).result()

    def changing(self, work, before: dict[str, Known], after: dict[str, Known], fails_at=None, dies_at=None) -> bool:
        """Do `work`, which makes one of the other, unless the disk fails or the server is killed -> whether it did."""
        left = self.folder / f"{next(self.kept) + 1}.db"
        if self.path is None:
            fails_at = dies_at = None
        self.at_step(fails_at or dies_at, (lambda: True) if fails_at else lambda: self.copy(left))
        try:
            self.opened(work)
            self.known = after
        except StoreFailed:
            assert fails_at is not None
            self.known = before
        self.at_step(None, None)
        if dies_at:
            self.opened(self.opened.store.settle())
            if not left.exists():
                self.copy(left)
            self.opened.close()
            self.path, self.flights = left, []
            self.open_again()
            self.known = self.either(before, after)
            for known in self.known.values():
                known.used = self.clock.now
        return self.known is after

    def copy(self, left: Path) -> bool:
        """As a kill at this moment leaves it."""
        assert self.path is not None
        for file in self.folder.glob(f"{self.path.name}*"):
            if not file.name.endswith((".lock", "-shm")):
                shutil.copy(file, left.with_name(file.name.replace(self.path.name, left.name)))
        return False

    def either(self, before: dict[str, Known], after: dict[str, Known]) -> dict[str, Known]:
        found = [known for known in (after, before) if self.differences(known) == []]
        assert found, (self.differences(after), self.differences(before))
        return found[0]

    def differences(self, known: dict[str, Known]) -> list[str]:
        """Of what the table has."""
        if self.opened.names != sorted(known):
            return [f"{self.opened.names} are open, not {sorted(known)}"]
        found: list[str] = []
        for name, one in known.items():
            session = self.opened.session(name)
            points = self.opened(self.opened.table.history(session)).points
            theirs = {
                point: (it.tokens.tolist(), it.turns, json.loads(it.messages), it.start + it.asked)
                for point, it in points.items()
            }
            ours = {
                point: ([*it.tokens], it.turns, [*it.messages], it.asked) for point, it in one.points.items()
            }  # fmt: skip
            if [*theirs.items()] != [*ours.items()]:
                found.append(f"{name} has {theirs}, not {ours}")
            if (session.tokens, session.turns, session.adapter) != (len(one.head.tokens), one.head.turns, one.adapter):
                found.append(f"{name} is described by {session}, not {one}")
            if session.settings != one.settings:
                found.append(f"{name} has other settings")
        return found

    # -- what clients do -----------------------------------------------------------------------------------

    def pick(self, data, branching=None, is_free=False) -> str | None:
        busy = {flight.session for flight in self.flights} if is_free else set()
        found = [
            name
            for name, known in self.known.items()
            if branching in (None, known.settings.branching) and name not in busy
        ]
        return data.draw(st.sampled_from(sorted(found))) if found else None

    @rule(
        name=st.sampled_from(NAMES),
        timeout=st.sampled_from([None, None, 10.0]),
        branching=st.booleans(),
        dies_at=moments,
    )
    def open(self, name, timeout, branching, dies_at):
        made = SessionSettings(timeout, branching=branching)
        if name in self.known:
            try:
                self.opened(self.opened.table.open(name, made))
            except SessionBusy:
                return
            raise AssertionError("a name is there twice")
        after = {**self.known, name: Known(made, self.clock.now)}
        self.changing(self.opened.table.open(name, made), self.known, after, dies_at=dies_at)

    def begin(self, session: str, name: str, base, point: Point, new: list[int], replacement=None, **flight):
        table = self.opened.table
        turn = table.line_up(self.opened.session(session), name=name)
        turn.request_id = f"{session}/{name}/{next(self.numbers)}"
        turn.adapter = f"adapter {len(new)}"
        whole = (*point.tokens, *new)
        said = flight["said"]
        text = None if said is None else json.dumps([said])
        number = next(self.numbers)
        try:
            turn.begin(base, np.array(new, np.int32), text, replacement)
        except SessionsFull:
            turn.close()
            kept = 0 if self.path else sum(one.nbytes for one in table.memory._kept.values())
            held = sum(table.memory._held.values())
            assert kept + held + 4 * len(whole) + len(text or "") > MEMORY_BYTES
            return
        except TurnRefused:
            assert not whole
            turn.close()
            return
        assert turn.tokens.tolist() == [*whole]
        ancestors = point.ancestors | ({point.number} if point.number else set())
        asked = Point(whole, len(whole), point.turns + 1, number, ancestors, point.messages)
        self.flights.append(Flight(session, name, turn, point, number=next(self.numbers), asked=asked, **flight))

    @rule(data=st.data(), new=inputs, said=st.none() | st.text(max_size=9), ends=st.booleans())
    def begin_turn(self, data, new, said, ends):
        """The template may write again what lies behind some token."""
        name = self.pick(data, branching=False, is_free=True)
        if name is None:
            return
        base = self.opened(self.opened.table.conversation(self.opened.session(name)))
        point = self.known[name].head
        if data.draw(st.booleans()):
            keep = data.draw(st.integers(0, len(point.tokens)))
            base = base.shortened(keep)
            point = Point(point.tokens[:keep], 0, point.turns, point.number, messages=point.messages)
        self.begin(name, "", base, point, new, root=None, keeps=None, said=said)
        if ends:
            self.finish("stop")

    @rule(data=st.data(), new=inputs, replaces=st.booleans(), drops=st.booleans(), ends=st.booleans())
    def begin_branch(self, data, new, replaces, drops, ends):
        session = self.pick(data, branching=True)
        running = [flight for flight in self.flights if flight.session == session]
        free = sorted({*REQUESTS} - {flight.name for flight in running})
        if session is None or not free:
            return
        there = {*self.known[session].points, *(flight.name for flight in running)}
        rid = data.draw(st.sampled_from([*sorted(there) * 3, None, "unknown"]))
        offset = data.draw(st.sampled_from([None, None, None, -1, 0, 1, 2, 3, 5, 8]))
        params = SessionParams(id=session, rid=rid, offset=offset, replace=replaces, drop_previous_output=drops)
        found = self.opened.session(session)
        unfinished = next((flight for flight in running if flight.name == rid), None)
        point = self.known[session].points.get(rid) if unfinished is None else unfinished.asked
        history = self.opened(self.opened.table.history(found))
        try:
            base, replacement = branch_of(found, history, params)
        except TurnRefused:
            assert rid is not None
            assert point is None or (unfinished and not replaces)
            return
        assert rid is None or point is not None
        if rid is None:
            point = Point((), 0, 0, 0)
        whole = point.tokens[: point.asked] if drops and rid is not None else point.tokens
        if offset is not None and offset >= 0:
            whole = whole[:offset]
        point = Point(whole, 0, point.turns, point.number, point.ancestors)
        root = None if not replaces else point.number
        keeps = unfinished.asked if unfinished and replaces else None
        name = data.draw(st.sampled_from(free))
        self.begin(session, name, base, point, new, replacement, root=root, keeps=keeps, said=None)
        if ends:
            self.finish("stop")

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), output=st.lists(st.integers(0, 9), max_size=3))
    def hear(self, data, output):
        """The first that is heard of a request ends what it replaces."""
        flight = data.draw(st.sampled_from(self.flights))
        self.opened(flight.turn.observe(news(output)))
        flight.output += (*output,)
        if output:
            self.replace(flight)

    def replace(self, by: Flight):
        """It has been heard of. Nothing that was there before goes until its end."""
        if by.root is None:
            return
        for other in self.flights:
            if other.session == by.session and other.number < by.number:
                continues = other.asked.ancestors | {0}
                ended = other.turn.request_id in self.opened.engine.aborted
                other.is_replaced = other.is_replaced or by.root in continues
                kept = by.keeps is not None and other.asked is by.keeps
                assert ended or not (other.is_replaced or kept)

    @precondition(lambda self: self.flights)
    @rule(
        data=st.data(), kind=st.sampled_from(["stop", "stop", "length", "abort", None]), fails_at=moments,
        dies_at=moments, leaves=st.booleans(),
    )  # fmt: skip
    def end(self, data, kind, fails_at, dies_at, leaves):
        """Its request ends, or its client leaves without a word of that, or while the end is written."""
        self.flights.append(self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1))))
        self.finish(kind, fails_at, dies_at, leaves)

    def finish(self, kind, fails_at=None, dies_at=None, leaves=False):
        """The last of those in flight."""
        if not self.flights:
            return  # it was refused
        flight = self.flights.pop()
        known = self.known[flight.session]
        known.used = self.clock.now
        if kind not in ("stop", "length"):
            if kind is not None:
                self.opened(flight.turn.observe(news([], "", kind)))
            flight.turn.close()
            return
        flight.output += (7,)
        after = known if flight.is_replaced else self.committed(flight, known)
        work = self.left(flight.turn) if leaves else flight.turn.observe(news([7], "yes", kind))
        fails_at = None if dies_at else fails_at
        if leaves:
            fails_at = None  # the client can't hear of it
        self.changing(work, self.known, {**self.known, flight.session: after}, fails_at, dies_at)
        self.replace(flight)

    async def left(self, turn: Turn):
        task = asyncio.ensure_future(turn.observe(news([7], "yes", "stop")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        turn.close()
        await turn.is_over.wait()

    def committed(self, flight: Flight, known: Known) -> Known:
        asked = flight.asked
        messages = asked.messages
        if flight.said is not None:
            messages = (*messages, flight.said, {"role": "assistant", "content": "yes"})
        point = Point(
            (*asked.tokens, *flight.output), asked.asked, asked.turns, flight.number, asked.ancestors, messages
        )
        gone: list[str] = []
        if flight.root is not None:
            gone = [
                name
                for name, one in known.points.items()
                if flight.root in one.ancestors | {0} and one.number < flight.number
            ]
        keeps = flight.keeps
        if keeps is not None:
            (name,) = [name for name in [flight.turn._replacement.unfinished] if name is not None]
            if name in gone or name not in known.points:
                known = known.put(name, keeps, gone)
        made = known.put(flight.name, point, gone)
        made.adapter = flight.turn.adapter
        return made

    @rule(data=st.data(), dies_at=moments)
    def fork(self, data, dies_at):
        name, child = self.pick(data), data.draw(st.sampled_from("fgh"))
        if name is None or child in self.known:
            return
        known = self.known[name]
        known.used = self.clock.now
        made = Known(known.settings, self.clock.now, known.adapter, {**known.points})
        try:
            self.changing(
                self.opened.table.fork(self.opened.session(name), child), self.known, {**self.known, child: made},
                dies_at=dies_at,
            )  # fmt: skip
        except SessionsFull:
            self.at_step(None, None)

    @rule(data=st.data(), fails_at=moments)
    def rewind(self, data, fails_at):
        name = self.pick(data, branching=False)
        if name is None:
            return
        known = self.known[name]
        to = data.draw(st.integers(0, len(known.head.tokens)))
        work = self.opened.table.rewind(self.opened.session(name), to)
        if any(flight.session == name for flight in self.flights):
            try:
                self.opened(work)
            except SessionBusy:
                return
        known.used = self.clock.now
        point = Point(known.head.tokens[:to], to, -1, next(self.numbers))
        done = self.changing(work, self.known, {**self.known, name: known.put("", point)}, fails_at)
        if done:  # how many turns are left is for tests of conversations to say
            turns = self.opened.session(name).turns
            assert 0 <= turns <= known.head.turns
            found = self.opened(self.opened.table.conversation(self.opened.session(name)))
            cut = Point(point.tokens, found.start + found.asked, turns, point.number)
            self.known[name] = known.put("", cut)
            self.known[name].used = self.clock.now

    @rule(data=st.data(), aborts=st.booleans())
    def close(self, data, aborts):
        name = self.pick(data)
        if name is None or data.draw(st.integers(0, 3)):
            return  # seldom: most of what there is to see takes many turns of a session
        session = self.opened.session(name)
        mine = [flight for flight in self.flights if flight.session == name]
        self.opened.table.close(session, aborts)
        if aborts:
            assert {flight.turn.request_id for flight in mine} <= {*self.opened.engine.aborted}
        for flight in mine:
            assert name in self.opened.names, "it waits for its turns"
            flight.turn.close()
            self.flights.remove(flight)
        del self.known[name]

    @precondition(lambda self: self.path)
    @rule(happens=st.sampled_from([True, False, False, False]))
    def restart(self, happens):
        if not happens:
            return
        self.opened.close()
        self.flights = []
        self.open_again()

    @rule(seconds=st.floats(0, 12), jump=st.sampled_from([0.0, 0.0, 1e8, -1e8]))
    def time_passes(self, seconds, jump):
        """On the clock that counts, and on the wall."""
        self.clock.now += seconds
        self.wall += jump
        in_use = {flight.session for flight in self.flights}
        with mock.patch.object(time, "time", return_value=self.wall):
            self.opened.table.close_idle()
        for name, known in [*self.known.items()]:
            timeout = known.settings.timeout
            if timeout is not None and name not in in_use and self.clock.now - known.used > timeout:
                del self.known[name]

    # -- what always holds ---------------------------------------------------------------------------------

    @invariant()
    def histories_are_what_they_should_be(self):
        if hasattr(self, "opened"):
            assert self.differences(self.known) == []

    @invariant()
    def memory_is_counted_and_bounded(self):
        if not hasattr(self, "opened"):
            return
        memory = self.opened.table.memory
        assert memory.nbytes == sum(one.nbytes for one in memory._kept.values()) + sum(memory._held.values())
        assert len(memory._held) == len(self.flights)
        assert set(memory._kept) <= set(self.known)
        for history in memory._kept.values():
            reached = {one.number: one for point in history.points.values() for one in point.path}
            assert reached == history.turns, "what nothing continues is gone, and nothing is there twice"
            names = sum(100 + len(name) for name in history.points)
            assert history.nbytes == sum(one.nbytes for one in reached.values()) + names
        if self.path is not None:
            assert memory.nbytes <= MEMORY_BYTES + 200 * len(self.flights) + 2000

    @invariant()
    def the_file_has_nothing_else(self):
        if not hasattr(self, "opened") or self.path is None:
            return
        self.opened(self.opened.store.settle())
        with sqlite3.connect(self.path) as file:
            rows = file.execute("SELECT session, count(*) FROM turns GROUP BY session").fetchall()
            sessions = [name for (name,) in file.execute("SELECT id FROM sessions ORDER BY id")]
        file.close()
        assert sessions == sorted(self.known)
        for name, count in rows:
            assert count == len(self.opened(self.opened.table.history(self.opened.session(name))).turns)


Sessions.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSessions = Sessions.TestCase
