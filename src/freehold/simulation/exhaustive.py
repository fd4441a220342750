"""Every order of events in small worlds, breadth first, each state once (explicit-state model checking)."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from freehold.simulation.small_world import Action, Scope, SmallWorld, scopes

Path = tuple[Action, ...]
VisitAll = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
CHUNK = 64  # paths per job of a process


@dataclass
class Exploration:
    """Progress in one scope: `transitions` led to `states` distinct states; every order of `depth` events was tried."""

    scope: Scope
    transitions: int = 0
    depth: int = 0
    is_complete: bool = False
    seen: set[bytes] = field(default_factory=set[bytes])
    frontier: list[tuple[Path, list[Action]]] = field(default_factory=list[tuple[Path, list[Action]]])

    @property
    def states(self) -> int:
        return len(self.seen)


@dataclass
class Counterexample(Exception):
    """A violation, with the shortest sequence of events that causes it."""

    scope: Scope
    path: Path
    error: str

    def __str__(self) -> str:
        events = "\n".join(f"  {action}" for action in self.path)
        return f"{self.scope}: {self.error}\n{events}"


@dataclass(frozen=True)
class _Visit:
    signature: bytes
    enabled: list[Action]
    error: str | None = None


def visit(scope: Scope, path: Path) -> _Visit:
    """Visit the state after `path`. If nothing more happens from there, all must end well."""
    world = SmallWorld(scope)
    try:
        for action in path:
            world.apply(action)
        world.check()  # earlier states were checked when they were new
        signature, enabled = world.signature(), world.enabled()
        world.finish()
    except Exception as error:
        return _Visit(b"", [], f"{type(error).__name__}: {error}")
    return _Visit(signature, enabled)


def _visit_all(job: tuple[Scope, list[Path]]) -> list[_Visit]:
    return [visit(job[0], path) for path in job[1]]


def explore(chosen: list[Scope] | None = None, seconds: float = 600.0, processes: int = 2) -> Iterator[Exploration]:
    """Deepen all scopes by one event in turn, until all are complete or the time is up. Yield each exploration after
    each of its levels. Raise Counterexample."""
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        visit_all: VisitAll = map
        if processes > 1:
            visit_all = stack.enter_context(multiprocessing.get_context("spawn").Pool(processes)).imap
        yield from _explore(scopes() if chosen is None else chosen, end, visit_all)


def _explore(chosen: list[Scope], end: float, visit_all: VisitAll) -> Iterator[Exploration]:
    explorations = [Exploration(scope) for scope in chosen]
    for exploration in explorations:
        first = visit(exploration.scope, ())
        if first.error is not None:
            raise Counterexample(exploration.scope, (), first.error)
        exploration.seen.add(first.signature)
        exploration.frontier = [((), first.enabled)]
    while time.monotonic() < end and not all(one.is_complete for one in explorations):
        for exploration in explorations:
            if not exploration.is_complete and not _deepen(exploration, visit_all, end):
                return
            yield exploration


def _deepen(exploration: Exploration, visit_all: VisitAll, end: float) -> bool:
    """Explore one more level. Return whether it was finished in time."""
    scope = exploration.scope
    paths = [(*path, action) for path, enabled in exploration.frontier for action in enabled]
    chunks = [paths[at : at + CHUNK] for at in range(0, len(paths), CHUNK)]
    following: list[tuple[Path, list[Action]]] = []
    found = visit_all(_visit_all, [(scope, chunk) for chunk in chunks])
    for chunk, visits in zip(chunks, found, strict=True):
        for path, visited in zip(chunk, visits, strict=True):
            if visited.error is not None:
                raise Counterexample(scope, path, visited.error)
            exploration.transitions += 1
            if visited.signature not in exploration.seen:
                exploration.seen.add(visited.signature)
                following.append((path, visited.enabled))
        if time.monotonic() > end:
            return False
    exploration.frontier = following
    exploration.depth += 1
    exploration.is_complete = not following
    return True
