"""The history of one session: a tree of turns with shared beginnings."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from freehold.server.sessions.conversation import Conversation


@dataclass(frozen=True)
class Change:
    """A change of a history: `points` added or replaced, names of points that are `gone`, turns `added`, oldest first,
    and numbers of turns `dropped` because no point continues them."""

    points: Mapping[str, Conversation]
    gone: Collection[str] = ()
    added: tuple[Conversation, ...] = ()
    dropped: Collection[int] = ()


@dataclass(frozen=True)
class Replacement:
    """A request replaces all earlier ones that continue `root`, or all earlier ones if None. If it continues an
    `unfinished` request, the latter's input stays as a point under its name."""

    root: Conversation | None
    unfinished: str | None = None

    def concerns(self, base: Conversation) -> bool:
        """Return whether a turn that continues `base` is replaced."""
        return self.root is None or any(one.number == self.root.number for one in base.path)


class History:
    """The points that a next turn may continue, by name, newest last, and all turns that they consist of.

    A linear session has one point, whose name is empty. A branching one has a point for each finished request. A turn
    has a higher number than the turns that it continues.
    """

    def __init__(self) -> None:
        self.points: dict[str, Conversation] = {}
        self.turns: dict[int, Conversation] = {}
        self.nbytes = 0

    @property
    def head(self) -> Conversation:
        """The newest point."""
        return next(reversed(self.points.values()), Conversation())

    def change(self, points: Mapping[str, Conversation], gone: Collection[str] = ()) -> Change:
        """Return the change that adds or replaces `points` and drops those that are `gone`, without applying it."""
        added: dict[int, Conversation] = {}
        for point in points.values():
            added |= {one.number: one for one in _until(point, self.turns, added)}
        for number in sorted(added):  # reuse known turns, even if they were read twice
            one = added[number]
            if one.before is not None:
                added[number] = replace(one, before=added.get(one.before.number) or self.turns[one.before.number])
        points = {name: added.get(point.number) or self.turns[point.number] for name, point in points.items()}
        dropped: Collection[int] = ()
        if gone or any(self._is_replaced(name, point) for name, point in points.items()):
            left = {name: point for name, point in self.points.items() if name not in gone}
            dropped = self.turns.keys() - _numbers((left | points).values())
        return Change(points, gone, tuple(added[number] for number in sorted(added)), dropped)

    def _is_replaced(self, name: str, by: Conversation) -> bool:
        """Return whether a point has this name that `by` does not continue."""
        known = self.points.get(name)
        return known is not None and (by.before is None or by.before.number != known.number)

    def apply(self, change: Change) -> None:
        for name in [*change.gone, *change.points]:
            self.nbytes -= 0 if self.points.pop(name, None) is None else _name_bytes(name)
        for name, point in change.points.items():
            self.points[name] = point
            self.nbytes += _name_bytes(name)
        for number in change.dropped:
            self.nbytes -= self.turns.pop(number).nbytes
        for turn in change.added:
            self.turns[turn.number] = turn
            self.nbytes += turn.nbytes

    def replacing(self, name: str, point: Conversation, replacement: Replacement) -> Change:
        """Return the change that adds a point and drops those that it replaces."""
        replaced = self._following(replacement.root)
        gone = {other for other, one in self.points.items() if one.number in replaced and one.number < point.number}
        points = {name: point}
        root, unfinished = replacement.root, replacement.unfinished
        if root is not None and unfinished is not None and (unfinished in gone or unfinished not in self.points):
            points = {unfinished: root, **points}
        return self.change(points, gone)

    def _following(self, root: Conversation | None) -> set[int]:
        """Return the numbers of all turns that continue `root`, or of all turns if None."""
        if root is None:
            return {*self.turns}
        found = {root.number}
        for number in sorted(self.turns):
            before = self.turns[number].before
            if before is not None and before.number in found:
                found.add(number)
        return found - {root.number}


def _until(point: Conversation, *known: Container[int]) -> Iterator[Conversation]:
    """Yield a point's turns, newest first, up to the first known one."""
    for one in point.path:
        if any(one.number in numbers for numbers in known):
            return
        yield one


def _numbers(points: Iterable[Conversation]) -> set[int]:
    """Return the numbers of all turns that the points consist of."""
    found: set[int] = set()
    for point in points:
        found.update([one.number for one in _until(point, found)])
    return found


def _name_bytes(name: str) -> int:
    return 100 + len(name)
