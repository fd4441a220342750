"""Branching sessions: later requests may continue any finished one."""

from __future__ import annotations

from freehold.contract.errors import TurnRefused
from freehold.server.native.schema import SessionParams
from freehold.server.sessions.conversation import Conversation
from freehold.server.sessions.history import History, Replacement
from freehold.server.sessions.table import Session


def branch_of(session: Session, history: History, params: SessionParams) -> tuple[Conversation, Replacement | None]:
    """Return the conversation that a request continues, and what it replaces. Raises TurnRefused."""
    if params.rid is None:
        return Conversation(), Replacement(None) if params.replace else None
    unfinished = next((turn for turn in session.running if turn.name == params.rid and turn.number), None)
    if unfinished is not None and not params.replace:
        raise TurnRefused(f"session_params.rid: request {params.rid} has not finished")
    point = history.points.get(params.rid) if unfinished is None else unfinished.asked()
    if point is None:
        raise TurnRefused(f"session_params.rid: request {params.rid} is not one of the session's")
    end = point.start + point.asked if params.drop_previous_output else point.length
    if params.offset is not None and params.offset >= 0:
        end = min(end, params.offset)
    name = None if unfinished is None else params.rid
    return point.up_to(end), Replacement(point, name) if params.replace else None
