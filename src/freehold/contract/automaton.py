"""Regular expressions as automata, which can't backtrack: looking at one more character costs at most one visit of
each state (Thompson 1968; Pike's variant keeps where a match began).

The expressions are Python's. What no automaton can do is refused: back-references, look-around, and groups that are
atomic or possessive.
"""

from __future__ import annotations

import functools
import re
import re._constants as op  # pyright: ignore[reportMissingImports]
import re._parser as parser  # pyright: ignore[reportMissingImports]
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

STATES_MAX = 256
PATTERN_MAX = 4096  # characters

Accepts = Callable[[str], bool]
# Whether a place between two characters will do; None is the end of the text so far.
Holds = Callable[["str | None", "str | None"], bool]


@dataclass
class Automaton:
    """State i consumes a character that `accepts[i]`, or none if that is None; then it goes on to `following[i]`, if
    the place `holds[i]` where there is a condition. `end` is the state of a match."""

    accepts: list[Accepts | None] = field(default_factory=list[Accepts | None])
    holds: list[Holds | None] = field(default_factory=list[Holds | None])
    following: list[list[int]] = field(default_factory=list[list[int]])
    start: int = 0
    end: int = 0

    def __len__(self) -> int:
        return len(self.following)

    def add(self, accepts: Accepts | None = None, holds: Holds | None = None) -> int:
        """Raise ValueError if there are too many states."""
        if len(self) >= STATES_MAX:
            raise ValueError(f"it has more than {STATES_MAX} states")
        self.accepts.append(accepts)
        self.holds.append(holds)
        self.following.append([])
        return len(self) - 1

    def closure(self, states: Iterable[tuple[int, int]], before: str | None, after: str | None) -> dict[int, int]:
        """Return the states reached without a character between `before` and `after`, each with where its match
        began. `states` are sorted by that, so the first to reach a state is the one that began first."""
        reached: dict[int, int] = {}
        for state, began in states:
            stack = [state]
            while stack:
                at = stack.pop()
                if at in reached:
                    continue
                holds = self.holds[at]
                if holds is not None and not holds(before, after):
                    continue
                reached[at] = began
                if self.accepts[at] is None:
                    stack.extend(self.following[at])
        return reached


@functools.lru_cache(maxsize=256)
def compile_automaton(pattern: str) -> Automaton:
    """Raise ValueError for what is no regular expression, or one that is too large or needs more than an automaton."""
    if len(pattern) > PATTERN_MAX:
        raise ValueError(f"a regular expression has at most {PATTERN_MAX} characters, this has {len(pattern)}")
    try:
        tree: Any = parser.parse(pattern)
        return _Builder(tree.state.flags).build(tree)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"'{pattern}' can't be used as a regular expression: {reason}") from None


class _Builder:
    """From Python's own parse of an expression. Fragments are (first state, last state)."""

    def __init__(self, flags: int):
        self._flags = flags
        self._automaton = Automaton()

    def build(self, tree: Any) -> Automaton:
        automaton = self._automaton
        first, last = self._sequence(tree)
        automaton.end = automaton.add()
        automaton.following[last].append(automaton.end)
        automaton.start = first
        return automaton

    def _sequence(self, items: Any) -> tuple[int, int]:
        first = last = self._automaton.add()
        for kind, argument in items:
            head, tail = self._item(kind, argument)
            self._automaton.following[last].append(head)
            last = tail
        return first, last

    def _item(self, kind: Any, argument: Any) -> tuple[int, int]:
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            state = self._automaton.add(accepts=_accepts(kind, argument, self._flags))
            return state, state
        if kind is op.AT:
            state = self._automaton.add(holds=_holds(argument, self._flags))
            return state, state
        if kind is op.SUBPATTERN:
            return self._group(*argument)
        if kind is op.BRANCH:
            return self._branch(argument[1])
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat(*argument)
        raise ValueError(f"{str(kind).lower().replace('_', ' ')} is not supported, for it may take exponential time")

    def _group(self, number: int | None, added: int, removed: int, items: Any) -> tuple[int, int]:
        before, self._flags = self._flags, (self._flags | added) & ~removed
        fragment = self._sequence(items)
        self._flags = before
        return fragment

    def _branch(self, alternatives: Any) -> tuple[int, int]:
        first, last = self._automaton.add(), self._automaton.add()
        for items in alternatives:
            head, tail = self._sequence(items)
            self._automaton.following[first].append(head)
            self._automaton.following[tail].append(last)
        return first, last

    def _repeat(self, least: int, most: Any, items: Any) -> tuple[int, int]:
        following = self._automaton.following
        first = last = self._automaton.add()
        for _ in range(least):
            head, tail = self._sequence(items)
            following[last].append(head)
            last = tail
        end = self._automaton.add()
        following[last].append(end)
        if most is op.MAXREPEAT:
            head, tail = self._sequence(items)
            following[end].append(head)
            following[tail].append(end)
            return first, end
        for _ in range(most - least):
            head, last_of_this = self._sequence(items)
            following[last].append(head)
            last = last_of_this
            following[last].append(end)
        return first, end


def _accepts(kind: Any, argument: Any, flags: int) -> Accepts:
    """Whether a character is what LITERAL, NOT_LITERAL, ANY or IN asks for."""
    if kind is op.ANY:
        return (lambda char: True) if flags & re.DOTALL else (lambda char: char != "\n")
    items = argument if kind is op.IN else [(op.LITERAL, argument)]
    is_negated = kind is op.NOT_LITERAL or items[0][0] is op.NEGATE
    tests = [_test(of, what, bool(flags & re.ASCII)) for of, what in items if of is not op.NEGATE]
    cases = (str.lower, str.upper) if flags & re.IGNORECASE else ()

    def accepts(char: str) -> bool:
        variants = {char, *(case(char) for case in cases)}
        return is_negated != any(test(variant) for test in tests for variant in variants)

    return accepts


def _test(kind: Any, argument: Any, is_ascii: bool) -> Accepts:
    if kind is op.LITERAL:
        literal = chr(argument)
        return lambda char: char == literal
    if kind is op.RANGE:
        low, high = map(chr, argument)
        return lambda char: low <= char <= high
    name = str(argument).removeprefix("CATEGORY_").lower()
    positive = {"digit": str.isdecimal, "space": str.isspace, "word": _is_word}[name.removeprefix("not_")]

    def belongs(char: str) -> bool:
        return (positive(char) and (char.isascii() or not is_ascii)) != name.startswith("not_")

    return belongs


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _holds(kind: Any, flags: int) -> Holds:
    """Whether an anchor or a word boundary holds at a place."""
    is_multiline = bool(flags & re.MULTILINE)

    def is_word(char: str | None) -> bool:
        return char is not None and _is_word(char) and (char.isascii() or not flags & re.ASCII)

    if kind is op.AT_BEGINNING:
        return lambda before, after: before is None or (is_multiline and before == "\n")
    if kind is op.AT_BEGINNING_STRING:
        return lambda before, after: before is None
    if kind is op.AT_END:
        return lambda before, after: after is None or (is_multiline and after == "\n")
    if kind is op.AT_END_STRING:
        return lambda before, after: after is None
    wanted = kind is op.AT_BOUNDARY
    return lambda before, after: (is_word(before) != is_word(after)) == wanted
