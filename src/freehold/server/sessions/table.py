"""The open sessions: histories with names, settings and a time to live.

A session lives here, in the HTTP process. The engine knows only the session name of a request, and keeps that name's
tail. So a session survives the loss of the engine's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Any

from freehold.contract.arrays import Int32
from freehold.contract.errors import InvalidParameter, NoSuchSession, SessionBusy, TimedOut, TurnRefused
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Options
from freehold.ipc.streams import Delta
from freehold.server.access.clients import Client
from freehold.server.config import ServerConfig
from freehold.server.sessions.conversation import NO_MESSAGES, NO_TOKENS, Conversation, with_messages
from freehold.server.sessions.histories import Histories, check_count
from freehold.server.sessions.history import History, Replacement
from freehold.server.sessions.settings import SessionSettings
from freehold.server.sessions.store import SessionRow, SessionStore
from freehold.text.answers.answer import Answer

EXPIRY_INTERVAL_S = 1.0
LEAST_TIMEOUT_S = 0.001
NO_POINTS: Mapping[str, Conversation] = MappingProxyType({})
SESSION_ID = r"[A-Za-z0-9_.:@-]{1,200}"


@dataclass(eq=False, slots=True)
class Session:
    """`id` is its owner's name for it. `tokens` and `turns` are of its newest point. `running` turns hold the session;
    turns in `line` wait for it in FIFO order."""

    id: str
    settings: SessionSettings
    last_used: float  # on its table's clock
    tokens: int = 0
    turns: int = 0
    adapter: str = ""  # of the newest turn
    numbers: Iterator[int] = field(default_factory=lambda: count(1))  # for future turns
    uses: int = 0  # besides turns, such as a save
    closing: bool = False
    running: list[Turn] = field(default_factory=list["Turn"])
    line: list[Turn] = field(default_factory=list["Turn"])
    changes: asyncio.Lock = field(default_factory=asyncio.Lock)  # of its history: one at a time

    @property
    def key(self) -> str:
        """Its unique name in the store and engine, since clients may choose the same id."""
        return f"{self.settings.owner}/{self.id}" if self.settings.owner else self.id

    @property
    def scope(self) -> dict[str, str]:
        """The location of its KV, as arguments of the engine's procedures."""
        return {"namespace": self.settings.namespace, "adapter": self.adapter}

    @property
    def is_free(self) -> bool:
        """Whether a turn may start. Branches run concurrently."""
        return self.settings.branching or not self.running

    def row(self, adapter: str) -> SessionRow:
        return SessionRow(self.key, asdict(self.settings), adapter)

    def check_open(self) -> None:
        """Raise SessionBusy if the session is closing."""
        if self.closing:
            raise SessionBusy(f"close was requested for session {self.id}")


class Turn:
    """One turn of a session. It acquires the session, begins and ends; it may be closed at any point. Its output when
    it ends becomes history, as the point `name`; closed earlier, it leaves no trace."""

    def __init__(self, table: SessionTable, session: Session, name: str = ""):
        self._table = table
        self.session = session
        self.session_id = session.id
        self.name = name
        self.has_come = asyncio.Event()  # also set if the session is closed first
        self.is_over = asyncio.Event()
        self.tokens = NO_TOKENS  # until it has begun
        self.number = 0  # likewise
        self.base = Conversation()  # the conversation that it continues
        self.request_id = name
        self.adapter = ""
        self.is_replaced = False
        self._replacement: Replacement | None = None
        self._lined_up = time.monotonic()
        self._asked: Conversation | None = None
        self._has_replaced = False
        self._said: str | None = None  # chat messages up to the answer
        self._output: list[int] = []
        self._answer = Answer()
        self._commit: asyncio.Task[None] | None = None

    def asked(self) -> Conversation:
        """Return the conversation up to this turn's input. The turn must have begun."""
        if self._asked is None:
            self._asked = self.base.after(self.tokens, [], number=self.number - 1)
        return self._asked

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until this turn holds the session. Raises SessionBusy if it is closed first, TimedOut after `timeout`
        seconds."""
        timeout = self._table.request_timeout if timeout is None else timeout
        try:
            await asyncio.wait_for(self.has_come.wait(), timeout)
        except TimeoutError:
            message = f"timed out after {timeout:g} s, waiting for the turns of session {self.session_id} before"
            raise TimedOut(message) from None
        self.session.check_open()

    def begin(
        self, base: Conversation, new: Int32, said: str | None = None, replacement: Replacement | None = None
    ) -> None:
        """Set all tokens: `new` input after those of `base`, with the chat messages `said`. Raises SessionBusy,
        TurnRefused or SessionsFull, leaving everything unchanged."""
        session = self.session
        session.check_open()
        assert self in session.running
        tokens = base.begin(new, session.settings.capacity)
        self._table.memory.hold(self, tokens.nbytes + len(said or ""), session.settings.owner)
        self.base, self.tokens, self._said, self._replacement = base, tokens, said, replacement
        next(session.numbers)  # the number of its input: see `asked`
        self.number = next(session.numbers)

    def options(self, asked: Options) -> Options:
        """Return the request's options, with the timeout reduced by the time waited in line."""
        session, timeout = self.session, asked.timeout or self._table.request_timeout
        if timeout is not None:
            timeout = max(timeout - (time.monotonic() - self._lined_up), LEAST_TIMEOUT_S)
        return Options(
            asked.priority, session.settings.namespace, timeout, session.key, asked.retention, asked.client,
            asked.adapter,
        )  # fmt: skip

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """Limit output to the session's remaining capacity."""
        capacity = self.session.settings.capacity
        if capacity is None:
            return params
        room = capacity - len(self.tokens)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))

    async def observe(self, delta: Delta) -> None:
        """Record output. The end is saved before the client sees it: raises StoreFailed, and then the turn did not
        happen. A commit that has begun completes, even if the client leaves."""
        self._output += delta.tokens
        self._answer.add(delta.events)
        is_complete = delta.ended is not None and delta.ended.is_complete
        if self._replacement is not None and not self._has_replaced and (delta.tokens or is_complete):
            self._has_replaced = True  # not earlier: a refused request replaces nothing
            self._table.abort_replaced(self, self._replacement)
        if delta.ended is None:
            return
        try:
            if is_complete and not self.is_replaced:
                self._commit = asyncio.ensure_future(self._save())
                self._commit.add_done_callback(lambda _: self.close())
                await asyncio.shield(self._commit)
        finally:
            self.close()

    async def _save(self) -> None:
        said = NO_MESSAGES if self._said is None else with_messages(self._said, [self._answer.as_message()])
        point = self.base.after(self.tokens, self._output, said, self.number)
        await self._table.change(self.session, self.name, point, self._replacement, self.adapter)

    def close(self) -> None:
        """End the turn, successful or not, and let the next one in line run. Idempotent."""
        session = self.session
        if self in session.line:
            session.line.remove(self)
        is_saving = self._commit is not None and not self._commit.done()
        if self in session.running and not is_saving:
            self._table.memory.hold(self, 0, session.settings.owner)
            session.running.remove(self)
            session.last_used = self._table.clock()
            self.is_over.set()
            self._table.go_on(session)


class SessionTable:
    """Used from one event loop. A client's session names are unique; a closed session's name is free again. `memory`
    holds histories. Idle time is measured on `clock`, which is monotonic."""

    def __init__(
        self,
        engine: AsyncEngine,
        store: SessionStore,
        memory_bytes: int = ServerConfig.session_memory_bytes,
        clock: Callable[[], float] = time.monotonic,
        request_timeout: float | None = None,
    ):
        self._engine = engine
        self.request_timeout = request_timeout  # for requests without their own
        self.clock = clock
        self.memory = Histories(store, memory_bytes)
        self._sessions: dict[str, Session] = {}
        self._opening: set[str] = set()  # names of sessions not yet on disk
        for stored in store:
            settings = SessionSettings(**stored.row.settings)
            name = stored.row.id.removeprefix(f"{settings.owner}/")
            session = Session(name, settings, clock(), stored.tokens, stored.turns, stored.row.adapter)
            session.numbers = count(stored.last + 1)
            self._sessions[session.key] = session

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    async def open(
        self,
        name: str | None,
        settings: SessionSettings,
        points: Mapping[str, Conversation] = NO_POINTS,
        adapter: str = "",
    ) -> Session:
        """Open a session with these points. Raises SessionBusy if the owner uses the name already, InvalidParameter if
        it is invalid, SessionsFull or StoreFailed."""
        name = uuid.uuid4().hex if name is None else name
        if not re.fullmatch(SESSION_ID, name):
            raise InvalidParameter("session_id", "must be 1 to 200 letters, digits, and any of . _ : @ -")
        session = Session(name, settings, self.clock(), adapter=adapter)
        if session.key in self._sessions or session.key in self._opening:
            raise SessionBusy(f"session id {name} is already open")
        check_count(self._sessions, settings.owner)
        self._opening.add(session.key)
        await _to_its_end(self._open(session, points))
        return session

    async def _open(self, session: Session, points: Mapping[str, Conversation]) -> None:
        try:
            history = History()
            change = history.change(points)
            session.numbers = count(max((turn.number for turn in change.added), default=0) + 1)
            await self.memory.put(session.row(session.adapter), history, change)
            session.tokens, session.turns = history.head.length, history.head.turns
            session.last_used = self.clock()
            self._sessions[session.key] = session
        finally:
            self._opening.discard(session.key)

    def get(self, name: str, client: Client) -> Session:
        """Return a client's own session, or for administrators any client's. Raises NoSuchSession."""
        session = self._sessions.get(f"{client.name}/{name}" if client.name else name)
        if session is None or session.id != name:  # names of keys may have a slash
            session = next((one for one in self if one.id == name), None) if client.is_admin else None
        if session is None:
            raise NoSuchSession(f"session id {name} does not exist")
        return session

    def of(self, client: Client) -> list[Session]:
        """Return all sessions that the client may use."""
        return [session for session in self if client.may_use(session.settings.owner)]

    async def history(self, session: Session) -> History:
        """Return the session's history. Raises StoreFailed if it can't be read, NoSuchSession if the session closes
        meanwhile."""
        known = self.memory.known(session.key)
        if known is not None:
            return known
        async with session.changes:
            history = await self.memory.of(session.key)
        if self._sessions.get(session.key) is not session:
            self.memory.give_up(session.key)
            raise NoSuchSession(f"session id {session.id} does not exist")
        return history

    async def conversation(self, session: Session) -> Conversation:
        """Return its newest point. Raises what `history` does."""
        return (await self.history(session)).head

    async def change(
        self, session: Session, name: str, point: Conversation, replacement: Replacement | None, adapter: str
    ) -> None:
        """Add or replace a point, on disk first. The caller's turn must hold the session. Raises StoreFailed, leaving
        everything unchanged."""
        async with session.changes:
            history = await self.memory.of(session.key)
            change = (
                history.change({name: point}) if replacement is None else history.replacing(name, point, replacement)
            )
            await self.memory.put(session.row(adapter), history, change)
            session.tokens, session.turns, session.adapter = history.head.length, history.head.turns, adapter

    def line_up(self, session: Session, waits: bool = False, name: str = "") -> Turn:
        """Return a turn that holds the session, or, if it is busy and `waits` is set, one that waits in line. The
        caller must close it. Raises SessionBusy."""
        session.check_open()
        if not session.is_free and not waits:
            raise SessionBusy(f"session {session.id} already has an active request")
        turn = Turn(self, session, name)
        session.line.append(turn)
        self.go_on(session)
        return turn

    def go_on(self, session: Session) -> None:
        """Start the next turn in line, if the session is free."""
        if session.closing and not session.running:
            self._drop(session)
        while session.line and session.is_free:
            session.running.append(session.line.pop(0))
            session.last_used = self.clock()
            session.running[-1].has_come.set()

    def abort_replaced(self, by: Turn, replacement: Replacement) -> None:
        """Abort running turns that began before `by` and that it replaces."""
        for turn in [turn for turn in by.session.running if 0 < turn.number < by.number]:
            turn.is_replaced = turn.is_replaced or replacement.concerns(turn.base)
            if turn.is_replaced or turn.name == replacement.unfinished:
                self._engine.abort(turn.request_id)

    async def fork(self, session: Session, name: str | None) -> Session:
        """Open a session with the same history. Pages are shared through the prefix tree; the second session recomputes
        a partial last page. Raises what `open` does, and SessionsFull."""
        session.last_used = self.clock()
        history, fork = await self.history(session), object()
        self.memory.hold(fork, history.nbytes, session.settings.owner)  # concurrent forks need room for all copies
        try:
            return await self.open(name, session.settings, {**history.points}, session.adapter)
        finally:
            self.memory.hold(fork, 0, session.settings.owner)

    async def rewind(self, session: Session, to: int) -> None:
        """Rewind to the first `to` tokens. Raises SessionBusy, TurnRefused or StoreFailed."""
        if session.settings.branching:
            raise TurnRefused("a branching session is not rewound: a request may continue any before it")
        turn = self.line_up(session)
        await _to_its_end(self._rewind(turn, to))

    async def _rewind(self, turn: Turn, to: int) -> None:
        session = turn.session
        try:
            point = (await self.conversation(session)).rewound(to)
            await self.change(session, "", replace(point, number=next(session.numbers)), None, session.adapter)
        finally:
            turn.close()

    def close(self, session: Session, abort: bool = False) -> None:
        """Close after the running turns, or with `abort` end those immediately. Turns in line are refused."""
        session.closing = True
        for turn in session.line:
            turn.has_come.set()
        session.line.clear()
        for turn in session.running if abort else ():
            self._engine.abort(turn.request_id)
        self.go_on(session)

    def _drop(self, session: Session) -> None:
        if self._sessions.pop(session.key, None) is not None:
            self.memory.drop(session.key)
            self._engine.forget_session(session.key)

    @contextlib.contextmanager
    def in_use(self, session: Session) -> Iterator[None]:
        """Keep a session from becoming idle."""
        session.uses += 1
        try:
            yield
        finally:
            session.uses, session.last_used = session.uses - 1, self.clock()

    def last_used(self, session: Session) -> float:
        """Return its last use as Unix time."""
        return time.time() - (self.clock() - session.last_used)

    async def expire(self) -> None:
        """Close idle sessions, forever."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            self.close_idle()

    def close_idle(self) -> None:
        now = self.clock()
        for session in list(self):
            timeout, in_use = session.settings.timeout, bool(session.running or session.uses)
            if timeout is not None and not in_use and now - session.last_used > timeout:
                self.close(session)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work. It completes even if the caller is cancelled."""
    await asyncio.shield(asyncio.ensure_future(work))
