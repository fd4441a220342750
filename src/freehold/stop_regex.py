"""Regular expressions that end an output, found as its text grows."""

from __future__ import annotations

import codecs

import regex

SECONDS_MAX = 0.1  # for one look: an expression may take exponential time


class StopRegexTooSlow(Exception):
    """An expression took too long on this output."""


def compile_stop(pattern: str) -> regex.Pattern[str]:
    """Raises ValueError for what is no regular expression."""
    try:
        return regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"'{pattern}' is not a regular expression: {error}") from None


class StopRegexes:
    """Watches for the first place where one of `patterns` matches. The output ends with the token that
    completes a match, so a repetition at the end of a pattern is as short as it can be."""

    def __init__(self, patterns: tuple[str, ...]):
        self._patterns = [compile_stop(pattern) for pattern in patterns]
        self._from = [0] * len(patterns)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text = ""
        self.held = 0  # characters at the end of the text with which a match may have begun

    def add(self, piece: bytes, may_stop: bool = True) -> tuple[int, str] | None:
        """The text goes on with the UTF-8 of `piece` -> (where the earliest match begins, its pattern), if
        there is one. What matches while the output may not stop is passed over. Raises StopRegexTooSlow."""
        self.text += self._decoder.decode(piece)
        found: list[tuple[int, int]] = []
        for i, pattern in enumerate(self._patterns):
            match = self._search(pattern, self._from[i])
            if match is not None and not match.partial and match.end() > match.start():
                found.append((match.start(), i))
            self._from[i] = len(self.text) if match is None else match.start()
        if found and may_stop:
            at, index = min(found)
            return at, self._patterns[index].pattern
        for _, i in found:
            self._from[i] = len(self.text)
        self.held = len(self.text) - min(self._from, default=len(self.text))
        return None

    def _search(self, pattern: regex.Pattern[str], start: int) -> regex.Match[str] | None:
        try:
            return pattern.search(self.text, start, partial=True, timeout=SECONDS_MAX)
        except TimeoutError:
            raise StopRegexTooSlow(f"stop_regex: '{pattern.pattern}' takes too long on this output") from None
