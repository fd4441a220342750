"""The state machine of a request: each event in each state is either handled or impossible."""

from __future__ import annotations

from enum import StrEnum


class RequestState(StrEnum):
    WAITING = "waiting"  # in the queue, holds nothing
    PREFILLING = "prefilling"  # has a lease; its known tokens are not all computed
    RUNNING = "running"  # has a lease; decoding
    RETRACTED = "retracted"  # back in the queue with its output so far, holds nothing
    ENDED = "ended"


class Event(StrEnum):
    ADMITTED = "admitted"  # got a row and pages
    DECODED = "decoded"  # its first token since admission
    RETRACTED = "retracted"  # memory ran out, and it was the least important
    PREEMPTED = "preempted"  # a more important request, or a less served client, needed its place
    PAUSED = "paused"  # generation was paused, or weights were replaced
    STOPPED = "stopped"  # an end token or a stop string
    FILLED = "filled"  # max_tokens or the context length
    ABORTED = "aborted"  # by the client, or by a shutdown
    TIMED_OUT = "timed_out"
    FAILED = "failed"  # the engine failed, examining the request failed, or it alone exhausted the memory


class ImpossibleEvent(AssertionError):
    """An event that cannot happen in the request's state. Always a bug."""


_W, _P, _R, _B, _E = RequestState

# Unlisted pairs are impossible: a request without a row is in no step, so it can neither be retracted nor
# sample; a prefilling one has sampled nothing since admission; an ended one is final.
TRANSITIONS: dict[tuple[RequestState, Event], RequestState] = {
    (_W, Event.ADMITTED): _P,
    (_W, Event.ABORTED): _E,
    (_W, Event.TIMED_OUT): _E,
    (_W, Event.FAILED): _E,
    (_P, Event.DECODED): _R,
    (_P, Event.RETRACTED): _B,
    (_P, Event.PREEMPTED): _B,
    (_P, Event.PAUSED): _B,
    (_P, Event.ABORTED): _E,
    (_P, Event.TIMED_OUT): _E,
    (_P, Event.FAILED): _E,
    (_R, Event.RETRACTED): _B,
    (_R, Event.PREEMPTED): _B,
    (_R, Event.PAUSED): _B,
    (_R, Event.STOPPED): _E,
    (_R, Event.FILLED): _E,
    (_R, Event.ABORTED): _E,
    (_R, Event.TIMED_OUT): _E,
    (_R, Event.FAILED): _E,
    (_B, Event.ADMITTED): _P,
    (_B, Event.ABORTED): _E,
    (_B, Event.TIMED_OUT): _E,
    (_B, Event.FAILED): _E,
}


def after(state: RequestState, event: Event) -> RequestState:
    """Return the state that `event` leads to. Raise ImpossibleEvent."""
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise ImpossibleEvent(f"'{event}' cannot happen to a request that is {state}")
    return following
