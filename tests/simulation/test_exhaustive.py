"""Every order of events in small worlds: a few seconds of it, and that it finds what is wrong."""

from collections import deque

import pytest

from freehold.memory import WritePolicy
from freehold.memory.lease import Lease
from freehold.memory.ledger.epochs import Epochs
from freehold.scheduler.planner import Planner
from freehold.scheduler.queue import WaitingQueue
from freehold.simulation.exhaustive import Counterexample, explore, visit
from freehold.simulation.small_world import Action, ActionKind, Scope, SmallWorld, scopes


@pytest.mark.parametrize(("depth", "states"), [(3, 700), pytest.param(4, 2000, marks=pytest.mark.thorough)])
def test_every_scope_is_explored_some_events_deep(depth, states):
    explored = {}
    for exploration in explore(seconds=500, processes=1):
        explored[exploration.scope] = exploration
        if min(one.depth for one in explored.values()) >= depth and len(explored) == len(scopes()):
            break
    assert set(explored) == set(scopes())
    assert sum(exploration.states for exploration in explored.values()) > states


@pytest.mark.parametrize("scope", scopes()[:3], ids=str)
def test_a_state_is_the_same_whatever_its_pages_are_called(scope):
    """Another page is taken first, and comes back."""
    worlds = [SmallWorld(scope) for _ in range(2)]
    for pool in worlds[1].memory.pools:
        pool._free[:] = pool._free[::-1].copy()
    for _ in range(8):
        enabled = [str(action) for action in worlds[0].enabled()]
        verbs = (Action(ActionKind.ARRIVE, 0), Action(ActionKind.RESULT), Action(ActionKind.ITERATE))
        action = next((verb for verb in verbs if str(verb) in enabled), None)
        if action is None:
            break
        signatures = []
        for world in worlds:
            world.apply(action)
            signatures.append(world.signature())
        assert signatures[0] == signatures[1]
    other = SmallWorld(scope)
    other.apply(Action(ActionKind.ARRIVE, 0))
    assert other.signature() != signatures[0]


def test_all_events_happen():
    seen = set()
    forked = Scope(4, 2, 6, True, session=True, fork=True, tier=WritePolicy.WRITE_THROUGH)
    for scope, depth in ((Scope(2, 2, 4, True, session=True), 6), (Scope(2, 1, 6, True), 6), (forked, 3)):
        for exploration in explore([scope], seconds=60, processes=1):
            seen |= {action.kind for path, enabled in exploration.frontier for action in (*path, *enabled)}
            if exploration.depth == depth:
                break
    assert seen >= set(ActionKind) - {ActionKind.CLOSE}
    world = SmallWorld(Scope(2, 2, 4, False, session=True))
    world.apply(Action(ActionKind.ARRIVE, 0))
    while world.scheduler.has_work:
        world.apply(Action(ActionKind.RESULT if world.scheduler.in_flight_count else ActionKind.ITERATE))
    assert Action(ActionKind.CLOSE) in world.enabled(), "the session has left a tail"


BUGS = {
    "a freed page is free at once": (Epochs, "passed", lambda self, fence: True),
    "a retracted request is never looked at again": (WaitingQueue, "push", None),
    "a lease is not released": (Lease, "release", lambda self: None),
    "nobody is retracted": (Planner, "_retract_until_it_fits", lambda self: self._continue()),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_with_the_shortest_events(name, monkeypatch):
    owner, method, broken = BUGS[name]
    if broken is None:
        push = WaitingQueue.push

        def broken(self, request):
            if not request.retractions:
                push(self, request)

    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(Counterexample) as found:
        deque(explore(scopes()[:4], seconds=40, processes=1), maxlen=0)
    assert found.value.path
    assert visit(found.value.scope, found.value.path).error == found.value.error
    assert visit(found.value.scope, found.value.path[:-1]).error is None
