"""Regular expressions that end an output, found as its text grows."""

from __future__ import annotations

import codecs

from freehold.contract.automaton import STATES_MAX, Automaton, compile_automaton


def check_patterns(patterns: tuple[str, ...]) -> None:
    """Raise ValueError for what is no regular expression, or if they are too large together: their states are the
    work that each character of output costs."""
    count = sum(len(compile_automaton(pattern)) for pattern in patterns)
    if count > STATES_MAX:
        raise ValueError(f"the expressions have {count} states together, the limit is {STATES_MAX}")


class StopRegexes:
    """Watches for the first place where one of `patterns` matches. The output ends with the token that completes a
    match, so a repetition at the end of a pattern is as short as it can be, and `$` is the end of the text so far.
    An empty match is none. A token costs at most a visit of each state of the patterns for each of its characters,
    however long the text is."""

    def __init__(self, patterns: tuple[str, ...]):
        self._watches = [_Watch(compile_automaton(pattern)) for pattern in patterns]
        self._patterns = patterns
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._last: str | None = None  # character
        self._length = 0  # of the text
        self.held = 0  # characters at the end of the text with which a match may have begun

    def add(self, piece: bytes, may_stop: bool = True) -> tuple[int, str] | None:
        """Go on with the UTF-8 of `piece` -> (where the earliest match begins, its pattern), if
        there is one. What matches while the output may not stop is passed over."""
        text = self._decoder.decode(piece)
        found = [(began, i) for i, watch in enumerate(self._watches)
                 if (began := watch.read(text, self._last, self._length)) is not None]  # fmt: skip
        self._length += len(text)
        self._last = text[-1] if text else self._last
        if found and may_stop:
            began, index = min(found)
            return began, self._patterns[index]
        for _, i in found:
            self._watches[i].forget()
        self.held = self._length - min((watch.began(self._length) for watch in self._watches), default=self._length)
        return None


class _Watch:
    """One automaton on its way through the text."""

    def __init__(self, automaton: Automaton):
        self._automaton = automaton
        self._live: list[tuple[int, int]] = []  # (state, where its match began), sorted by the latter

    def read(self, text: str, before: str | None, at: int) -> int | None:
        """`text` follows the character `before` at position `at` -> where the earliest match begins that is complete
        now."""
        automaton, found = self._automaton, []
        for offset, after in enumerate([*text, None]):
            reached = automaton.closure([*self._live, (automaton.start, at + offset)], before, after)
            began = reached.get(automaton.end)
            if began is not None and began < at + offset:
                found.append(began)
            if after is not None:
                self._live = [
                    (following, began)
                    for state, began in reached.items()
                    if (accepts := automaton.accepts[state]) is not None and accepts(after)
                    for following in automaton.following[state]
                ]
                before = after
        return min(found, default=None)

    def began(self, length: int) -> int:
        """Where the oldest match that may still come began; `length` if there is none."""
        return self._live[0][1] if self._live else length

    def forget(self) -> None:
        """Look for the next match behind one that was passed over."""
        self._live = []
