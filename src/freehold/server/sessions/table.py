"""The open sessions: conversations with names, settings and a time to live.

A session lives here, beside HTTP; the engine knows only that a request is the turn of a name, and keeps that
name's tail. So whatever happens to the engine's memory, a session can go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

from freehold.arrays import Int32
from freehold.conversation import NO_TOKENS, Conversation, with_messages
from freehold.errors import InvalidParameter, NoSuchSession, SessionBusy, TimedOut
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Options
from freehold.ipc.streams import Delta
from freehold.sampling_params import SamplingParams
from freehold.server.access.clients import Client
from freehold.server.config import ServerConfig
from freehold.server.sessions.branches import BranchTree
from freehold.server.sessions.histories import Histories
from freehold.server.sessions.store import SessionStore
from freehold.text.answers.answer import Answer

EXPIRY_INTERVAL_S = 1.0
LEAST_TIMEOUT_S = 0.001
SESSION_ID = r"[A-Za-z0-9_.:@-]{1,200}"


@dataclass(frozen=True)
class SessionSettings:
    """`timeout` is the idle time, in seconds, after which a session is closed; None is never. `branching`
    sessions keep the history of each request (see `branches.py`). Only `owner` and admins may use it."""

    timeout: float | None = None
    capacity: int | None = None
    namespace: str = ""
    branching: bool = False
    owner: str = ""


@dataclass(eq=False, slots=True)
class Session:
    """`id` is its owner's name for it. Its history has so many `tokens` and `turns`. `turn` has the session, and those
    in `line` wait for it, first come first."""

    id: str
    settings: SessionSettings
    last_used: float  # on the clock of its table
    tokens: int = 0
    turns: int = 0
    adapter: str = ""  # that of the newest turn
    uses: int = 0  # beside its turns
    branches: BranchTree = field(default_factory=BranchTree)
    closing: bool = False
    turn: Turn | None = None
    line: list[Turn] = field(default_factory=list["Turn"])

    @property
    def key(self) -> str:
        """Its name in the store and in the engine, where clients may have chosen the same id."""
        return f"{self.settings.owner}/{self.id}" if self.settings.owner else self.id

    @property
    def scope(self) -> dict[str, str]:
        """Where its KV is: what the engine's procedures call it."""
        return {"namespace": self.settings.namespace, "adapter": self.adapter}

    def check_open(self) -> None:
        """Raises SessionBusy."""
        if self.closing:
            raise SessionBusy(f"close was requested for session {self.id}")


class Turn:
    """One turn of a session. It comes to have the session, begins, and is over; it may be closed at any time before.
    What it has said when it ends becomes history; closed without that, it leaves no trace."""

    def __init__(self, table: SessionTable, session: Session):
        self._table = table
        self.session = session
        self.session_id = session.id
        self.has_come = asyncio.Event()  # set too if the session is closed before
        self.is_over = asyncio.Event()
        self.tokens = NO_TOKENS  # until it has begun
        self.request_id = ""
        self._lined_up = time.monotonic()
        self._before = Conversation()  # once it has begun, without its tokens
        self._messages: str | None = None  # of a chat, up to the answer
        self._output: list[int] = []
        self._answer = Answer()

    async def wait(self, timeout: float | None = None) -> None:
        """Until this turn has the session. Raises SessionBusy if that is closed before, TimedOut after `timeout`
        seconds."""
        try:
            await asyncio.wait_for(self.has_come.wait(), timeout)
        except TimeoutError:
            message = f"timed out after {timeout:g} s, waiting for the turns of session {self.session_id} before"
            raise TimedOut(message) from None
        self.session.check_open()

    def begin(self, new: Int32, keep: int | None = None, messages: str | None = None) -> None:
        """Have all tokens: `new` input after the history, or after its first `keep` tokens. `messages` of a chat are
        all up to the answer. Raises SessionBusy, TurnRefused, SessionsFull or StoreFailed."""
        session = self.session
        session.check_open()
        assert session.turn is self
        before = self._table.conversation(session)
        tokens = before.begin(new, keep, session.settings.capacity)
        self._table.memory.hold(self, tokens.nbytes + len(messages or ""))
        self.tokens, self._messages = tokens, messages
        self._before = replace(before, parts=())

    def options(self, asked: Options) -> Options:
        """Those of its request: as asked for, in what is left of the time since it lined up."""
        session, timeout = self.session, asked.timeout
        if timeout is not None:
            timeout = max(timeout - (time.monotonic() - self._lined_up), LEAST_TIMEOUT_S)
        return Options(
            asked.priority, session.settings.namespace, timeout, session.key, asked.retention, asked.client,
            asked.adapter,
        )  # fmt: skip

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """With what the session's capacity leaves for output."""
        capacity = self.session.settings.capacity
        if capacity is None:
            return params
        room = capacity - len(self.tokens)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))

    def observe(self, delta: Delta) -> None:
        """Take note of output. The end of it is saved before anybody hears of it: raises StoreFailed, and then the
        turn has not happened."""
        self._output += delta.tokens
        self._answer.add(delta.events)
        if delta.ended is None:
            return
        try:
            if delta.ended.is_complete:
                self._commit()
        finally:
            self.close()

    def _commit(self) -> None:
        self._table.memory.hold(self, 0)  # its tokens are the history's from here on
        messages = self._messages
        if messages is not None:
            messages = with_messages(messages, [self._answer.as_message()])
        self._table.change(self.session, self._before.after(self.tokens, self._output, messages))

    def close(self) -> None:
        """The turn is over, whatever came of it, and the next one in line comes. Idempotent."""
        session = self.session
        if self in session.line:
            session.line.remove(self)
        if session.turn is self:
            self._table.memory.hold(self, 0)
            session.turn, session.last_used = None, self._table.clock()
            self.is_over.set()
            self._table.go_on(session)


class SessionTable:
    """Used from one event loop. A client's names are unique; a closed session's name is free again. `memory` has
    histories. Idle time is measured on `clock`, which nobody sets."""

    def __init__(
        self,
        engine: AsyncEngine,
        store: SessionStore,
        memory_bytes: int = ServerConfig.session_memory_bytes,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self.clock = clock
        self.memory = Histories(store, memory_bytes)
        self._sessions: dict[str, Session] = {}
        for stored in store:
            settings = SessionSettings(**stored.settings)
            if settings.branching:
                continue  # its branches are not kept
            name = stored.id.removeprefix(f"{settings.owner}/")
            session = Session(name, settings, clock(), stored.tokens, stored.turns)
            self._sessions[session.key] = session

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def open(
        self,
        name: str | None,
        settings: SessionSettings,
        conversation: Conversation = Conversation(),  # noqa: B008, it can't change
    ) -> Session:
        """With this history. Raises SessionBusy if the owner uses the name already, InvalidParameter if it can't be
        one, or StoreFailed."""
        name = uuid.uuid4().hex if name is None else name
        if not re.fullmatch(SESSION_ID, name):
            raise InvalidParameter("session_id", "must be 1 to 200 letters, digits, and any of . _ : @ -")
        session = Session(name, settings, self.clock())
        if session.key in self._sessions:
            raise SessionBusy(f"session id {name} is already open")
        self.change(session, conversation)
        self._sessions[session.key] = session
        return session

    def get(self, name: str, client: Client) -> Session:
        """A client's own session, or for administrators anybody's. Raises NoSuchSession."""
        session = self._sessions.get(f"{client.name}/{name}" if client.name else name)
        if session is None and client.is_admin:
            session = next((one for one in self if one.id == name), None)
        if session is None:
            raise NoSuchSession(f"session id {name} does not exist")
        return session

    def of(self, client: Client) -> list[Session]:
        """All that the client may use."""
        return [session for session in self if client.may_use(session.settings.owner)]

    def conversation(self, session: Session) -> Conversation:
        """Its history. Raises StoreFailed if it can't be read."""
        return self.memory.of(session.key)

    def change(self, session: Session, conversation: Conversation) -> None:
        """Give it this history, on disk first. Raises StoreFailed; then nothing has changed."""
        self.memory.put(session.key, conversation, asdict(session.settings))
        session.tokens, session.turns = conversation.length, conversation.turns

    def line_up(self, session: Session, waits: bool = False) -> Turn:
        """A turn that has the session, or if another one has it, and this one `waits`, comes after those before it.
        To be closed, whatever comes of it. Raises SessionBusy."""
        session.check_open()
        if session.turn is not None and not waits:
            raise SessionBusy(f"session {session.id} already has an active request")
        turn = Turn(self, session)
        session.line.append(turn)
        self.go_on(session)
        return turn

    def go_on(self, session: Session) -> None:
        """To the next turn in line, if no other has the session."""
        if session.turn is None and session.closing:
            self._drop(session)
        elif session.turn is None and session.line:
            session.turn, session.last_used = session.line.pop(0), self.clock()
            session.turn.has_come.set()

    def fork(self, session: Session, name: str | None) -> Session:
        """A session with the history so far; pages are shared through the prefix tree, and what does not
        fill a page is computed again by the one that comes second. Raises what `open` does, and SessionsFull."""
        session.last_used = self.clock()
        conversation = self.conversation(session)
        self.memory.make_room(conversation.nbytes)
        child = self.open(name, session.settings, conversation)
        child.adapter = session.adapter
        return child

    def rewind(self, session: Session, to: int) -> None:
        """Raises SessionBusy, TurnRefused or StoreFailed."""
        if session.turn is not None:
            raise SessionBusy(f"session {session.id} has an active request")
        session.last_used = self.clock()
        self.change(session, self.conversation(session).rewound(to))

    def close(self, session: Session, abort: bool = False) -> None:
        """Now, or at the end of the turn that runs; with `abort` that turn ends at once. Those in line are refused."""
        session.closing = True
        for turn in session.line:
            turn.has_come.set()
        session.line.clear()
        if session.turn is not None and abort:
            self._engine.abort(session.turn.request_id)
        self.go_on(session)

    def _drop(self, session: Session) -> None:
        if self._sessions.pop(session.key, None) is not None:
            self.memory.hold(session.branches, 0)
            self.memory.drop(session.key)
            self._engine.forget_session(session.key)

    @contextlib.contextmanager
    def in_use(self, session: Session) -> Iterator[None]:
        """It is not idle."""
        session.uses += 1
        try:
            yield
        finally:
            session.uses, session.last_used = session.uses - 1, self.clock()

    def last_used(self, session: Session) -> float:
        """As a time of day."""
        return time.time() - (self.clock() - session.last_used)

    async def expire(self) -> None:
        """Forever: close what has been idle for too long."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            self.close_idle()

    def close_idle(self) -> None:
        now = self.clock()
        for session in list(self):
            timeout, in_use = session.settings.timeout, session.turn is not None or session.uses > 0
            if timeout is not None and not in_use and now - session.last_used > timeout:
                self.close(session)
