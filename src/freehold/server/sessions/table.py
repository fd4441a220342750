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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from freehold.conversation import Conversation
from freehold.errors import InvalidParameter, NoSuchSession, SessionBusy, StoreFailed
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.streams import Delta
from freehold.sampling_params import SamplingParams
from freehold.server.access.clients import Client
from freehold.server.sessions.branches import BranchTree
from freehold.server.sessions.store import SessionStore, StoredSession
from freehold.text.answers.answer import Answer

EXPIRY_INTERVAL_S = 1.0
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


@dataclass(eq=False)
class Session:
    """`id` is its owner's name for it."""

    id: str
    settings: SessionSettings
    conversation: Conversation
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    adapter: str = ""  # that of the newest turn
    last_used: float = field(default_factory=time.time)
    branches: BranchTree = field(default_factory=BranchTree)
    closing: bool = False
    turn: Turn | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def key(self) -> str:
        """Its name in the store and in the engine, where clients may have chosen the same id."""
        return f"{self.settings.owner}/{self.id}" if self.settings.owner else self.id

    @property
    def scope(self) -> dict[str, str]:
        """Where its KV is: what the engine's procedures call it."""
        return {"namespace": self.settings.namespace, "adapter": self.adapter}


class Turn:
    """One turn in flight. `commit` makes it history; closed without that, it leaves no trace."""

    def __init__(self, table: SessionTable, session: Session, tokens: list[int]):
        self._table = table
        self.session = session
        self.session_id = session.id
        self.tokens = tokens
        self.request_id = ""
        self.messages: list[dict[str, Any]] | None = None  # of a chat, up to the answer
        self._output: list[int] = []
        self._answer = Answer()

    def observe(self, delta: Delta) -> None:
        """Take note of output. The end of it is saved before anybody hears of it."""
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
        """The turn has happened if it is on disk. Raises StoreFailed; then it has not."""
        session = self.session
        with self._table.changing(session):
            session.conversation.commit(self.tokens, self._output)
            if self.messages is not None:
                session.messages = [*self.messages, self._answer.as_message()]

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """With what the session's capacity leaves for output."""
        capacity = self.session.settings.capacity
        if capacity is None:
            return params
        room = capacity - len(self.tokens)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))

    def close(self) -> None:
        """The turn is over, whatever came of it. Idempotent: the next one may have begun."""
        session = self.session
        if session.turn is not self:
            return
        session.conversation.abandon()
        session.turn, session.last_used = None, time.time()
        session.idle.set()
        if session.closing:
            self._table.drop(session)


class SessionTable:
    """Used from one event loop. A client's names are unique; a closed session's name is free again."""

    def __init__(self, engine: AsyncEngine, store: SessionStore):
        self._engine = engine
        self._store = store
        self._sessions: dict[str, Session] = {}
        for stored in store:
            settings = SessionSettings(**stored.settings)
            if settings.branching:
                continue  # its branches are not kept
            conversation = Conversation(stored.tokens, settings.capacity, stored.ends)
            name = stored.id.removeprefix(f"{settings.owner}/")
            session = Session(name, settings, conversation, stored.messages)
            self._sessions[session.key] = session

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def open(self, name: str | None, settings: SessionSettings) -> Session:
        """Raises SessionBusy if the owner uses the name already, InvalidParameter if it can't be one."""
        name = uuid.uuid4().hex if name is None else name
        if not re.fullmatch(SESSION_ID, name):
            raise InvalidParameter("session_id", "must be 1 to 200 letters, digits, and any of . _ : @ -")
        session = Session(name, settings, Conversation(capacity=settings.capacity))
        if session.key in self._sessions:
            raise SessionBusy(f"session id {name} is already open")
        self.save(session)
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

    def begin(self, session: Session, new: Sequence[int], keep: int | None = None) -> Turn:
        """Start a turn with new input after the history, or after its first `keep` tokens. Raises SessionBusy
        or TurnRefused; then nothing has changed."""
        if session.closing:
            raise SessionBusy(f"close was requested for session {session.id}")
        if session.turn is not None:
            raise SessionBusy(f"session {session.id} already has an active request")
        turn = Turn(self, session, session.conversation.begin(new, keep))
        session.turn = turn
        session.idle.clear()
        session.last_used = time.time()
        return turn

    async def wait_until_idle(self, session: Session) -> None:
        """Until no turn is in flight; another waiter may be faster."""
        await session.idle.wait()

    def fork(self, session: Session, name: str | None) -> Session:
        """A session with the history so far; pages are shared through the prefix tree, and what does not
        fill a page is computed again by whoever comes second."""
        child = self.open(name, session.settings)
        try:
            with self.changing(child):
                child.conversation = session.conversation.fork()
                child.messages = list(session.messages)
                child.adapter = session.adapter
        except StoreFailed:
            self.drop(child)
            raise
        return child

    @contextlib.contextmanager
    def changing(self, session: Session) -> Iterator[None]:
        """What is changed inside is saved, or undone: raises StoreFailed."""
        before = session.conversation, replace(session.conversation), session.messages
        yield
        try:
            self.save(session)
        except StoreFailed:
            session.conversation, state, session.messages = before
            vars(session.conversation).update(vars(state))
            raise

    def rewind(self, session: Session, to: int) -> None:
        """Raises SessionBusy or TurnRefused."""
        if session.turn is not None:
            raise SessionBusy(f"session {session.id} has an active request")
        with self.changing(session):
            session.conversation.rewind(to)
            session.messages = []  # they can't be cut at a token

    def close(self, session: Session, abort: bool = False) -> None:
        """Now, or at the end of the turn that runs; with `abort` that turn ends at once."""
        session.closing = True
        if session.turn is None:
            self.drop(session)
        elif abort:
            self._engine.abort(session.turn.request_id)

    def drop(self, session: Session) -> None:
        if self._sessions.pop(session.key, None) is not None:
            self._store.delete(session.key)
            self._engine.forget_session(session.key)

    def save(self, session: Session) -> None:
        settings = {name: getattr(session.settings, name) for name in SessionSettings.__dataclass_fields__}
        conversation = session.conversation
        self._store.save(StoredSession(session.key, conversation.tokens, conversation.ends, session.messages, settings))

    async def expire(self) -> None:
        """Forever: close what has been idle for too long."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            now = time.time()
            for session in list(self):
                timeout = session.settings.timeout
                if timeout is not None and session.turn is None and now - session.last_used > timeout:
                    self.close(session)
