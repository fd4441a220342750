"""The history of one session: a tree of turns that share their beginning."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from freehold.conversation import Conversation


@dataclass(frozen=True)
class Change:
    """What becomes of a history: `points` that come or are others now, names that are `gone`; and of what they consist:
    turns that are `added`, the oldest first, and numbers of the turns that nothing continues any more."""

    points: Mapping[str, Conversation]
    gone: Collection[str] = ()
    added: tuple[Conversation, ...] = ()
    dropped: Collection[int] = ()


@dataclass(frozen=True)
class Replacement:
    """A request takes the place of all before it that continue `root`, or of all if that is None. Of an `unfinished`
    one that it continues, the input stays under its name."""

    root: Conversation | None
    unfinished: str | None = None

    def concerns(self, base: Conversation) -> bool:
        """Whether a turn that continues `base` is replaced."""
        return self.root is None or any(one.number == self.root.number for one in base.path)


class History:
    """Points that a next turn may continue, by name, the newest last; and all turns that they consist of, by number.

    A session in which turn follows turn has one point, without name. A branching one has a point for each request that
    has finished. The number of a turn is above those of the turns that it continues.
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
        """What it takes to have these points and be without those that are `gone`. Nothing has changed yet."""
        added: dict[int, Conversation] = {}
        for point in points.values():
            added |= {one.number: one for one in _until(point, self.turns, added)}
        for number in sorted(added):  # what is known stays the same object, though it may have been read twice
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
        """Whether the point of that name, if there is one, is another one that does not continue it."""
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
        """What it takes to have a point in the place of others."""
        replaced = self._following(replacement.root)
        gone = {other for other, one in self.points.items() if one.number in replaced and one.number < point.number}
        points = {name: point}
        root, unfinished = replacement.root, replacement.unfinished
        if root is not None and unfinished is not None and (unfinished in gone or unfinished not in self.points):
            points = {unfinished: root, **points}
        return self.change(points, gone)

    def _following(self, root: Conversation | None) -> set[int]:
        """Numbers of all turns that continue `root`; of all, if that is None."""
        if root is None:
            return {*self.turns}
        found = {root.number}
        for number in sorted(self.turns):
            before = self.turns[number].before
            if before is not None and before.number in found:
                found.add(number)
        return found - {root.number}


def _until(point: Conversation, *known: Container[int]) -> Iterator[Conversation]:
    """What it consists of, as far as that is not known."""
    for one in point.path:
        if any(one.number in numbers for numbers in known):
            return
        yield one


def _numbers(points: Iterable[Conversation]) -> set[int]:
    """Those of all turns that the points consist of."""
    found: set[int] = set()
    for point in points:
        found.update([one.number for one in _until(point, found)])
    return found


def _name_bytes(name: str) -> int:
    return 100 + len(name)
